// SampleCache: samples' bytes in memory within a quota, for the RAM tier.
//
// A placement is kept, not churned: each sample is read once an epoch, so the one that is thrown
// out would be as likely to be asked for as the one that takes its place. Samples are taken until
// the quota is full. Memory comes in slabs; a smaller quota gives the newest slabs back.
//
// Thread-safe. What a look-up found stays in memory until its `Hits` go, whatever happens to the
// quota meanwhile. Belongs to the process that made it: a forked child makes its own.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/arena.h"
#include "io/assemble.h"
#include "io/batch.h"

namespace headrace::io {

// What a look-up found: the samples that are held, and the memory that they lie in.
struct Hits {
  std::vector<int64_t> indices;  // as asked
  std::vector<int64_t> missing;  // positions in `indices`, ascending
  std::vector<int64_t> held;     // likewise
  std::vector<Place> places;     // slots of the held samples
  std::vector<int64_t> labels;   // of the held samples
  std::vector<BufferPtr> slabs;  // keep `places` valid
  uint64_t bytes = 0;            // of the held samples
};

class SampleCache {
 public:
  // `samples`: in the data set. `parts`: slots per sample. The index takes 4 bytes for each sample
  // of the data set, beside the quota. `delivered`: the memory of delivered batches.
  static std::shared_ptr<SampleCache> make(uint64_t samples, uint64_t parts, uint64_t quota_bytes,
                                           Memory delivered = Memory::kPrivate);

  // Copies the batch's samples that are not held, have not failed, and still fit. Returns how many.
  uint64_t insert(const Batch& batch);
  // Throws Error(kSampleNotFound) for an index outside the data set.
  std::shared_ptr<Hits> look_up(std::span<const int64_t> indices) const;
  // One batch of what was held and what was read for the rest: sample k of `misses` is what was
  // asked for at `hits.missing[k]`. `misses` is null where nothing was missing.
  std::shared_ptr<Batch> gather(const Hits& hits, const std::shared_ptr<const Batch>& misses) const;

  // Samples beyond a smaller quota are forgotten at once.
  void set_quota(uint64_t bytes);
  uint64_t quota_bytes() const;
  uint64_t held_samples() const;
  // Memory of the slabs, those included that only a look-up still holds.
  uint64_t mapped_bytes() const;
  // Memory of delivered batches, and of buffers kept for the next ones.
  uint64_t delivered_bytes() const { return delivered_->mapped_bytes(); }

 private:
  struct Entry {
    uint32_t slab;
    uint64_t offset;  // of the slots' lengths, which the bytes follow
    int64_t label;
    int64_t index;
  };

  SampleCache(uint64_t samples, uint64_t parts, uint64_t quota_bytes, Memory delivered);
  std::byte* reserve(uint64_t bytes, Entry* entry);

  const uint64_t parts_;
  std::shared_ptr<Arena> memory_;
  std::shared_ptr<Arena> delivered_;
  mutable std::mutex mutex_;
  uint64_t quota_bytes_;
  std::vector<uint32_t> entry_of_;  // sample -> number in entries_ + 1; 0: not held
  std::vector<Entry> entries_;      // in the order of their slabs
  std::vector<BufferPtr> slabs_;
  uint64_t slab_bytes_ = 0;  // mapped by slabs_
  uint64_t used_ = 0;        // of the last slab
};

}  // namespace headrace::io
