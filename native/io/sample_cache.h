// SampleCache: samples' bytes in memory within a quota, for the RAM tier.
//
// A placement is kept, not churned: each sample is read once an epoch, so the one that is thrown
// out would be as likely to be asked for as the one that takes its place. Samples are taken until
// the quota is full. Memory comes in slabs; a smaller quota gives the newest slabs back. How
// samples lie in them: held.h.
//
// In shared memory other processes may map index and slabs, and gather by themselves (CacheView).
// They have to be told of slabs that come and go: `version` changes with each.
//
// Thread-safe. What a look-up found stays in memory until its `Hits` go, whatever happens to the
// quota meanwhile. Belongs to the process that made it: a forked child makes its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "core/arena.h"
#include "io/batch.h"
#include "io/held.h"

namespace headrace::io {

// Memory of a cache that others may map.
struct Slab {
  uint64_t number;  // 0: the index
  BufferPtr buffer;
};

class SampleCache {
 public:
  // `samples`: in the data set. `parts`: slots per sample. `memory`: of held samples and of
  // delivered batches.
  static std::shared_ptr<SampleCache> make(uint64_t samples, uint64_t parts, uint64_t quota_bytes,
                                           Memory memory = Memory::kPrivate);

  // Copies the batch's samples that are not held, have not failed, and still fit. Returns how many.
  uint64_t insert(const Batch& batch);
  // Throws Error(kSampleNotFound) for an index outside the data set.
  std::shared_ptr<Hits> look_up(std::span<const int64_t> indices) const;
  // See gather_hits.
  std::shared_ptr<Batch> gather(const Hits& hits, const std::shared_ptr<const Batch>& misses) const;

  // Samples beyond a smaller quota are forgotten at once.
  void set_quota(uint64_t bytes);
  uint64_t quota_bytes() const;
  uint64_t held_samples() const;
  // Memory of index and slabs, those included that only a look-up still holds.
  uint64_t mapped_bytes() const;
  // Memory of delivered batches, and of buffers kept for the next ones.
  uint64_t delivered_bytes() const { return delivered_->mapped_bytes(); }

  // Changes whenever a slab, or the index, comes or goes.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }
  // The index, if there is one, and the slabs, as they are now.
  std::vector<Slab> slabs() const;

 private:
  struct OwnSlab {
    uint32_t number = 0;
    BufferPtr buffer;
    uint64_t used = 0;
    bool full = false;  // nothing more goes there
    uint64_t samples = 0;
    SlabView view;
  };

  // A sample of a batch, and where it goes.
  struct Copy {
    uint64_t sample;
    EntryAt at;
    BufferPtr slab;
  };

  SampleCache(uint64_t samples, uint64_t parts, uint64_t quota_bytes, Memory memory);
  std::vector<Copy> reserve_all(const Batch& batch);
  BufferPtr reserve(uint64_t bytes, EntryAt* at, std::unique_lock<std::mutex>& lock);
  std::optional<size_t> place_of(uint32_t number) const;
  bool make_slab(uint64_t bytes, std::unique_lock<std::mutex>& lock);
  void forget(const OwnSlab& slab);

  const uint64_t samples_;
  const uint64_t parts_;
  std::shared_ptr<Arena> memory_;
  std::shared_ptr<Arena> delivered_;
  std::mutex inserting_;  // one batch at a time gets room; taken before the other
  mutable std::mutex mutex_;
  uint64_t quota_bytes_;
  BufferPtr words_;  // of the index; null while there are no slabs
  HeldIndex index_;
  std::deque<OwnSlab> slabs_;  // their numbers ascend
  uint64_t slab_bytes_ = 0;    // mapped by slabs_ and words_
  uint64_t held_ = 0;
  uint32_t last_number_ = 0;
  bool refused_ = false;  // the system has no more memory, or files
  mutable uint64_t look_ups_ = 0;
  std::atomic<uint64_t> version_{0};
};

}  // namespace headrace::io
