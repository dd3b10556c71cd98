#include "core/permutation.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "core/error.h"

namespace headrace {
namespace {

// Elements in one branch-free pass of the network. Small enough to stay in the L1 cache, large
// enough that the processor always has several independent elements in flight.
constexpr size_t kLane = 512;

// A uniform draw from [0, bound), exact by rejection (Lemire 2019). Advances `state`.
uint64_t draw_below(uint64_t& state, uint64_t bound) {
  const uint64_t rejected = -bound % bound;  // 2^64 mod bound
  for (;;) {
    const auto product = static_cast<unsigned __int128>(mix64(state += kGolden)) * bound;
    if (static_cast<uint64_t>(product) >= rejected) return static_cast<uint64_t>(product >> 64);
  }
}

// n is part of the schedule: data sets of different sizes share nothing under one key.
uint64_t schedule_start(uint64_t n, uint64_t key) { return mix64(key ^ mix64(n + kGolden)); }

}  // namespace

Permutation::Permutation(uint64_t n, uint64_t key) : n_(n), key_(key) {
  if (n == 0 || n > kSizeMax) {
    throw Error(ErrorKind::kInvalidArgument,
                "n is " + std::to_string(n) + ", expected 1 to 2^48 elements");
  }
  if (n <= kTableSizeMax) {
    fill_table();
    return;
  }
  const auto bits = static_cast<unsigned>(std::bit_width(n - 1));
  low_bits_ = bits / 2;
  low_mask_ = (uint64_t{1} << low_bits_) - 1;
  high_mask_ = (uint64_t{1} << (bits - low_bits_)) - 1;
  uint64_t state = schedule_start(n, key);
  for (uint64_t& round_key : round_keys_) round_key = mix64(state += kGolden);
}

void Permutation::fill_table() {
  table_.resize(n_);
  std::iota(table_.begin(), table_.end(), uint16_t{0});
  uint64_t state = schedule_start(n_, key_);
  for (uint64_t last = n_ - 1; last > 0; --last) {
    std::swap(table_[last], table_[draw_below(state, last + 1)]);
  }
  inverse_table_.resize(n_);
  for (size_t i = 0; i < n_; ++i) inverse_table_[table_[i]] = static_cast<uint16_t>(i);
}

// Rounds change the halves in turn, each by a function of the other, so halves of different widths
// need no swap and the inverse is the same rounds backwards.
inline uint64_t Permutation::encrypt(uint64_t value) const {
  uint64_t high = value >> low_bits_;
  uint64_t low = value & low_mask_;
  for (size_t round = 0; round < kRounds; round += 2) {
    high ^= mix64(low ^ round_keys_[round]) & high_mask_;
    low ^= mix64(high ^ round_keys_[round + 1]) & low_mask_;
  }
  return high << low_bits_ | low;
}

inline uint64_t Permutation::decrypt(uint64_t value) const {
  uint64_t high = value >> low_bits_;
  uint64_t low = value & low_mask_;
  for (size_t round = kRounds; round > 0; round -= 2) {
    low ^= mix64(high ^ round_keys_[round - 1]) & low_mask_;
    high ^= mix64(low ^ round_keys_[round - 2]) & high_mask_;
  }
  return high << low_bits_ | low;
}

// In place. The first pass has no branch, so the processor overlaps elements; the few that left
// [0, n) are gathered into a list and walked on until the list is empty.
template <bool kForward>
void Permutation::permute(int64_t* values, size_t count) const {
  const auto step = [this](int64_t value) {
    const auto v = static_cast<uint64_t>(value);
    return static_cast<int64_t>(kForward ? encrypt(v) : decrypt(v));
  };
  const auto n = static_cast<int64_t>(n_);
  std::array<uint16_t, kLane> outside;
  for (size_t begin = 0; begin < count; begin += kLane) {
    int64_t* lane = values + begin;
    const size_t size = std::min(kLane, count - begin);
    size_t walking = 0;
    for (size_t i = 0; i < size; ++i) {
      lane[i] = step(lane[i]);
      outside[walking] = static_cast<uint16_t>(i);
      walking += lane[i] >= n;
    }
    while (walking > 0) {
      size_t still = 0;
      for (size_t i = 0; i < walking; ++i) {
        const uint16_t slot = outside[i];
        lane[slot] = step(lane[slot]);
        outside[still] = slot;
        still += lane[slot] >= n;
      }
      walking = still;
    }
  }
}

void Permutation::check(std::span<const int64_t> values, const char* what) const {
  for (const int64_t value : values) {
    if (static_cast<uint64_t>(value) >= n_) {
      throw Error(ErrorKind::kInvalidArgument, std::string(what) + " is " + std::to_string(value) +
                                                   ", expected 0 to " + std::to_string(n_ - 1));
    }
  }
}

void Permutation::range(uint64_t start, uint64_t stop, int64_t* out) const {
  if (start > stop || stop > n_) {
    throw Error(ErrorKind::kInvalidArgument,
                "range is " + std::to_string(start) + " to " + std::to_string(stop) +
                    ", expected 0 <= start <= stop <= " + std::to_string(n_));
  }
  if (!table_.empty()) {
    std::copy(table_.begin() + static_cast<ptrdiff_t>(start),
              table_.begin() + static_cast<ptrdiff_t>(stop), out);
    return;
  }
  std::iota(out, out + (stop - start), static_cast<int64_t>(start));
  permute<true>(out, stop - start);
}

void Permutation::at(std::span<const int64_t> positions, int64_t* out) const {
  check(positions, "position");
  if (!table_.empty()) {
    for (size_t i = 0; i < positions.size(); ++i)
      out[i] = table_[static_cast<size_t>(positions[i])];
    return;
  }
  std::copy(positions.begin(), positions.end(), out);
  permute<true>(out, positions.size());
}

void Permutation::inverse(std::span<const int64_t> indices, int64_t* out) const {
  check(indices, "index");
  if (!table_.empty()) {
    for (size_t i = 0; i < indices.size(); ++i) {
      out[i] = inverse_table_[static_cast<size_t>(indices[i])];
    }
    return;
  }
  std::copy(indices.begin(), indices.end(), out);
  permute<false>(out, indices.size());
}

uint64_t order_hash(uint64_t position_start, std::span<const int64_t> indices) {
  uint64_t sum = 0;
  for (size_t i = 0; i < indices.size(); ++i) {
    sum += mix64(mix64(position_start + i + kGolden) ^ static_cast<uint64_t>(indices[i]));
  }
  return sum;
}

}  // namespace headrace
