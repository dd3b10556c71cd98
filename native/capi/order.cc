#include "capi/order.h"

#include <string>
#include <vector>

#include "capi/failure.h"

namespace headrace::capi {
namespace {

std::vector<int64_t> labels_of(const Mounted& mounted) {
  std::vector<int64_t> labels;
  labels.reserve(mounted.catalog->samples());
  bool any = false;
  for (const io::Segment& segment : mounted.catalog->segments()) {
    any |= segment.directory->has_labels();
    for (uint64_t sample = 0; sample < segment.directory->samples(); ++sample) {
      labels.push_back(segment.directory->label(sample));
    }
  }
  if (!any) {
    refuse(mounted.where +
           ": samples have no labels, and a balanced order needs them. Pack them with labels, or "
           "choose another order.");
  }
  return labels;
}

std::vector<Interval> resident_of(const hr_order& described) {
  if (described.resident == nullptr && described.resident_ranges > 0) refuse("resident is null");
  std::vector<Interval> ranges;
  for (uint64_t i = 0; i < described.resident_ranges; ++i) {
    ranges.emplace_back(described.resident[2 * i], described.resident[2 * i + 1]);
  }
  return ranges;
}

}  // namespace

std::unique_ptr<Order> make_order(const Mounted& mounted, uint64_t seed,
                                  const hr_order& described) {
  const uint64_t samples = mounted.catalog->samples();
  switch (described.kind) {
    case HR_ORDER_SHUFFLED:
      return std::make_unique<ShuffledOrder>(samples, seed);
    case HR_ORDER_SEQUENTIAL:
      return std::make_unique<SequentialOrder>();
    case HR_ORDER_BLOCKED:
      return std::make_unique<BlockedOrder>(samples, described.block_samples,
                                            described.window_blocks, seed);
    case HR_ORDER_OPPORTUNISTIC:
      return std::make_unique<OpportunisticOrder>(samples, resident_of(described), seed,
                                                  described.resident_epochs);
    case HR_ORDER_BALANCED:
      return std::make_unique<BalancedOrder>(labels_of(mounted), seed, samples);
    default:
      refuse("the order's kind is " + std::to_string(described.kind) +
             ", expected one of HR_ORDER_*");
  }
}

}  // namespace headrace::capi
