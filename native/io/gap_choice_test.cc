// The choice of gaps: within its budget, as many requests saved as can be.
#include "io/gap_choice.h"

#include <doctest/doctest.h>

#include <numeric>
#include <random>

using headrace::io::GapChoice;

namespace {

struct Joined {
  uint64_t count = 0;
  uint64_t bytes = 0;
};

Joined join(const std::vector<uint64_t>& gaps, uint64_t most, uint64_t budget, uint64_t free = 0) {
  GapChoice choice(gaps, free, most, budget);
  Joined joined;
  for (const uint64_t gap : gaps) {
    if (!choice.joins(gap)) continue;
    ++joined.count;
    joined.bytes += gap;
  }
  return joined;
}

// The most gaps that any choice could join: try all of them.
uint64_t most_joined(const std::vector<uint64_t>& gaps, uint64_t most, uint64_t budget) {
  uint64_t found = 0;
  for (uint64_t set = 0; set < (1u << gaps.size()); ++set) {
    uint64_t count = 0;
    uint64_t bytes = 0;
    bool allowed = true;
    for (size_t i = 0; i < gaps.size(); ++i) {
      if ((set >> i & 1) == 0) continue;
      ++count;
      bytes += gaps[i];
      allowed = allowed && gaps[i] <= most;
    }
    if (allowed && bytes <= budget) found = std::max(found, count);
  }
  return found;
}

}  // namespace

TEST_CASE("gaps are joined smallest first, as long as the budget lasts") {
  CHECK(join({5, 1, 9, 3}, 100, 9).count == 3);
  CHECK(join({5, 1, 9, 3}, 100, 8).count == 2);
  CHECK(join({5, 1, 9, 3}, 4, 100).count == 2);
  CHECK(join({}, 4, 100).count == 0);
}

TEST_CASE("gaps of one size are joined as far as the budget goes, those of none always") {
  const Joined joined = join({7, 7, 7, 7}, 100, 15);
  CHECK(joined.count == 2);
  CHECK(joined.bytes == 14);
  CHECK(join({0, 0, 0}, 0, 0).count == 3);
}

TEST_CASE(
    "gaps that cost no more than a request are joined beside the budget, but never above the "
    "most") {
  CHECK(join({5, 1, 9, 3}, 100, 0, 3).count == 2);
  CHECK(join({5, 1, 9, 3}, 100, 5, 3).count == 3);
  CHECK(join({5, 1, 9, 3}, 2, 100, 3).count == 1);
}

TEST_CASE("no choice within the budget saves more requests") {
  std::mt19937_64 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<uint64_t> gaps(random() % 9);
    for (uint64_t& gap : gaps) gap = random() % 12;
    const uint64_t most = random() % 14;
    const uint64_t budget = random() % 40;
    const Joined joined = join(gaps, most, budget);
    CHECK(joined.bytes <= budget);
    CHECK(joined.count == most_joined(gaps, most, budget));
  }
}
