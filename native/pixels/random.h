// A stream of random numbers: SplitMix64 from a key (Steele, Lea and Flood 2014).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/permutation.h"

namespace headrace::pixels {

class Random {
 public:
  explicit Random(uint64_t key) : state_(key) {}

  // In [0, 1), 53 bits.
  double uniform() {
    state_ += kGolden;
    return static_cast<double>(mix64(state_) >> 11) * 0x1p-53;
  }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // In [0, n).
  int below(int n) { return std::min(n - 1, static_cast<int>(uniform() * n)); }

 private:
  uint64_t state_;
};

}  // namespace headrace::pixels
