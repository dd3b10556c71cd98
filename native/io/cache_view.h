// CacheView: a cache in shared memory as another process sees it.
//
// Looks samples up in the index and slabs that the cache's owner has sent (SampleCache), without a
// word to the owner. Believes nothing of what it finds there (see held.h). Of slabs that it was not
// told of, or was told to drop, nothing is held.
//
// Thread-safe. What a look-up found stays mapped until its `Hits` go. Of no use in a forked child.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>

#include "core/shared_mapping.h"
#include "io/held.h"

namespace headrace::io {

class CacheView {
 public:
  // `words`: the index, 8 bytes for each of `samples`; `owner` keeps it.
  CacheView(std::span<const std::byte> words, std::shared_ptr<const void> owner, uint64_t samples,
            uint64_t parts);
  // Throws as SharedMapping::of does.
  static std::shared_ptr<CacheView> of(int fd, uint64_t bytes, uint64_t samples, uint64_t parts);

  void add_slab(uint32_t number, int fd, uint64_t bytes);
  void add_slab(uint32_t number, std::span<const std::byte> memory,
                std::shared_ptr<const void> owner);
  // What look-ups found there stays valid.
  void drop_slab(uint32_t number);

  // Entries are not read yet.
  std::shared_ptr<Hits> look_up(std::span<const int64_t> indices) const;

  uint64_t samples() const { return index_.samples(); }
  uint64_t parts() const { return parts_; }
  // Address space of index and slabs; the memory is the owner's.
  uint64_t mapped_bytes() const;

 private:
  const HeldIndex index_;
  const std::shared_ptr<const void> index_owner_;
  const uint64_t parts_;
  mutable std::mutex mutex_;
  std::unordered_map<uint32_t, SlabView> slabs_;
  mutable uint64_t look_ups_ = 0;
};

}  // namespace headrace::io
