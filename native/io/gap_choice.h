// GapChoice: which gaps between the extents of a batch are read rather than skipped.
//
// Joining two extents saves one request and costs the bytes between them. Requests are in flight
// many at a time, so that their latency is hidden, and what is left of their cost is some processor
// time and, in an object store, money; the bytes of a gap take bandwidth from samples at every
// depth. So gaps are joined smallest first, the most requests for the bytes, while all of them
// together stay within a share of the bytes that are wanted. Gaps shorter than what goes over the
// wire for a request anyhow are free: record headers and padding split no neighbours.
//
// Knows numbers only. `joins` must be asked once for each gap that was given, in the same order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace headrace::io {

class GapChoice {
 public:
  GapChoice() = default;
  // `gaps`: bytes between neighbours, in any order; those above `most` are never joined, those up
  // to `free` always. The others that are joined add up to `budget` bytes at most.
  GapChoice(std::vector<uint64_t> gaps, uint64_t free, uint64_t most, uint64_t budget)
      : free_(std::min(free, most)) {
    std::erase_if(gaps, [&](uint64_t gap) { return gap <= free_ || gap > most; });
    std::sort(gaps.begin(), gaps.end());
    for (const uint64_t gap : gaps) {
      if (gap > budget) break;
      budget -= gap;
      if (gap != largest_) equal_left_ = 0;
      largest_ = gap;
      ++equal_left_;
    }
  }

  bool joins(uint64_t gap) {
    if (gap <= free_) return true;
    if (gap != largest_) return gap < largest_;
    if (equal_left_ == 0) return false;
    --equal_left_;
    return true;
  }

 private:
  uint64_t free_ = 0;
  uint64_t largest_ = 0;     // of the joined gaps
  uint64_t equal_left_ = 0;  // how many gaps of just this size are still joined
};

}  // namespace headrace::io
