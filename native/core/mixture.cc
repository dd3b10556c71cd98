#include "core/mixture.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <queue>
#include <string>
#include <utility>

#include "core/error.h"

namespace headrace {

std::vector<int16_t> shared_period(std::span<const int64_t> parts) {
  int64_t whole = 0;
  int64_t sources = 0;
  if (std::ssize(parts) > kPeriodSourcesMax) {
    throw Error(ErrorKind::kInvalidArgument, std::to_string(parts.size()) + " sources");
  }
  for (const int64_t part : parts) {
    if (part < 0 || part > kPeriodMax) {
      throw Error(ErrorKind::kInvalidArgument, "a part is " + std::to_string(part));
    }
    whole += part;
    sources += part > 0;
  }
  if (whole > kPeriodMax) {
    throw Error(ErrorKind::kInvalidArgument,
                "the parts are " + std::to_string(whole) + " together");
  }
  // With shares in units of 1 / steps: a source may come for the c-th time (from 0) at the first
  // position t (from 1) where steps * (part * t - whole * c) >= whole, and must come before its
  // share is more than steps - 1 units ahead. All products stay below 2^14.3 * 2^22 * 2^22 and so
  // in 64 bits.
  const int64_t steps = std::max<int64_t>(1, 2 * sources - 2);
  const auto opens = [&](size_t source, int64_t count) {
    const int64_t units = steps * parts[source];
    return (whole * (1 + steps * count) + units - 1) / units;
  };
  const auto closes = [&](size_t source, int64_t count) {
    return whole * (steps - 1 + steps * count) / (steps * parts[source]);
  };
  using Entry = std::pair<int64_t, size_t>;  // a position, and the source
  using Queue = std::priority_queue<Entry, std::vector<Entry>, std::greater<>>;
  Queue waiting;  // by the position that they may come at
  Queue open;     // by the position that they must come at
  std::vector<int64_t> counts(parts.size(), 0);
  for (size_t source = 0; source < parts.size(); ++source) {
    if (parts[source] > 0) {
      waiting.emplace(opens(source, 0), source);
    }
  }
  std::vector<int16_t> period(static_cast<size_t>(whole));
  for (int64_t position = 1; position <= whole; ++position) {
    while (!waiting.empty() && waiting.top().first <= position) {
      const size_t source = waiting.top().second;
      waiting.pop();
      open.emplace(closes(source, counts[source]), source);
    }
    if (open.empty()) {
      throw Error(ErrorKind::kInvalidArgument,
                  "no source may come at position " + std::to_string(position));
    }
    const size_t source = open.top().second;
    open.pop();
    period[static_cast<size_t>(position - 1)] = static_cast<int16_t>(source);
    waiting.emplace(opens(source, ++counts[source]), source);
  }
  return period;
}

}  // namespace headrace
