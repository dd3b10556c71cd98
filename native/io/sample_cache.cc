#include "io/sample_cache.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>

#include "core/error.h"

namespace headrace::io {
namespace {

// A 64th of the quota within these bounds: small enough that a quota is met closely, large enough
// that huge pages fill it and samples of 100 kB waste little at the end. Beyond 128 GiB slabs grow
// with the quota: each of shared memory costs a descriptor.
constexpr uint64_t kSlabBytes = uint64_t{4} << 20;
constexpr uint64_t kSlabBytesMax = uint64_t{64} << 20;
constexpr uint64_t kSlabBytesMin = uint64_t{64} << 10;
constexpr uint64_t kSlabsMax = 2048;
constexpr uint64_t kDeliveredRetained = uint64_t{64} << 20;
// Shared buffers go round among many clients, and cost each of them a mapping when they are new.
constexpr uint64_t kSharedRetained = uint64_t{256} << 20;

uint64_t align_up(uint64_t value) {
  return (value + kEntryAlignment - 1) / kEntryAlignment * kEntryAlignment;
}

// The last quarter of a process's descriptors is for other things than samples that are kept.
bool files_are_short(int fd) {
  rlimit files{};
  return fd >= 0 && getrlimit(RLIMIT_NOFILE, &files) == 0 &&
         static_cast<rlim_t>(fd) >= files.rlim_cur / 4 * 3;
}

uint64_t slab_bytes_of(uint64_t quota_bytes) {
  const uint64_t most = std::max(kSlabBytesMax, quota_bytes / kSlabsMax);
  return std::clamp(quota_bytes / 64, kSlabBytes, most);
}

}  // namespace

std::shared_ptr<SampleCache> SampleCache::make(uint64_t samples, uint64_t parts,
                                               uint64_t quota_bytes, Memory memory) {
  if (parts == 0 || samples >= UINT32_MAX) {
    throw Error(ErrorKind::kInvalidArgument,
                "a cache of " + std::to_string(samples) + " samples of " + std::to_string(parts) +
                    " parts, expected fewer than 2^32 - 1 samples of at least one part");
  }
  return std::shared_ptr<SampleCache>(new SampleCache(samples, parts, quota_bytes, memory));
}

SampleCache::SampleCache(uint64_t samples, uint64_t parts, uint64_t quota_bytes, Memory memory)
    : samples_(samples),
      parts_(parts),
      // What is given back is never used again: others may still look at it.
      memory_(Arena::make(0, memory == Memory::kShared ? Memory::kSharedSmallPages : memory)),
      delivered_(
          Arena::make(memory == Memory::kShared ? kSharedRetained : kDeliveredRetained, memory)),
      quota_bytes_(quota_bytes) {}

// A new slab for at least `bytes`; false where the quota is used up, or the system says no. Without
// the lock while memory is made, which takes as long as copying it full.
bool SampleCache::make_slab(uint64_t bytes, std::unique_lock<std::mutex>& lock) {
  // What was given back and is still looked at counts too.
  const uint64_t mapped = memory_->mapped_bytes();
  uint64_t left = quota_bytes_ > mapped ? quota_bytes_ - mapped : 0;
  if (left < bytes || left < kSlabBytesMin || refused_) return false;
  if (bytes > kSlabBytesLimit || last_number_ == UINT32_MAX) return false;
  const bool first = words_ == nullptr;
  const uint64_t index_bytes = samples_ * sizeof(uint64_t);
  if (first && index_bytes > left) return false;
  const uint64_t slab_bytes = slab_bytes_of(quota_bytes_);
  BufferPtr words;
  BufferPtr buffer;
  lock.unlock();
  try {
    if (first) {
      words = memory_->acquire(index_bytes);
      left -= std::min<uint64_t>(left, words->capacity);
    }
    if (left >= bytes && left >= kSlabBytesMin) {
      // The arena rounds up by as much as an eighth; what would pass the quota goes straight back.
      buffer = memory_->acquire(std::max(bytes, std::min(slab_bytes, left / 9 * 8)));
    }
  } catch (const Error&) {
    buffer = nullptr;
    left = 0;
  }
  lock.lock();
  if (buffer == nullptr || files_are_short(buffer->fd)) {
    refused_ = refused_ || left == 0 || buffer != nullptr;
    return false;
  }
  // The quota may have become another one meanwhile.
  const uint64_t more = buffer->capacity + (first ? words->capacity : 0);
  if (buffer->capacity > left || first != (words_ == nullptr)) return false;
  if (slab_bytes_ + more > quota_bytes_) return false;
  if (first) {
    index_ = HeldIndex(words->data, samples_);
    words_ = std::move(words);
  }
  slab_bytes_ += more;
  OwnSlab slab;
  slab.number = ++last_number_;
  slab.buffer = buffer;
  slab.view = {buffer->data, std::min<uint64_t>(buffer->capacity, kSlabBytesLimit), buffer, 0};
  slabs_.push_back(std::move(slab));
  version_.fetch_add(1, std::memory_order_release);
  return true;
}

// Room for `bytes` in the newest slab, or in a new one; null when there is none.
BufferPtr SampleCache::reserve(uint64_t bytes, EntryAt* at, std::unique_lock<std::mutex>& lock) {
  if (slabs_.empty() || slabs_.back().full ||
      slabs_.back().view.size - slabs_.back().used < bytes) {
    if (!make_slab(bytes, lock)) return nullptr;
  }
  OwnSlab& slab = slabs_.back();
  *at = {slab.number, slab.used};
  slab.used += bytes;
  return slab.buffer;
}

// Where the slab of this number stands, if it is still there.
std::optional<size_t> SampleCache::place_of(uint32_t number) const {
  const auto at = std::lower_bound(slabs_.begin(), slabs_.end(), number,
                                   [](const OwnSlab& slab, uint32_t n) { return slab.number < n; });
  if (at == slabs_.end() || at->number != number) return std::nullopt;
  return static_cast<size_t>(at - slabs_.begin());
}

uint64_t SampleCache::insert(const Batch& batch) {
  if (batch.parts != parts_) throw Error(ErrorKind::kInvalidArgument, "the batch has other parts");
  const std::vector<Copy> copies = reserve_all(batch);
  // Without the lock: copies take as long as all else here by a hundred times.
  for (const Copy& copy : copies) {
    std::byte* to = copy.slab->data + copy.at.offset + entry_head_bytes(parts_);
    for (uint64_t p = 0; p < parts_; ++p) {
      const auto length = static_cast<size_t>(batch.lengths[copy.sample * parts_ + p]);
      std::memcpy(to, batch.buffer->data + batch.offsets[copy.sample * parts_ + p], length);
      to += length;
    }
  }
  std::lock_guard lock(mutex_);
  uint64_t taken = 0;
  for (const Copy& copy : copies) {
    const int64_t index = batch.indices[copy.sample];
    const auto place = place_of(copy.at.slab);  // none: it went with a smaller quota
    if (!place || index_.load(index).slab != 0) continue;
    index_.store(index, copy.at);
    ++slabs_[*place].samples;
    ++taken;
  }
  held_ += taken;
  return taken;
}

// Room for the batch's samples that are not held, and the heads of their entries there.
std::vector<SampleCache::Copy> SampleCache::reserve_all(const Batch& batch) {
  std::vector<bool> failed(batch.samples);
  for (const Failure& failure : batch.failures) failed[failure.slot / parts_] = true;
  std::vector<Copy> copies;
  copies.reserve(batch.samples);
  std::unordered_set<int64_t> reserved;
  const std::lock_guard one(inserting_);
  std::unique_lock lock(mutex_);
  refused_ = false;
  for (uint64_t k = 0; k < batch.samples; ++k) {
    const int64_t index = batch.indices[k];
    if (failed[k] || index < 0 || static_cast<uint64_t>(index) >= samples_) continue;
    if (words_ != nullptr && index_.load(index).slab != 0) continue;
    if (reserved.contains(index)) continue;  // a sampler may ask for one twice in a batch
    const int64_t* lengths = batch.lengths.data() + k * parts_;
    uint64_t bytes = entry_head_bytes(parts_);
    for (uint64_t p = 0; p < parts_; ++p) bytes += static_cast<uint64_t>(lengths[p]);
    Copy copy{k, {}, nullptr};
    copy.slab = reserve(align_up(bytes), &copy.at, lock);
    if (copy.slab == nullptr) continue;  // a smaller one may still fit
    std::byte* head = copy.slab->data + copy.at.offset;
    std::memcpy(head, &index, sizeof index);
    std::memcpy(head + sizeof index, &batch.labels[k], sizeof(int64_t));
    std::memcpy(head + 2 * sizeof index, lengths, parts_ * sizeof(int64_t));
    copies.push_back(std::move(copy));
    reserved.insert(index);
  }
  return copies;
}

std::shared_ptr<Hits> SampleCache::look_up(std::span<const int64_t> indices) const {
  std::lock_guard lock(mutex_);
  if (words_ == nullptr) {
    check_samples(indices, samples_);
    auto hits = std::make_shared<Hits>();
    hits->parts = parts_;
    hits->read = true;
    hits->indices.assign(indices.begin(), indices.end());
    for (size_t k = 0; k < indices.size(); ++k) hits->missing.push_back(static_cast<int64_t>(k));
    return hits;
  }
  auto hits = io::look_up(index_, parts_, indices, ++look_ups_, [&](uint32_t number) {
    const auto place = place_of(number);
    return place ? &slabs_[*place].view : nullptr;
  });
  read_entries(hits.get());
  return hits;
}

std::shared_ptr<Batch> SampleCache::gather(const Hits& hits,
                                           const std::shared_ptr<const Batch>& misses) const {
  return gather_hits(*delivered_, hits, misses.get());
}

// Takes the slab's samples out of the index, and none that another slab holds: where two batches
// got room for a sample at once, the entry of one is nobody's.
void SampleCache::forget(const OwnSlab& slab) {
  for (uint64_t at = 0; at < slab.used;) {
    const std::byte* head = slab.buffer->data + at;
    int64_t index;
    std::memcpy(&index, head, sizeof index);
    if (index_.load(index).slab == slab.number) index_.store(index, {});
    uint64_t bytes = entry_head_bytes(parts_);
    for (uint64_t p = 0; p < parts_; ++p) {
      int64_t length;
      std::memcpy(&length, head + (2 + p) * sizeof(int64_t), sizeof length);
      bytes += static_cast<uint64_t>(length);
    }
    at += align_up(bytes);
  }
  held_ -= slab.samples;
}

void SampleCache::set_quota(uint64_t bytes) {
  std::vector<BufferPtr> released;  // unmapped without the lock
  std::lock_guard lock(mutex_);
  quota_bytes_ = bytes;
  while (!slabs_.empty() && slab_bytes_ > quota_bytes_) {
    OwnSlab& slab = slabs_.back();
    forget(slab);
    slab_bytes_ -= slab.buffer->capacity;
    released.push_back(std::move(slab.buffer));
    released.push_back(std::static_pointer_cast<const Buffer>(slab.view.owner));
    slabs_.pop_back();
  }
  if (released.empty()) return;
  if (slabs_.empty()) {
    slab_bytes_ -= words_->capacity;
    released.push_back(std::exchange(words_, nullptr));
    index_ = {};
  } else {
    slabs_.back().full = true;  // what was left of it stays unused
  }
  version_.fetch_add(1, std::memory_order_release);
}

uint64_t SampleCache::quota_bytes() const {
  std::lock_guard lock(mutex_);
  return quota_bytes_;
}

uint64_t SampleCache::held_samples() const {
  std::lock_guard lock(mutex_);
  return held_;
}

uint64_t SampleCache::mapped_bytes() const { return memory_->mapped_bytes(); }

std::vector<Slab> SampleCache::slabs() const {
  std::lock_guard lock(mutex_);
  std::vector<Slab> found;
  if (words_ != nullptr) found.push_back({0, words_});
  for (const OwnSlab& slab : slabs_) found.push_back({slab.number, slab.buffer});
  return found;
}

}  // namespace headrace::io
