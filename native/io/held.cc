#include "io/held.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace headrace::io {

void check_samples(std::span<const int64_t> indices, uint64_t samples) {
  for (const int64_t sample : indices) {
    if (sample < 0 || static_cast<uint64_t>(sample) >= samples) {
      throw Error(ErrorKind::kSampleNotFound, "there is no sample " + std::to_string(sample) +
                                                  ", expected 0 to " + std::to_string(samples) +
                                                  " - 1");
    }
  }
}

namespace {

// False: it lies outside its slab, or is another sample's.
bool read_entry(const EntryPlace& entry, int64_t sample, Hits* hits) {
  const uint64_t head = entry_head_bytes(hits->parts);
  if (entry.offset > entry.slab_bytes || entry.slab_bytes - entry.offset < head) return false;
  const std::byte* at = entry.slab + entry.offset;
  int64_t fields[2];
  std::memcpy(fields, at, sizeof fields);
  if (fields[0] != sample) return false;
  const std::byte* data = at + head;
  uint64_t left = entry.slab_bytes - entry.offset - head;
  for (uint64_t p = 0; p < hits->parts; ++p) {
    // Read once: what is checked is what is used, even if somebody writes there meanwhile.
    int64_t length;
    std::memcpy(&length, at + (2 + p) * sizeof(int64_t), sizeof length);
    const auto bytes = static_cast<uint64_t>(length);
    if (bytes > left) return false;
    hits->places.push_back({data, length});
    data += bytes;
    left -= bytes;
    hits->bytes += bytes;
  }
  hits->labels.push_back(fields[1]);
  return true;
}

}  // namespace

void read_entries(Hits* hits) {
  if (std::exchange(hits->read, true)) return;
  for (const EntryPlace& entry : hits->entries) {
    if (entry.offset < entry.slab_bytes) __builtin_prefetch(entry.slab + entry.offset);
  }
  hits->labels.reserve(hits->held.size());
  hits->places.reserve(hits->held.size() * hits->parts);
  for (size_t k = 0; k < hits->entries.size(); ++k) {
    const int64_t sample = hits->indices[static_cast<size_t>(hits->held[k])];
    if (read_entry(hits->entries[k], sample, hits)) continue;
    throw Error(ErrorKind::kCorruptStore,
                "the cache in memory is damaged: sample " + std::to_string(sample) +
                    " does not lie at " + std::to_string(hits->entries[k].offset) +
                    " of a slab of " + std::to_string(hits->entries[k].slab_bytes) + " bytes");
  }
}

std::shared_ptr<Batch> gather_hits(Arena& arena, const Hits& hits, const Batch* misses) {
  const uint64_t parts = hits.parts;
  const uint64_t read = misses == nullptr ? 0 : misses->samples;
  if (read != hits.missing.size() || (misses != nullptr && misses->parts != parts)) {
    throw Error(ErrorKind::kInvalidArgument, std::to_string(hits.missing.size()) +
                                                 " samples were missing, the batch read has " +
                                                 std::to_string(read));
  }
  auto batch = std::make_shared<Batch>();
  batch->parts = parts;
  batch->samples = hits.indices.size();
  batch->indices = hits.indices;
  if (read == 0) {
    batch->labels = hits.labels;
    copy_slots(arena, hits.places, batch.get());
    return batch;
  }
  batch->labels.resize(hits.indices.size());
  std::vector<Place> places(hits.indices.size() * parts);
  for (size_t k = 0; k < hits.held.size(); ++k) {
    const auto at = static_cast<uint64_t>(hits.held[k]);
    batch->labels[at] = hits.labels[k];
    std::copy_n(hits.places.begin() + static_cast<std::ptrdiff_t>(k * parts), parts,
                places.begin() + static_cast<std::ptrdiff_t>(at * parts));
  }
  for (uint64_t k = 0; k < read; ++k) {
    const auto at = static_cast<uint64_t>(hits.missing[k]);
    batch->labels[at] = misses->labels[k];
    for (uint64_t p = 0; p < parts; ++p) {
      places[at * parts + p] = {misses->buffer->data + misses->offsets[k * parts + p],
                                misses->lengths[k * parts + p]};
    }
  }
  batch->stats = misses->stats;
  for (Failure failure : misses->failures) {
    const auto at = static_cast<uint64_t>(hits.missing[failure.slot / parts]);
    failure.slot = at * parts + failure.slot % parts;
    batch->failures.push_back(failure);
  }
  copy_slots(arena, places, batch.get());
  return batch;
}

}  // namespace headrace::io
