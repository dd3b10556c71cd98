#include "core/order.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <unordered_map>

#include "core/error.h"

namespace headrace {
namespace {

// Numbers that are looked up together: enough for a permutation's passes, few enough for the cache.
constexpr size_t kLane = 512;

// Tables that a thread keeps: 16 KiB each at most. Making one takes longer than to look a batch up.
constexpr size_t kKept = 16;

uint64_t checked(const char* name, uint64_t value) {
  if (value >= 1 && value <= Permutation::kSizeMax) return value;
  throw Error(ErrorKind::kInvalidArgument, std::string(name) + " is " + std::to_string(value) +
                                               ", expected 1 to " +
                                               std::to_string(Permutation::kSizeMax));
}

// The permutation of [0, n) under a key, kept for the batches that follow. Of each thread its own:
// a lock would be the forked child's, too.
std::shared_ptr<const Permutation> keyed(uint64_t n, uint64_t key) {
  thread_local std::array<std::shared_ptr<const Permutation>, kKept> kept;  // the latest first
  const auto wanted = [&](const auto& permutation) {
    return permutation != nullptr && permutation->n() == n && permutation->key() == key;
  };
  const auto at = std::find_if(kept.begin(), kept.begin() + (kKept - 1), wanted);
  if (!wanted(*at)) *at = std::make_shared<const Permutation>(n, key);  // in place of the oldest
  std::rotate(kept.begin(), at, at + 1);
  return kept.front();
}

}  // namespace

std::vector<int64_t> wrapped(const Order& order, uint64_t length, uint64_t epoch, uint64_t start,
                             uint64_t stop) {
  std::vector<int64_t> out(stop - start);
  for (uint64_t at = start; at < stop;) {
    const uint64_t first = at % length;
    const uint64_t last = std::min(length, first + (stop - at));
    order.indices(epoch, first, last, out.data() + (at - start));
    at += last - first;
  }
  return out;
}

void SequentialOrder::indices(uint64_t, uint64_t start, uint64_t stop, int64_t* out) const {
  std::iota(out, out + (stop - start), static_cast<int64_t>(start));
}

ShuffledOrder::ShuffledOrder(uint64_t samples, uint64_t seed)
    : samples_(checked("samples", samples)), seed_(seed) {}

void ShuffledOrder::indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const {
  keyed(samples_, derive_key(seed_, Purpose::kShuffled, {epoch}))->range(start, stop, out);
}

// -- blocked --------------------------------------------------------------------------------------

// Where the blocks of one epoch lie when they are put one behind the other in their new order. A
// slot is a block's place in that row; slots are `block_samples` wide but for one.
class BlockedOrder::Layout {
 public:
  Layout(const BlockedOrder& order, uint64_t epoch)
      : order_(order),
        blocks_(keyed(order.blocks_, derive_key(order.seed_, Purpose::kBlocks, {epoch}))),
        missing_(order.blocks_ * order.block_samples_ - order.samples_) {
    const auto last_block = static_cast<int64_t>(order.blocks_ - 1);
    int64_t slot = 0;
    blocks_->inverse({&last_block, 1}, &slot);
    short_slot_ = static_cast<uint64_t>(slot);
    short_stop_ = (short_slot_ + 1) * order.block_samples_ - missing_;
  }

  // As if the short block were a whole one.
  uint64_t padded(uint64_t position) const {
    return position + (position < short_stop_ ? 0 : missing_);
  }

  uint64_t window_of(uint64_t position) const {
    return padded(position) / order_.block_samples_ / order_.window_blocks_;
  }

  Interval bounds(uint64_t window) const {
    const uint64_t first = window * order_.window_blocks_;
    const uint64_t last = std::min(first + order_.window_blocks_, order_.blocks_);
    return {slot_start(first), slot_start(last)};
  }

  // From positions of the row, counted from `base`, to the samples that lie there.
  void to_samples(uint64_t base, std::span<int64_t> positions) const {
    std::array<int64_t, kLane> slots;
    std::array<int64_t, kLane> blocks;
    const auto width = static_cast<int64_t>(order_.block_samples_);
    for (size_t begin = 0; begin < positions.size(); begin += kLane) {
      const auto lane = positions.subspan(begin, std::min(kLane, positions.size() - begin));
      for (size_t i = 0; i < lane.size(); ++i) {
        const uint64_t at = padded(base + static_cast<uint64_t>(lane[i]));
        slots[i] = static_cast<int64_t>(at / order_.block_samples_);
        lane[i] = static_cast<int64_t>(at) - slots[i] * width;
      }
      blocks_->at({slots.data(), lane.size()}, blocks.data());
      for (size_t i = 0; i < lane.size(); ++i) lane[i] += blocks[i] * width;
    }
  }

 private:
  uint64_t slot_start(uint64_t slot) const {
    return slot * order_.block_samples_ - (slot > short_slot_ ? missing_ : 0);
  }

  const BlockedOrder& order_;
  const std::shared_ptr<const Permutation> blocks_;
  const uint64_t missing_;  // what the short block lacks
  uint64_t short_slot_;
  uint64_t short_stop_;
};

BlockedOrder::BlockedOrder(uint64_t samples, uint64_t block_samples, uint64_t window_blocks,
                           uint64_t seed)
    : samples_(checked("samples", samples)),
      block_samples_(checked("block_samples", block_samples)),
      window_blocks_(checked("window_blocks", window_blocks)),
      blocks_((samples + block_samples - 1) / block_samples),
      seed_(seed) {}

void BlockedOrder::indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const {
  const Layout layout(*this, epoch);
  for (uint64_t at = start; at < stop;) {
    const uint64_t window = layout.window_of(at);
    const auto [low, high] = layout.bounds(window);
    const uint64_t last = std::min(high, stop);
    int64_t* const part = out + (at - start);
    keyed(high - low, derive_key(seed_, Purpose::kWindow, {epoch, window}))
        ->range(at - low, last - low, part);
    layout.to_samples(low, {part, last - at});
    at = last;
  }
}

Interval BlockedOrder::window_at(uint64_t epoch, uint64_t position) const {
  const Layout layout(*this, epoch);
  return layout.bounds(layout.window_of(position));
}

// -- opportunistic --------------------------------------------------------------------------------

Intervals::Intervals(std::initializer_list<Interval> intervals) {
  for (const Interval& each : intervals) add(each);
}

void Intervals::add(Interval interval) {
  if (interval.first == interval.second) return;
  counts_.push_back(count() + interval.second - interval.first);
  intervals_.push_back(interval);
}

int64_t Intervals::nth(int64_t place) const {
  const auto end = std::upper_bound(counts_.begin(), counts_.end(), static_cast<uint64_t>(place)) -
                   counts_.begin();
  const auto i = static_cast<size_t>(end);
  return static_cast<int64_t>(intervals_[i].second - counts_[i]) + place;
}

OpportunisticOrder::OpportunisticOrder(uint64_t samples, const std::vector<Interval>& resident,
                                       uint64_t seed, uint64_t epochs)
    : samples_(checked("samples", samples)), seed_(seed), epochs_(epochs) {
  uint64_t behind = 0;
  for (const Interval& range : resident) {
    if (range.first < behind || range.second < range.first || range.second > samples) {
      throw Error(ErrorKind::kInvalidArgument,
                  "a resident range is " + std::to_string(range.first) + " to " +
                      std::to_string(range.second) + ", expected " + std::to_string(behind) +
                      " to " + std::to_string(samples) + ", ascending");
    }
    others_.add({behind, range.first});
    resident_.add(range);
    behind = range.second;
  }
  others_.add({behind, samples});
  const uint64_t first = resident_.count();
  if (first > 0 && first < samples) parts_ = std::min(epochs, (samples + first - 1) / first);
}

Interval OpportunisticOrder::part(uint64_t number) const {
  const uint64_t first = resident_.count();
  return {std::min(number * first, samples_), std::min((number + 1) * first, samples_)};
}

void OpportunisticOrder::indices(uint64_t epoch, uint64_t start, uint64_t stop,
                                 int64_t* out) const {
  if (epoch >= parts_) return ShuffledOrder(samples_, seed_).indices(epoch, start, stop, out);
  const Interval near = part(epoch);
  const Interval following =
      epoch + 1 < parts_ ? part(epoch + 1) : Interval{near.second, near.second};
  const std::array<Intervals, 3> groups{Intervals{near},
                                        Intervals{{0, near.first}, {following.second, samples_}},
                                        Intervals{following}};
  uint64_t base = 0;
  for (uint64_t group = 0; group < groups.size(); ++group) {
    const uint64_t count = groups[group].count();
    const uint64_t low = std::max(start, base), high = std::min(stop, base + count);
    if (low < high) {
      const std::span<int64_t> numbers(out + (low - start), high - low);
      keyed(count, derive_key(seed_, Purpose::kResident, {epoch, group}))
          ->range(low - base, high - base, numbers.data());
      for (int64_t& number : numbers) number = groups[group].nth(number);
    }
    base += count;
  }
  to_samples({out, stop - start});
}

// From numbers, the resident samples' first, then part by part the others', to samples.
void OpportunisticOrder::to_samples(std::span<int64_t> numbers) const {
  const auto first = static_cast<int64_t>(resident_.count());
  std::shared_ptr<const Permutation> dealt;
  if (parts_ > 1) dealt = keyed(others_.count(), derive_key(seed_, Purpose::kParts, {}));
  std::array<int64_t, kLane> others;
  std::array<int64_t, kLane> places;
  for (size_t begin = 0; begin < numbers.size(); begin += kLane) {
    const auto lane = numbers.subspan(begin, std::min(kLane, numbers.size() - begin));
    size_t count = 0;
    for (const int64_t number : lane) {
      others[count] = number - first;
      count += number >= first;
    }
    if (dealt != nullptr) {
      dealt->at({others.data(), count}, places.data());
    } else {
      std::copy_n(others.begin(), count, places.begin());
    }
    const int64_t* place = places.data();
    for (int64_t& number : lane) {
      number = number < first ? resident_.nth(number) : others_.nth(*place++);
    }
  }
}

// -- balanced -------------------------------------------------------------------------------------

BalancedOrder::BalancedOrder(std::span<const int64_t> labels, uint64_t seed, uint64_t length)
    : seed_(seed), length_(checked("epoch_length", length)) {
  std::unordered_map<int64_t, int64_t> counts;  // then: where the next member of each class goes
  for (const int64_t label : labels) {
    if (label >= 0) ++counts[label];
  }
  if (counts.empty()) {
    throw Error(ErrorKind::kInvalidArgument, "all " + std::to_string(labels.size()) +
                                                 " labels are negative, expected at least one "
                                                 "class");
  }
  for (const auto& each : counts) classes_.push_back(each.first);
  std::sort(classes_.begin(), classes_.end());
  starts_.push_back(0);
  for (const int64_t label : classes_) {
    starts_.push_back(starts_.back() + std::exchange(counts[label], starts_.back()));
  }
  members_.resize(static_cast<size_t>(starts_.back()));
  for (size_t sample = 0; sample < labels.size(); ++sample) {
    if (labels[sample] < 0) continue;
    members_[static_cast<size_t>(counts[labels[sample]]++)] = static_cast<int64_t>(sample);
  }
  cycles_.resize(classes_.size());
}

BalancedOrder::BalancedOrder(std::vector<int64_t> classes, std::vector<int64_t> starts,
                             std::vector<int64_t> members, uint64_t seed, uint64_t length)
    : seed_(seed),
      length_(length),
      classes_(std::move(classes)),
      starts_(std::move(starts)),
      members_(std::move(members)),
      cycles_(classes_.size()) {}

void BalancedOrder::indices(uint64_t epoch, uint64_t start, uint64_t stop, int64_t* out) const {
  const uint64_t count = classes_.size();
  const uint64_t rounds = (length_ + count - 1) / count;
  if (epoch + 1 > static_cast<uint64_t>(INT64_MAX) / rounds) {
    throw Error(ErrorKind::kInvalidArgument, "epoch is " + std::to_string(epoch) + ": with " +
                                                 std::to_string(rounds) +
                                                 " rounds each, draws pass 2^63");
  }
  for (uint64_t at = start; at < stop; ++at) {
    const uint64_t round = at / count;
    if (round_classes_.empty() || round != round_ || epoch != round_epoch_) {
      shuffle_classes(epoch, round);
    }
    const uint64_t of = round_classes_[at % count].second;
    const uint64_t draw = epoch * rounds + round;
    const auto first = static_cast<size_t>(starts_[of]);
    const auto size = static_cast<uint64_t>(starts_[of + 1]) - first;
    const auto place = static_cast<int64_t>(draw % size);
    int64_t member = 0;
    members_in(draw / size, of).at({&place, 1}, &member);
    out[at - start] = members_[first + static_cast<size_t>(member)];
  }
}

// A round's order is that of a hash of (round, class): sorting random keys is a uniform shuffle but
// for ties, which at 64 bits do not happen.
void BalancedOrder::shuffle_classes(uint64_t epoch, uint64_t round) const {
  const uint64_t key = derive_key(seed_, Purpose::kClasses, {epoch});
  const uint64_t count = classes_.size();
  round_classes_.resize(count);
  for (uint64_t of = 0; of < count; ++of) {
    round_classes_[of] = {mix64(mix64(round * count + of + kGolden) ^ key), of};
  }
  std::sort(round_classes_.begin(), round_classes_.end());
  round_epoch_ = epoch;
  round_ = round;
}

// In which order a class's members come in one cycle.
const Permutation& BalancedOrder::members_in(uint64_t cycle, uint64_t of) const {
  std::unique_ptr<const Cycle>& kept = cycles_[of];
  if (kept == nullptr || kept->number != cycle) {
    const auto label = static_cast<uint64_t>(classes_[of]);
    kept.reset(new Cycle{cycle,
                         {static_cast<uint64_t>(starts_[of + 1] - starts_[of]),
                          derive_key(seed_, Purpose::kMembers, {label, cycle})}});
  }
  return kept->places;
}

}  // namespace headrace
