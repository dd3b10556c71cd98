#include "core/mixture.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "core/error.h"

using headrace::shared_period;

TEST_CASE("no source of a period is ever a whole sample away from its share") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 60; ++round) {
    const size_t sources = 1 + random() % 40;
    std::vector<int64_t> parts(sources);
    for (auto& part : parts) part = static_cast<int64_t>(random() % (round % 2 ? 5 : 2000));
    parts[random() % sources] += 1;
    int64_t whole = 0;
    int64_t present = 0;
    for (const int64_t part : parts) {
      whole += part;
      present += part > 0;
    }
    const auto period = shared_period(parts);
    REQUIRE(period.size() == static_cast<size_t>(whole));
    const double most = present > 1 ? 1.0 - 1.0 / static_cast<double>(2 * present - 2) : 0.0;
    std::vector<int64_t> counts(sources, 0);
    double worst = 0;
    for (int64_t t = 1; t <= whole; ++t) {
      ++counts[static_cast<size_t>(period[static_cast<size_t>(t - 1)])];
      for (size_t i = 0; i < sources; ++i) {
        const double share = static_cast<double>(parts[i] * t) / static_cast<double>(whole);
        worst = std::max(worst, std::abs(static_cast<double>(counts[i]) - share));
      }
    }
    CHECK(worst <= most + 1e-9);
    CHECK(counts == parts);
  }
  CHECK_THROWS_AS(shared_period(std::vector<int64_t>{headrace::kPeriodMax, 1}), headrace::Error);
  CHECK_THROWS_AS(shared_period(std::vector<int64_t>{-1, 2}), headrace::Error);
}
