#include "io/rank_barrier.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "core/error.h"
#include "testing/child_process.h"

namespace headrace {
namespace {

constexpr int64_t kForever = std::numeric_limits<int64_t>::max();

TEST_CASE("every rank of every turn takes away the latest moments of all") {
  constexpr int kRanks = 4;
  constexpr int kTurns = 2000;
  const auto first = RankBarrier::create(kRanks, false);
  std::vector<std::unique_ptr<RankBarrier>> others;
  for (int i = 1; i < kRanks; ++i) others.push_back(RankBarrier::attach(first->fd(), i));
  std::vector<int> wrong(kRanks, 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      RankBarrier& barrier = rank == 0 ? *first : *others[rank - 1];
      for (int turn = 0; turn < kTurns; ++turn) {
        // The latest is another rank's each turn; moments may lie before those of the turn before.
        const int64_t end = 1000 - turn + (rank == turn % kRanks ? 7 : 0);
        barrier.arrive({end, end - 3});
        StepEnds latest{};
        while (!barrier.await(kForever, &latest)) {
        }
        wrong[rank] += latest.end_ns != 1007 - turn || latest.undelayed_ns != 1004 - turn;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(kRanks, 0));
}

TEST_CASE("a host that is led goes on when its leader says so, with what the leader says") {
  const auto leader = RankBarrier::create(2, true);
  testing::ChildEnd end;
  std::thread other([&] {
    end = testing::in_child([&] {
      const auto barrier = RankBarrier::attach(leader->fd(), 1);
      StepEnds latest{};
      for (int turn = 0; turn < 50; ++turn) {
        barrier->arrive({5 + turn, 5});
        while (!barrier->await(kForever, &latest)) {
        }
        if (latest.end_ns != 90 + turn || latest.undelayed_ns != 6) return 1;
      }
      return 0;
    });
  });
  StepEnds latest{};
  for (int turn = 0; turn < 50; ++turn) {
    CHECK_FALSE(leader->await(0, &latest));
    leader->arrive({turn, 6});
    while (!leader->await_host(kForever, &latest)) {
    }
    CHECK(latest.end_ns == 5 + turn);
    CHECK_FALSE(leader->await(0, &latest));
    leader->release({90 + turn, 6});
    CHECK(leader->await(0, &latest));
    CHECK(latest.end_ns == 90 + turn);
  }
  other.join();
  CHECK(end.exit_code == 0);
}

TEST_CASE("who is missing is waited for no longer than was said") {
  const auto barrier = RankBarrier::create(2, false);
  StepEnds latest{};
  barrier->arrive({1, 1});
  CHECK_FALSE(barrier->await(1, &latest));
  CHECK_FALSE(barrier->await_host(1, &latest));
  CHECK(barrier->missing() == 1);
}

TEST_CASE("what is no barrier's memory is refused, and so is a number that nobody has") {
  CHECK_THROWS_AS(RankBarrier::create(0, false), Error);
  CHECK_THROWS_AS(RankBarrier::create(1u << 17, false), Error);
  CHECK_THROWS_AS(RankBarrier::attach(-1, 1), Error);
  const auto one = RankBarrier::create(1, false);
  CHECK_THROWS_AS(RankBarrier::attach(one->fd(), 1), Error);  // there is no second place
  const int other = memfd_create("other", 0);
  CHECK_THROWS_AS(RankBarrier::attach(other, 1), Error);  // empty
  CHECK(ftruncate(other, 4096) == 0);
  CHECK_THROWS_AS(RankBarrier::attach(other, 1), Error);  // of zeros
  close(other);
}

}  // namespace
}  // namespace headrace
