// Orders: which sample comes when, as pure functions of (seed, epoch, position).
//
// What each order is for, and what it costs in randomness, says src/headrace/order; this is where
// they are computed, for Python (which shuffles by `Permutation`, as `ShuffledOrder` does) and for
// C. Sequences are promised: a run that stopped goes on with a later version, so none of this may
// ever give other indices.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "core/permutation.h"

namespace headrace {

inline constexpr uint64_t kEpochMax = 0xFFFFFFFF;

using Interval = std::pair<uint64_t, uint64_t>;  // the first, and behind the last

class Order {
 public:
  virtual ~Order() = default;
  // out[i] = the sample at position start + i. REQUIRES epoch <= kEpochMax, and that start <= stop
  // <= the positions of an epoch.
  virtual void indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const = 0;
};

// The samples at positions `start` to `stop` - 1 of an epoch with `length` positions; they start
// over past the end.
std::vector<int64_t> wrapped(const Order& order, uint64_t length, uint64_t epoch, uint64_t start,
                             uint64_t stop);

// Constructors throw Error{kInvalidArgument} for a number that is out of bounds.

class SequentialOrder final : public Order {
 public:
  void indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const override;
};

class ShuffledOrder final : public Order {
 public:
  ShuffledOrder(uint64_t samples, uint64_t seed);
  void indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const override;

 private:
  uint64_t samples_;
  uint64_t seed_;
};

// Blocks of consecutive samples come in a shuffled order; the samples of `window_blocks` successive
// ones are shuffled together. The last block of the data may be short, wherever it comes.
class BlockedOrder final : public Order {
 public:
  BlockedOrder(uint64_t samples, uint64_t block_samples, uint64_t window_blocks, uint64_t seed);
  void indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const override;
  // The positions of the window that holds one. REQUIRES position < samples.
  Interval window_at(uint64_t epoch, uint64_t position) const;

  using State = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;  // the constructor's arguments
  State state() const { return {samples_, block_samples_, window_blocks_, seed_}; }

 private:
  class Layout;
  uint64_t samples_;
  uint64_t block_samples_;
  uint64_t window_blocks_;
  uint64_t blocks_;
  uint64_t seed_;
};

// Numbers that lie in ascending intervals, counted through.
class Intervals {
 public:
  Intervals() = default;
  Intervals(std::initializer_list<Interval> intervals);
  void add(Interval interval);  // nothing, if it is empty
  uint64_t count() const { return counts_.empty() ? 0 : counts_.back(); }
  // REQUIRES: place < count().
  int64_t nth(int64_t place) const;
  const std::vector<Interval>& all() const { return intervals_; }

 private:
  std::vector<Interval> intervals_;
  std::vector<uint64_t> counts_;  // of each one and those before
};

// In each of the first epochs a part comes first: the resident samples, then what the epoch before
// ended with, as large. No part is first twice.
class OpportunisticOrder final : public Order {
 public:
  // `resident`: ascending. `epochs`: that may begin with a part.
  OpportunisticOrder(uint64_t samples, const std::vector<Interval>& resident, uint64_t seed,
                     uint64_t epochs);
  void indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const override;
  // Epochs that begin with a part that was not first before.
  uint64_t parts() const { return parts_; }
  // Where a part begins and ends when the resident samples are numbered first, then the others.
  Interval part(uint64_t number) const;

  using State = std::tuple<uint64_t, std::vector<Interval>, uint64_t, uint64_t>;
  State state() const { return {samples_, resident_.all(), seed_, epochs_}; }

 private:
  void to_samples(std::span<int64_t> numbers) const;

  uint64_t samples_;
  uint64_t seed_;
  uint64_t epochs_;
  Intervals resident_;
  Intervals others_;
  uint64_t parts_ = 0;
};

// Each class once in every round; a class's members one after the other, shuffled anew when all
// were drawn. Labels below 0 are in no class.
//
// Keeps what it drew from last: one thread at a time. 8 bytes a member, and up to 4 more for the
// permutations of small classes.
class BalancedOrder final : public Order {
 public:
  BalancedOrder(std::span<const int64_t> labels, uint64_t seed, uint64_t length);
  // Of one that there was: `starts` are where each class's members begin, and where all end.
  BalancedOrder(std::vector<int64_t> classes, std::vector<int64_t> starts,
                std::vector<int64_t> members, uint64_t seed, uint64_t length);
  BalancedOrder(const BalancedOrder&) = delete;
  BalancedOrder& operator=(const BalancedOrder&) = delete;
  // Throws Error{kInvalidArgument} for an epoch before which a class was drawn from 2^63 times.
  void indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const override;

  const std::vector<int64_t>& classes() const { return classes_; }  // their labels, ascending
  const std::vector<int64_t>& starts() const { return starts_; }
  const std::vector<int64_t>& members() const { return members_; }
  uint64_t seed() const { return seed_; }
  uint64_t length() const { return length_; }

 private:
  struct Cycle {
    uint64_t number;
    Permutation places;
  };
  void shuffle_classes(uint64_t epoch, uint64_t round) const;
  const Permutation& members_in(uint64_t cycle, uint64_t of) const;

  uint64_t seed_;
  uint64_t length_;
  std::vector<int64_t> classes_;
  std::vector<int64_t> starts_;
  std::vector<int64_t> members_;
  mutable std::vector<std::unique_ptr<const Cycle>> cycles_;  // of each class the last one
  // The order of the classes in the last round.
  mutable std::vector<std::pair<uint64_t, uint64_t>> round_classes_;
  mutable uint64_t round_epoch_ = 0;
  mutable uint64_t round_ = 0;
};

}  // namespace headrace
