// What waits is taken once, by whichever loop has room, and ends when nobody can read it.
#include "fabric/backlog.h"

#include <doctest/doctest.h>

#include <cerrno>

using namespace headrace;
using namespace headrace::fabric;

namespace {

using Clock = io::RemoteInbox::Clock;

struct Rig {
  explicit Rig(double read_deadline_s = 60) : backlog({read_deadline_s, 4096}, &counters) {
    for (Poller& poller : pollers) backlog.add_loop(&poller);
    target = backlog.add_target(1 << 20);
    backlog.add_volume("url", target, {1, 512, 1000});
  }

  std::shared_ptr<io::RemoteRequests> put(size_t count, const std::string& url = "url") {
    const std::vector<io::RemoteRequest> requests(count, {0, 0, 512, memory});
    auto made = std::make_shared<io::RemoteRequests>(requests, std::vector<std::string>(count, url),
                                                     nullptr, inbox, 0);
    backlog.put(made);
    return made;
  }
  size_t take(unsigned loop, size_t most) {
    std::vector<Piece> pieces;
    backlog.take(target, loop, most, &pieces);
    for (Piece& piece : pieces) taken.push_back(std::move(piece));
    return pieces.size();
  }
  bool woken(unsigned loop) { return !pollers[loop].wait(0).empty(); }
  std::vector<int> errors() {
    std::vector<int> found;
    for (const io::RemoteResult& result : inbox->take(Clock::now())) found.push_back(result.error);
    return found;
  }

  InitiatorCounters counters;
  Poller pollers[2] = {Poller("a"), Poller("b")};
  Backlog backlog;
  uint64_t target = 0;
  std::shared_ptr<io::RemoteInbox> inbox = std::make_shared<io::RemoteInbox>();
  std::byte memory[512];
  std::vector<Piece> taken;
};

}  // namespace

TEST_CASE("a target's queues are spread over the loops") {
  Rig rig;
  const unsigned first = rig.backlog.open_queue(rig.target);
  const unsigned second = rig.backlog.open_queue(rig.target);
  CHECK(first != second);
  CHECK(rig.backlog.loops_in_use() == 2);
  rig.backlog.close_queue(rig.target, first);
  CHECK(rig.backlog.loops_in_use() == 1);
  CHECK(rig.backlog.open_queue(rig.target) == first);
}

TEST_CASE("a hungry loop is woken once, the other only for many pieces") {
  Rig rig;
  REQUIRE(rig.backlog.open_queue(rig.target) == 0);
  REQUIRE(rig.backlog.open_queue(rig.target) == 1);
  CHECK(rig.take(0, 10) == 0);
  CHECK(rig.take(1, 10) == 0);
  rig.put(1);
  CHECK(rig.woken(0));
  CHECK(!rig.woken(1));
  rig.put(1);
  CHECK(rig.woken(1));
  rig.put(50);
  CHECK(!rig.woken(0));
  CHECK(!rig.woken(1));
  CHECK(rig.take(0, 52) == 52);  // as many as it has room for: not hungry
  rig.put(1);
  CHECK(!rig.woken(0));
  CHECK(rig.take(0, 2) == 1);
  CHECK(rig.take(1, 2) == 0);
  rig.put(64);
  CHECK(rig.woken(0));
  CHECK(rig.woken(1));
}

TEST_CASE("nobody reads what nobody waits for") {
  Rig rig;
  rig.backlog.open_queue(rig.target);
  rig.put(3)->abandon();
  rig.put(2);
  CHECK(rig.take(0, 10) == 2);
}

TEST_CASE("unknown volumes and targets that were given up fail at once") {
  Rig rig;
  rig.put(1, "another");
  CHECK(rig.errors() == std::vector{ENOENT});
  rig.put(2);
  CHECK(rig.errors().empty());
  rig.backlog.give_up(rig.target, EHOSTDOWN);
  CHECK(rig.errors() == std::vector{EHOSTDOWN, EHOSTDOWN});
  rig.put(1);
  CHECK(rig.errors() == std::vector{EHOSTDOWN});
  rig.backlog.open_queue(rig.target);  // it is back
  rig.put(1);
  CHECK(rig.errors().empty());
  CHECK(rig.take(0, 10) == 1);
}

TEST_CASE("what waits ends at its deadline, and when its target has been away for as long") {
  Rig rig(10);
  const int64_t second = 1'000'000'000;
  rig.put(1);
  CHECK(rig.woken(0));  // no loop has a queue: one keeps the time
  CHECK(rig.backlog.keep_time(now_ns() + 9 * second));
  CHECK(!rig.backlog.keep_time(now_ns() + 11 * second));
  CHECK(rig.errors() == std::vector{ETIMEDOUT});
  rig.backlog.close_queue(rig.target, rig.backlog.open_queue(rig.target));
  rig.put(1);
  CHECK(!rig.backlog.keep_time(now_ns() + 11 * second));
  CHECK(rig.errors() == std::vector{EHOSTDOWN});
}

TEST_CASE("a piece that comes back is the first to be read again, by any loop") {
  Rig rig;
  rig.backlog.open_queue(rig.target);
  rig.put(2);
  REQUIRE(rig.take(0, 1) == 1);
  Answers answers(&rig.counters);
  rig.backlog.put_back(rig.target, rig.taken[0], &answers);
  CHECK(rig.counters.figures().retried == 1);
  REQUIRE(rig.take(1, 1) == 1);
  CHECK(rig.taken[1].number == rig.taken[0].number);
}

TEST_CASE("closing ends what waits, what comes, and what comes back") {
  Rig rig;
  rig.backlog.open_queue(rig.target);
  rig.put(2);
  REQUIRE(rig.take(0, 1) == 1);
  rig.backlog.close();
  CHECK(rig.errors() == std::vector{ECANCELED});
  rig.put(1);
  CHECK(rig.errors() == std::vector{ECANCELED});
  Answers answers(&rig.counters);
  rig.backlog.put_back(rig.target, rig.taken[0], &answers);
  answers.tell();
  CHECK(rig.errors() == std::vector{ECANCELED});
}
