#include "core/token_windows.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "core/error.h"

using headrace::best_fit;
using headrace::CutWindows;

namespace {

// The same rule, looked up bin by bin.
std::vector<int64_t> slow_best_fit(const std::vector<int64_t>& sizes, int64_t capacity) {
  std::vector<int64_t> room;
  std::vector<int64_t> changed;
  std::vector<int64_t> placed;
  for (size_t i = 0; i < sizes.size(); ++i) {
    size_t best = room.size();
    for (size_t bin = 0; bin < room.size(); ++bin) {
      if (room[bin] < sizes[i]) continue;
      if (best == room.size() || room[bin] < room[best] ||
          (room[bin] == room[best] && changed[bin] > changed[best])) {
        best = bin;
      }
    }
    if (best == room.size()) {
      room.push_back(capacity);
      changed.push_back(0);
    }
    room[best] -= sizes[i];
    changed[best] = static_cast<int64_t>(i);
    placed.push_back(static_cast<int64_t>(best));
  }
  return placed;
}

}  // namespace

TEST_CASE("each piece goes where the least room is left, at any size of windows") {
  std::mt19937_64 random(1);
  for (const int64_t capacity : {1, 2, 63, 64, 65, 4096, 4097, 300'000}) {
    for (const size_t pieces : {0, 1, 7, 400}) {
      std::vector<int64_t> sizes(pieces);
      for (auto& size : sizes) {
        size = 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(capacity));
      }
      CHECK(best_fit(sizes, capacity) == slow_best_fit(sizes, capacity));
    }
  }
  CHECK_THROWS_AS(best_fit(std::vector<int64_t>{3}, 2), headrace::Error);
  CHECK_THROWS_AS(best_fit(std::vector<int64_t>{0}, 2), headrace::Error);
}

TEST_CASE("windows that are not there, and documents of other sizes, are refused") {
  const std::vector<int64_t> starts{0, 7, 12};  // blocks of two documents: 3 + 4, 0 + 5
  const CutWindows cut{starts, 2, 4, 3};
  const std::vector<int64_t> all{0, 1, 2};
  const std::vector<int64_t> sizes{3, 4, 3, 4, 3, 4, 0, 5};
  CHECK(cut.documents_of(all) == std::vector<int64_t>{0, 1, 0, 1, 0, 1, 2, 3});
  const auto pieces = cut.pieces_of(all, sizes);
  CHECK(pieces.row == std::vector<int64_t>{0, 0, 1, 2, 2});
  CHECK(pieces.document == std::vector<int64_t>{0, 1, 1, 1, 3});
  CHECK(pieces.place == std::vector<int64_t>{0, 3, 0, 0, 1});
  CHECK(pieces.start == std::vector<int64_t>{0, 0, 0, 3, 0});
  CHECK(pieces.count == std::vector<int64_t>{3, 1, 4, 1, 3});
  for (const int64_t window : {int64_t{-1}, int64_t{3}, int64_t{1} << 62}) {
    CHECK_THROWS_AS(cut.documents_of(std::vector<int64_t>{window}), headrace::Error);
  }
  CHECK_THROWS_AS((CutWindows{{}, 2, 4, 3}.documents_of(all)), headrace::Error);
  const std::vector<int64_t> some{0, 1};
  for (const std::vector<int64_t>& wrong :
       {std::vector<int64_t>{3}, {3, -1, 3, 4}, {3, 4, 3, 4, 0}, {3, int64_t{1} << 62, 3, 4}}) {
    CHECK_THROWS_AS(cut.pieces_of(some, wrong), headrace::Error);
  }
}
