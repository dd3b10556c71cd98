#include "core/permutation.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "core/error.h"

namespace headrace {
namespace {

std::vector<int64_t> all_of(const Permutation& permutation) {
  std::vector<int64_t> indices(permutation.n());
  permutation.range(0, permutation.n(), indices.data());
  return indices;
}

TEST_CASE("every index comes exactly once, and the inverse finds its position") {
  for (const uint64_t n : {1, 2, 3, 100, 4095, 4096, 4097, 8191, 8192, 8193, 70'000}) {
    CAPTURE(n);
    const Permutation permutation(n, 7);
    const std::vector<int64_t> indices = all_of(permutation);
    std::vector<int64_t> sorted = indices;
    std::sort(sorted.begin(), sorted.end());
    std::vector<int64_t> expected(n);
    std::iota(expected.begin(), expected.end(), 0);
    CHECK(sorted == expected);

    std::vector<int64_t> positions(n);
    permutation.inverse(indices, positions.data());
    CHECK(positions == expected);
  }
}

TEST_CASE("small sets are drawn from a table: every order of four samples comes, none too often") {
  // A Feistel network over two bits would know but a few of the 24 orders.
  std::map<std::vector<int64_t>, int> orders;
  for (uint64_t key = 0; key < 4800; ++key) ++orders[all_of(Permutation(4, key))];
  CHECK(orders.size() == 24);
  for (const auto& [order, count] : orders) CHECK((count > 130 && count < 280));  // 200 +- 6 sigma
  // The orders of recorded runs.
  CHECK(all_of(Permutation(8, 7)) == std::vector<int64_t>{2, 1, 0, 7, 6, 5, 4, 3});
}

TEST_CASE("range, at and any cut of the range agree") {
  for (const uint64_t n : {1000, 5000}) {
    const Permutation permutation(n, 99);
    const std::vector<int64_t> indices = all_of(permutation);
    std::vector<int64_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    std::vector<int64_t> looked_up(n);
    permutation.at(positions, looked_up.data());
    CHECK(looked_up == indices);
    std::vector<int64_t> part(700);
    permutation.range(150, 850, part.data());
    CHECK(std::equal(part.begin(), part.end(), indices.begin() + 150));
  }
}

TEST_CASE("the largest sets are permuted within their bounds") {
  for (const uint64_t n : {Permutation::kSizeMax, Permutation::kSizeMax - 1,
                           (Permutation::kSizeMax >> 1) + 1, uint64_t{1} << 40}) {
    CAPTURE(n);
    const Permutation permutation(n, 3);
    const auto last = static_cast<int64_t>(n) - 1;
    const std::vector<int64_t> positions{0, 1, last / 2, last - 1, last};
    std::vector<int64_t> indices(positions.size());
    std::vector<int64_t> back(positions.size());
    permutation.at(positions, indices.data());
    for (const int64_t index : indices) CHECK((index >= 0 && index <= last));
    permutation.inverse(indices, back.data());
    CHECK(back == positions);
  }
}

TEST_CASE("the key and n both change the order") {
  CHECK(all_of(Permutation(5000, 1)) != all_of(Permutation(5000, 2)));
  std::vector<int64_t> shorter(5000);
  std::vector<int64_t> longer(5000);
  Permutation(5000, 1).range(0, 5000, shorter.data());
  Permutation(5001, 1).range(0, 5000, longer.data());
  int common = 0;
  for (size_t i = 0; i < shorter.size(); ++i) common += shorter[i] == longer[i];
  CHECK(common < 20);
}

TEST_CASE("wrong arguments are refused before anything is written") {
  CHECK_THROWS_AS(Permutation(0, 1), Error);
  CHECK_THROWS_AS(Permutation(Permutation::kSizeMax + 1, 1), Error);
  const Permutation permutation(10, 1);
  std::vector<int64_t> out(11, -7);
  CHECK_THROWS_AS(permutation.range(0, 11, out.data()), Error);
  CHECK_THROWS_AS(permutation.range(5, 4, out.data()), Error);
  CHECK_THROWS_AS(permutation.at(std::vector<int64_t>{0, 10}, out.data()), Error);
  CHECK_THROWS_AS(permutation.inverse(std::vector<int64_t>{-1}, out.data()), Error);
  CHECK(std::all_of(out.begin(), out.end(), [](int64_t value) { return value == -7; }));
}

TEST_CASE("partial order hashes add up, and a swap changes the sum") {
  const Permutation permutation(5000, 5);
  std::vector<int64_t> indices = all_of(permutation);
  const std::span<const int64_t> whole(indices);
  const uint64_t hash = order_hash(0, whole);
  CHECK(hash == order_hash(0, whole.first(1234)) + order_hash(1234, whole.subspan(1234)));
  std::swap(indices[10], indices[11]);
  CHECK(hash != order_hash(0, whole));
}

}  // namespace
}  // namespace headrace
