// Shuffled: the global order of a seed and an epoch, the same as src/headrace/order/shuffled.py.
#pragma once

#include <cstdint>
#include <vector>

#include "core/permutation.h"

namespace headrace::capi {

inline constexpr uint64_t kEpochMax = 0xFFFFFFFF;

// The key of an epoch's permutation: `derive_key(seed, Purpose.SHUFFLED, epoch)` of order/hash.py.
constexpr uint64_t epoch_key(uint64_t seed, uint64_t epoch) {
  constexpr uint64_t kPurposeShuffled = 1;
  return derive_key(seed, {kPurposeShuffled, epoch});
}

// The indices at positions `start` to `stop` - 1, which start over past the end.
inline std::vector<int64_t> wrapped_indices(const Permutation& order, uint64_t start,
                                            uint64_t stop) {
  std::vector<int64_t> out(stop - start);
  for (uint64_t at = start; at < stop;) {
    const uint64_t first = at % order.n();
    const uint64_t last = std::min(order.n(), first + (stop - at));
    order.range(first, last, out.data() + (at - start));
    at += last - first;
  }
  return out;
}

}  // namespace headrace::capi
