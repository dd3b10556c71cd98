// Slices: which positions of an epoch a rank takes: src/headrace/order/slices.py, batch by batch.
//
// The positions of all ranks' next batches are a global batch of `world * n`, of which rank r takes
// the r-th contiguous slice. What is left at the end of an epoch is the tail's.
#pragma once

#include <algorithm>
#include <cstdint>

namespace headrace::capi {

enum class Tail { kExact = 1, kPad = 2, kDrop = 3 };

struct Span {
  uint64_t start = 0;
  uint64_t stop = 0;   // may lie past the epoch's end where the tail is padded: it wraps
  uint64_t after = 0;  // the position of all ranks afterwards
  bool end = false;    // no step is left
};

struct Slices {
  uint64_t length = 0;
  uint32_t rank = 0;
  uint32_t world = 1;
  Tail tail = Tail::kExact;

  // REQUIRES: from <= length, 1 <= n <= 2^31.
  Span next(uint64_t from, uint64_t n) const {
    const uint64_t left = length - from;
    const uint64_t whole = n * world;
    if (left == 0 || (tail == Tail::kDrop && left < whole)) return {from, from, from, true};
    if (tail == Tail::kExact && left < whole) {
      const uint64_t share = left / world, more = left % world;
      const uint64_t start = from + rank * share + std::min<uint64_t>(rank, more);
      return {start, start + share + (rank < more), length, false};
    }
    const uint64_t start = from + rank * n;
    return {start, start + n, std::min(from + whole, length), false};
  }
};

}  // namespace headrace::capi
