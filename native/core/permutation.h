// A keyed permutation of [0, n): the k-th sample of an epoch, without a list of samples.
//
// Pure functions of (n, key): the same on every machine, rank and worker. Up to `kTableSizeMax`
// elements it is a Fisher-Yates table drawn from the key, so that small sets can come in any order.
// Above, it is a Feistel network over the smallest even-or-odd bit width that holds n, and cycle
// walking: a value that falls outside [0, n) is sent through again until it falls inside. The
// network's domain is below 2n, so a walk takes less than two passes on average. Memory is O(1):
// at most 16 KiB of table, otherwise the round keys.
//
// Feistel networks as permutations: Luby and Rackoff 1988; cycle walking: Black and Rogaway 2002.
// This is not encryption: the key schedule and round function are chosen for speed and statistics.
//
// An object is immutable after construction and may be used by many threads at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

namespace headrace {

// A bijection of 64-bit words in which every input bit moves every output bit (the finaliser of
// SplitMix64: Steele, Lea and Flood 2014, with the constants of Stafford's variant 13).
constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 2^64 divided by the golden ratio: the odd step that spreads counters before mixing.
inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// What a key is for: keys of different purposes share nothing. From headrace/order/hash.py.
enum class Purpose : uint64_t {
  kShuffled = 1,
  kBlocks = 2,
  kWindow = 3,
  kClasses = 4,
  kMembers = 5,
  kResident = 8,
  kPictures = 9,
  kAugmentations = 10,
  kParts = 15,
};

// `derive_key` of headrace/order/hash.py.
constexpr uint64_t derive_key(uint64_t seed, Purpose purpose,
                              std::initializer_list<uint64_t> parts) {
  uint64_t key = mix64((mix64(seed + kGolden) ^ static_cast<uint64_t>(purpose)) + kGolden);
  for (const uint64_t part : parts) key = mix64((key ^ part) + kGolden);
  return key;
}

class Permutation {
 public:
  static constexpr uint64_t kSizeMax = uint64_t{1} << 48;
  static constexpr uint64_t kTableSizeMax = 4096;
  // Four rounds fail the chi-square tests of tests/order/test_uniformity.py on the narrowest
  // networks (13 bits), six pass; two more are the margin, for about 5 ns of 16 an index.
  static constexpr size_t kRounds = 8;

  // Throws Error{kInvalidArgument} unless 1 <= n <= kSizeMax.
  Permutation(uint64_t n, uint64_t key);

  uint64_t n() const { return n_; }
  uint64_t key() const { return key_; }

  // out[i] = index at position start + i. Throws unless start <= stop <= n; `out` holds
  // stop - start elements.
  void range(uint64_t start, uint64_t stop, int64_t* out) const;

  // out[i] = index at positions[i]. Throws, before writing, if a position is outside [0, n).
  void at(std::span<const int64_t> positions, int64_t* out) const;

  // out[i] = position of indices[i]. Throws, before writing, if an index is outside [0, n).
  void inverse(std::span<const int64_t> indices, int64_t* out) const;

 private:
  void fill_table();
  uint64_t encrypt(uint64_t value) const;
  uint64_t decrypt(uint64_t value) const;
  template <bool kForward>
  void permute(int64_t* values, size_t count) const;
  void check(std::span<const int64_t> values, const char* what) const;

  uint64_t n_;
  uint64_t key_;
  unsigned low_bits_ = 0;  // the network's right half; the left half has as many bits or one more
  uint64_t low_mask_ = 0;
  uint64_t high_mask_ = 0;
  std::array<uint64_t, kRounds> round_keys_{};
  std::vector<uint16_t> table_;          // position -> index, where n <= kTableSizeMax
  std::vector<uint16_t> inverse_table_;  // index -> position
};

// Sum over the batch of a hash of (position, index), mod 2^64: independent of how an epoch is cut
// into batches and ranks, and different when any sample is missing, doubled or out of its place.
// `indices[i]` was delivered at position `position_start + i`.
uint64_t order_hash(uint64_t position_start, std::span<const int64_t> indices);

}  // namespace headrace
