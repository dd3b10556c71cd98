#include "io/sample_cache.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"

namespace headrace::io {
namespace {

// A 64th of the quota within these bounds: small enough that a quota is met closely, large enough
// that huge pages fill it and samples of 100 kB waste little at the end.
constexpr uint64_t kSlabBytes = uint64_t{4} << 20;
constexpr uint64_t kSlabBytesMax = uint64_t{64} << 20;
constexpr uint64_t kSlabBytesMin = uint64_t{64} << 10;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kDeliveredRetained = uint64_t{64} << 20;
// Shared buffers go round among many clients, and cost each of them a mapping when they are new.
constexpr uint64_t kSharedRetained = uint64_t{256} << 20;

uint64_t align_up(uint64_t value) { return (value + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

std::shared_ptr<SampleCache> SampleCache::make(uint64_t samples, uint64_t parts,
                                               uint64_t quota_bytes, Memory delivered) {
  if (parts == 0 || samples >= UINT32_MAX) {
    throw Error(ErrorKind::kInvalidArgument,
                "a cache of " + std::to_string(samples) + " samples of " + std::to_string(parts) +
                    " parts, expected fewer than 2^32 - 1 samples of at least one part");
  }
  return std::shared_ptr<SampleCache>(new SampleCache(samples, parts, quota_bytes, delivered));
}

SampleCache::SampleCache(uint64_t samples, uint64_t parts, uint64_t quota_bytes, Memory delivered)
    : parts_(parts),
      memory_(Arena::make(0)),
      delivered_(Arena::make(delivered == Memory::kShared ? kSharedRetained : kDeliveredRetained,
                             delivered)),
      quota_bytes_(quota_bytes),
      entry_of_(samples) {}

// Room for `bytes` in the newest slab, or in a new one; null when the quota is used up.
std::byte* SampleCache::reserve(uint64_t bytes, Entry* entry) {
  if (slabs_.empty() || slabs_.back()->capacity - used_ < bytes) {
    const uint64_t left = quota_bytes_ > slab_bytes_ ? quota_bytes_ - slab_bytes_ : 0;
    if (left < bytes || left < kSlabBytesMin) return nullptr;
    const uint64_t slab_bytes = std::clamp(quota_bytes_ / 64, kSlabBytes, kSlabBytesMax);
    // The arena rounds up by as much as an eighth; what would pass the quota goes straight back.
    BufferPtr slab = memory_->acquire(std::max(bytes, std::min(slab_bytes, left / 9 * 8)));
    if (slab->capacity > left) return nullptr;
    slab_bytes_ += slab->capacity;
    slabs_.push_back(std::move(slab));
    used_ = 0;
  }
  entry->slab = static_cast<uint32_t>(slabs_.size() - 1);
  entry->offset = used_;
  used_ += bytes;
  return slabs_.back()->data + entry->offset;
}

uint64_t SampleCache::insert(const Batch& batch) {
  if (batch.parts != parts_) throw Error(ErrorKind::kInvalidArgument, "the batch has other parts");
  std::vector<bool> failed(batch.samples);
  for (const Failure& failure : batch.failures) failed[failure.slot / parts_] = true;
  std::lock_guard lock(mutex_);
  uint64_t taken = 0;
  for (uint64_t k = 0; k < batch.samples; ++k) {
    const int64_t index = batch.indices[k];
    if (failed[k] || index < 0 || static_cast<uint64_t>(index) >= entry_of_.size()) continue;
    if (entry_of_[static_cast<uint64_t>(index)] != 0) continue;
    const int64_t* lengths = batch.lengths.data() + k * parts_;
    uint64_t bytes = parts_ * sizeof(int64_t);
    for (uint64_t p = 0; p < parts_; ++p) bytes += static_cast<uint64_t>(lengths[p]);
    Entry entry{0, 0, batch.labels[k], index};
    std::byte* to = reserve(align_up(bytes), &entry);
    if (to == nullptr) continue;  // a smaller one may still fit
    std::memcpy(to, lengths, parts_ * sizeof(int64_t));
    to += parts_ * sizeof(int64_t);
    for (uint64_t p = 0; p < parts_; ++p) {
      std::memcpy(to, batch.buffer->data + batch.offsets[k * parts_ + p],
                  static_cast<size_t>(lengths[p]));
      to += lengths[p];
    }
    entries_.push_back(entry);
    entry_of_[static_cast<uint64_t>(index)] = static_cast<uint32_t>(entries_.size());
    ++taken;
  }
  return taken;
}

std::shared_ptr<Hits> SampleCache::look_up(std::span<const int64_t> indices) const {
  auto hits = std::make_shared<Hits>();
  hits->indices.assign(indices.begin(), indices.end());
  std::vector<uint32_t> slabs;
  std::lock_guard lock(mutex_);
  for (size_t k = 0; k < indices.size(); ++k) {
    if (indices[k] < 0 || static_cast<uint64_t>(indices[k]) >= entry_of_.size()) {
      throw Error(ErrorKind::kSampleNotFound, "there is no sample " + std::to_string(indices[k]) +
                                                  ", expected 0 to " +
                                                  std::to_string(entry_of_.size()) + " - 1");
    }
    const uint32_t number = entry_of_[static_cast<uint64_t>(indices[k])];
    if (number == 0) {
      hits->missing.push_back(static_cast<int64_t>(k));
      continue;
    }
    const Entry& entry = entries_[number - 1];
    hits->held.push_back(static_cast<int64_t>(k));
    hits->labels.push_back(entry.label);
    const std::byte* head = slabs_[entry.slab]->data + entry.offset;
    const std::byte* data = head + parts_ * sizeof(int64_t);
    for (uint64_t p = 0; p < parts_; ++p) {
      int64_t length;
      std::memcpy(&length, head + p * sizeof(int64_t), sizeof length);
      hits->places.push_back({data, length});
      hits->bytes += static_cast<uint64_t>(length);
      data += length;
    }
    slabs.push_back(entry.slab);
  }
  std::sort(slabs.begin(), slabs.end());
  slabs.erase(std::unique(slabs.begin(), slabs.end()), slabs.end());
  for (const uint32_t slab : slabs) hits->slabs.push_back(slabs_[slab]);
  return hits;
}

std::shared_ptr<Batch> SampleCache::gather(const Hits& hits,
                                           const std::shared_ptr<const Batch>& misses) const {
  const uint64_t read = misses == nullptr ? 0 : misses->samples;
  if (read != hits.missing.size() || (misses != nullptr && misses->parts != parts_)) {
    throw Error(ErrorKind::kInvalidArgument, std::to_string(hits.missing.size()) +
                                                 " samples were missing, the batch read has " +
                                                 std::to_string(read));
  }
  auto batch = std::make_shared<Batch>();
  batch->parts = parts_;
  batch->samples = hits.indices.size();
  batch->indices = hits.indices;
  batch->labels.resize(hits.indices.size());
  std::vector<Place> places(hits.indices.size() * parts_);
  for (size_t k = 0; k < hits.held.size(); ++k) {
    const auto at = static_cast<uint64_t>(hits.held[k]);
    batch->labels[at] = hits.labels[k];
    std::copy_n(hits.places.begin() + static_cast<std::ptrdiff_t>(k * parts_), parts_,
                places.begin() + static_cast<std::ptrdiff_t>(at * parts_));
  }
  for (uint64_t k = 0; k < read; ++k) {
    const auto at = static_cast<uint64_t>(hits.missing[k]);
    batch->labels[at] = misses->labels[k];
    for (uint64_t p = 0; p < parts_; ++p) {
      places[at * parts_ + p] = {misses->buffer->data + misses->offsets[k * parts_ + p],
                                 misses->lengths[k * parts_ + p]};
    }
  }
  if (misses != nullptr) {
    batch->stats = misses->stats;
    for (Failure failure : misses->failures) {
      const auto at = static_cast<uint64_t>(hits.missing[failure.slot / parts_]);
      failure.slot = at * parts_ + failure.slot % parts_;
      batch->failures.push_back(failure);
    }
  }
  copy_slots(*delivered_, places, batch.get());
  return batch;
}

void SampleCache::set_quota(uint64_t bytes) {
  std::vector<BufferPtr> released;  // unmapped without the lock
  std::lock_guard lock(mutex_);
  quota_bytes_ = bytes;
  const size_t before = slabs_.size();
  while (!slabs_.empty() && slab_bytes_ > quota_bytes_) {
    slab_bytes_ -= slabs_.back()->capacity;
    released.push_back(std::move(slabs_.back()));
    slabs_.pop_back();
  }
  if (slabs_.size() == before) return;
  while (!entries_.empty() && entries_.back().slab >= slabs_.size()) {
    entry_of_[static_cast<uint64_t>(entries_.back().index)] = 0;
    entries_.pop_back();
  }
  used_ = slabs_.empty() ? 0 : slabs_.back()->capacity;  // what was left of it stays unused
}

uint64_t SampleCache::quota_bytes() const {
  std::lock_guard lock(mutex_);
  return quota_bytes_;
}

uint64_t SampleCache::held_samples() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

uint64_t SampleCache::mapped_bytes() const { return memory_->mapped_bytes(); }

}  // namespace headrace::io
