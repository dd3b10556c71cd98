// The order of a mixture's sources, made once and then only looked up.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

// Which source comes at each position of one period, of so many positions as all parts together.
//
// After each position, no source's count is further from its exact share than 1 - 1 / (2n - 2), for
// n sources with a part (Tijdeman, "The chairman assignment problem", 1980): of the sources whose
// share is at least 1 / (2n - 2) ahead of their count, the one comes whose share would first be too
// far ahead.
//
// Parts are 0 to `kPeriodMax` together, and at most `kPeriodSourcesMax`. Throws
// Error(kInvalidArgument).
inline constexpr int64_t kPeriodMax = int64_t{1} << 22;
inline constexpr int64_t kPeriodSourcesMax = 10'000;
std::vector<int16_t> shared_period(std::span<const int64_t> parts);

}  // namespace headrace
