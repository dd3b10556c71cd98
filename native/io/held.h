// Held samples: how they lie in memory that other processes may look at, and what a look-up finds.
//
// An index has one word for each sample of the data set: the number of a slab and where in it the
// sample's entry begins, or 0. An entry begins at a cache line: the sample's index, its label, the
// length of each part (int64 all), then the parts' bytes.
//
// An entry is whole before its word is stored, nothing of a slab is written twice, and the number
// of a slab is never used again. So whoever has loaded a word, and has the slab of that number, may
// read the entry for as long as the slab is mapped, whatever happens to the word meanwhile: no
// lock, and no second look after the copy.
//
// Readers believe nothing: an entry that lies outside its slab or is another sample's is an error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "core/arena.h"
#include "io/assemble.h"
#include "io/batch.h"

namespace headrace::io {

inline constexpr uint64_t kEntryAlignment = 64;

// Where an entry begins. Slab 0: nowhere.
struct EntryAt {
  uint32_t slab = 0;
  uint64_t offset = 0;  // a multiple of kEntryAlignment

  static EntryAt of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), (word & UINT32_MAX) * kEntryAlignment};
  }
  uint64_t word() const { return uint64_t{slab} << 32 | offset / kEntryAlignment; }
};
inline constexpr uint64_t kSlabBytesLimit = uint64_t{UINT32_MAX} * kEntryAlignment;

// The words of the samples, in memory of somebody else's.
class HeldIndex {
 public:
  HeldIndex() = default;
  // `words`: 8 bytes for each sample.
  HeldIndex(const std::byte* words, uint64_t samples) : words_(words), samples_(samples) {}

  uint64_t samples() const { return samples_; }
  void prefetch(int64_t sample) const {
    __builtin_prefetch(words_ + static_cast<uint64_t>(sample) * sizeof(uint64_t));
  }
  // REQUIRES: 0 <= sample < samples().
  EntryAt load(int64_t sample) const {
    return EntryAt::of(word(sample).load(std::memory_order_acquire));
  }
  // The memory must be the caller's to write.
  void store(int64_t sample, EntryAt at) const {
    word(sample).store(at.word(), std::memory_order_release);
  }

 private:
  std::atomic_ref<uint64_t> word(int64_t sample) const {
    auto* words = reinterpret_cast<uint64_t*>(const_cast<std::byte*>(words_));
    return std::atomic_ref<uint64_t>(words[sample]);
  }

  const std::byte* words_ = nullptr;
  uint64_t samples_ = 0;
};

// What is written before a sample's bytes.
inline uint64_t entry_head_bytes(uint64_t parts) { return (2 + parts) * sizeof(int64_t); }

// A slab as a look-up sees it.
struct SlabView {
  const std::byte* data = nullptr;
  uint64_t size = 0;
  std::shared_ptr<const void> owner;
  mutable uint64_t looked_up = 0;  // the look-up that saw it last
};

// Where a sample's entry should be.
struct EntryPlace {
  const std::byte* slab;
  uint64_t slab_bytes;
  uint64_t offset;
};

// What a look-up found: the samples that are held, and the memory that they lie in.
struct Hits : std::enable_shared_from_this<Hits> {
  uint64_t parts = 1;
  std::vector<int64_t> indices;                    // as asked
  std::vector<int64_t> missing;                    // positions in `indices`, ascending
  std::vector<int64_t> held;                       // likewise
  std::vector<EntryPlace> entries;                 // of the held samples
  std::vector<std::shared_ptr<const void>> slabs;  // where they lie
  // When they were read:
  bool read = false;
  std::vector<Place> places;    // slots of the held samples
  std::vector<int64_t> labels;  // of the held samples
  uint64_t bytes = 0;           // of the held samples
};

// Throws Error(kSampleNotFound) unless all lie in a data set of so many samples.
void check_samples(std::span<const int64_t> indices, uint64_t samples);

// Looks samples up in the index alone: entries are read when they are needed. `slab_of(number)`: a
// SlabView or null. `look_up_number`: of this look-up, never twice the same for one set of slabs.
// Throws as `check_samples` does.
template <class SlabOf>
std::shared_ptr<Hits> look_up(const HeldIndex& index, uint64_t parts,
                              std::span<const int64_t> indices, uint64_t look_up_number,
                              SlabOf&& slab_of) {
  auto hits = std::make_shared<Hits>();
  hits->parts = parts;
  hits->indices.assign(indices.begin(), indices.end());
  check_samples(indices, index.samples());
  for (const int64_t sample : indices) index.prefetch(sample);
  hits->held.reserve(indices.size());
  hits->entries.reserve(indices.size());
  for (size_t k = 0; k < indices.size(); ++k) {
    const EntryAt at = index.load(indices[k]);
    const SlabView* slab = at.slab == 0 ? nullptr : slab_of(at.slab);
    if (slab == nullptr) {
      hits->missing.push_back(static_cast<int64_t>(k));
      continue;
    }
    hits->held.push_back(static_cast<int64_t>(k));
    hits->entries.push_back({slab->data, slab->size, at.offset});
    if (slab->looked_up != look_up_number) {
      slab->looked_up = look_up_number;
      hits->slabs.push_back(slab->owner);
    }
  }
  return hits;
}

// Reads the entries of a look-up, if that was not done. Throws Error(kCorruptStore) for one that
// lies outside its slab or is another sample's.
void read_entries(Hits* hits);

// One batch of what was held and what was read for the rest: sample k of `misses` is what was
// asked for at `hits.missing[k]`. `misses` is null where nothing was missing. REQUIRES: entries
// were read.
std::shared_ptr<Batch> gather_hits(Arena& arena, const Hits& hits, const Batch* misses);

}  // namespace headrace::io
