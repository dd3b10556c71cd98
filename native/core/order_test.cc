#include "core/order.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "core/error.h"

namespace headrace {
namespace {

std::vector<int64_t> labels_of(uint64_t samples, int64_t classes) {
  std::vector<int64_t> labels(samples);
  for (size_t i = 0; i < samples; ++i) labels[i] = static_cast<int64_t>(i) % classes - 1;
  return labels;
}

std::vector<std::unique_ptr<Order>> orders_over(uint64_t samples) {
  std::vector<std::unique_ptr<Order>> orders;
  orders.push_back(std::make_unique<SequentialOrder>());
  orders.push_back(std::make_unique<ShuffledOrder>(samples, 5));
  for (const uint64_t block : {1, 7, 64, 10'000}) {
    for (const uint64_t window : {1, 3, 10'000}) {
      orders.push_back(std::make_unique<BlockedOrder>(samples, block, window, 5));
    }
  }
  const std::vector<Interval> near{{0, samples / 9}, {samples / 3, samples / 2}};
  for (const uint64_t epochs : {0, 1, 3}) {
    orders.push_back(std::make_unique<OpportunisticOrder>(samples, near, 5, epochs));
  }
  return orders;
}

TEST_CASE("every sample comes once, and any cut of an epoch is the same") {
  for (const uint64_t samples : {1, 2, 97, 5003}) {
    CAPTURE(samples);
    std::vector<int64_t> all(samples);
    std::iota(all.begin(), all.end(), 0);
    for (const auto& order : orders_over(samples)) {
      for (const uint64_t epoch : {uint64_t{0}, uint64_t{1}, uint64_t{2}, kEpochMax}) {
        std::vector<int64_t> whole = wrapped(*order, samples, epoch, 0, samples);
        std::vector<int64_t> cut;
        for (uint64_t at = 0; at < samples; at += 700) {
          const auto piece = wrapped(*order, samples, epoch, at, std::min(samples, at + 700));
          cut.insert(cut.end(), piece.begin(), piece.end());
        }
        CHECK(cut == whole);
        std::sort(whole.begin(), whole.end());
        CHECK(whole == all);
      }
    }
  }
}

TEST_CASE("indices start over past the end") {
  for (const auto& order : orders_over(500)) {
    const auto indices = wrapped(*order, 500, 3, 490, 1510);
    REQUIRE(indices.size() == 1020);
    for (size_t i = 0; i + 500 < indices.size(); ++i) CHECK(indices[i] == indices[i + 500]);
  }
}

TEST_CASE("a balanced order draws each class in every round, wherever it is begun") {
  const std::vector<int64_t> labels = labels_of(1000, 8);  // -1 to 6
  const BalancedOrder order(labels, 5, 1000);
  CHECK(order.classes() == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6});
  const auto whole = wrapped(order, 1000, 2, 0, 1000);
  for (size_t round = 0; round + 7 <= whole.size(); round += 7) {
    std::vector<int64_t> drawn;
    for (size_t i = round; i < round + 7; ++i)
      drawn.push_back(labels[static_cast<size_t>(whole[i])]);
    std::sort(drawn.begin(), drawn.end());
    CHECK(drawn == order.classes());
  }
  const BalancedOrder again(order.classes(), order.starts(), order.members(), 5, 1000);
  wrapped(again, 1000, 7, 300, 400);
  CHECK(wrapped(again, 1000, 2, 501, 777) ==
        std::vector<int64_t>(whole.begin() + 501, whole.begin() + 777));
}

TEST_CASE("numbers that are out of bounds are refused") {
  const uint64_t huge = Permutation::kSizeMax + 1;
  CHECK_THROWS_AS(ShuffledOrder(0, 1), Error);
  CHECK_THROWS_AS(BlockedOrder(0, 1, 1, 1), Error);
  CHECK_THROWS_AS(BlockedOrder(1, 0, 1, 1), Error);
  CHECK_THROWS_AS(BlockedOrder(1, 1, huge, 1), Error);
  using Near = std::vector<Interval>;
  CHECK_THROWS_AS(OpportunisticOrder(huge, Near{}, 1, 1), Error);
  for (const Near& near : {Near{{5, 11}}, Near{{5, 4}}, Near{{2, 5}, {4, 6}}, Near{{11, 11}}}) {
    CHECK_THROWS_AS(OpportunisticOrder(10, near, 1, 1), Error);
  }
  const std::vector<int64_t> none{-1, -2};
  CHECK_THROWS_AS(BalancedOrder(none, 1, 2), Error);
  const std::vector<int64_t> one{3};
  CHECK_THROWS_AS(BalancedOrder(one, 1, 0), Error);
  int64_t out = 0;
  CHECK_THROWS_AS(BalancedOrder(one, 1, uint64_t{1} << 48).indices(kEpochMax, 0, 1, &out), Error);
}

TEST_CASE("keys are those of Python") {
  // headrace.order.hash.derive_key(seed, Purpose.SHUFFLED, epoch)
  CHECK(derive_key(0, Purpose::kShuffled, {0}) == 0x44e5b98100c67fb0u);
  CHECK(derive_key(UINT64_MAX, Purpose::kShuffled, {kEpochMax}) == 0xaf2ef393e4cd3ef9u);
}

}  // namespace
}  // namespace headrace
