// OpenRing: the daemon's end of an open ring. One thread takes at a time; programs write.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "preload/ring_layout.h"
#include "preload/shared_memory.h"

namespace headrace::preload {

struct OpenReport {
  int64_t file;  // -1: none
  int64_t process;
  int64_t what;      // Opened
  int64_t position;  // in the ring, from 0: a gap is what was lost
};

struct RingTotals {
  std::array<uint64_t, kOpenedKinds> opened;
  uint64_t copy_bytes, original_bytes, tier_copies, stats;
};

// Of a ring that another process made. Throws Error(kInvalidArgument) if `fd` is none.
RingTotals read_totals(int fd);

class OpenRing {
 public:
  // Throws Error(kInvalidArgument) unless the capacity is a power of two within the bounds.
  explicit OpenRing(uint64_t capacity);

  // What has come since the last call, oldest first; waits up to `timeout_s` for the first report.
  // Empty when none came, or when a signal did.
  std::vector<OpenReport> take(double timeout_s);
  // Reports that were overwritten, or never finished, before they were taken.
  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }
  RingTotals totals() const;

  int fd() const { return memory_.fd(); }
  uint64_t inode() const { return memory_.inode(); }
  uint64_t capacity() const { return capacity_; }
  std::byte* data() const { return memory_.data(); }

 private:
  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(memory_.data()); }
  bool waits_for_more(double timeout_s);
  bool collect(std::vector<OpenReport>* reports, uint64_t given_up);

  const uint64_t capacity_;
  SharedMemory memory_;
  uint64_t tail_ = 0;
  std::atomic<uint64_t> lost_{0};
};

}  // namespace headrace::preload
