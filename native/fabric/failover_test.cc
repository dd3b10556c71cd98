// Failover: whatever places do, each read is finished once, by the first place that has it.
#include "fabric/failover.h"

#include <doctest/doctest.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

using namespace headrace;
using namespace std::chrono_literals;
using fabric::Failover;
using io::RemoteInbox;
using io::RemoteRequest;
using io::RemoteRequests;
using io::RemoteResult;

namespace {

// Answers by URL, in the calling thread or in one of its own: the byte to fill with, or -errno.
class FakeEngine final : public io::RemoteEngine {
 public:
  ~FakeEngine() override { join(); }
  void read(std::shared_ptr<RemoteRequests> requests) override {
    ++calls;
    if (!threaded) return answer(*requests);
    const std::lock_guard lock(mutex_);
    threads_.emplace_back([this, requests] { answer(*requests); });
  }
  void turn(unsigned) override {}
  std::string name() const override { return "fake"; }
  // Waits for all answers, those that answers asked for included.
  void join() {
    while (true) {
      std::vector<std::thread> threads;
      {
        const std::lock_guard lock(mutex_);
        threads.swap(threads_);
      }
      if (threads.empty()) return;
      for (std::thread& thread : threads) thread.join();
    }
  }

  std::map<std::string, int> says;
  std::atomic<int> calls = 0;
  bool threaded = false;
  uint64_t missing = 0;  // bytes that good answers lack

 private:
  void answer(RemoteRequests& requests) {
    for (size_t i = 0; i < requests.requests().size(); ++i) {
      const auto it = says.find(requests.path(i));
      const int said = it == says.end() ? -ENOENT : it->second;
      const RemoteRequest& request = requests.requests()[i];
      if (said >= 0) std::memset(request.dest, said, request.length);
      requests.finish(i, said >= 0 ? request.length - missing : 0, said >= 0 ? 0 : -said);
    }
  }
  std::mutex mutex_;
  std::vector<std::thread> threads_;
};

struct Setup {
  std::shared_ptr<FakeEngine> places = std::make_shared<FakeEngine>();
  std::shared_ptr<FakeEngine> source = std::make_shared<FakeEngine>();
  Failover failover{places, source};
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);

  Setup() {
    failover.add_volume("v", {"owner", "copy"});
    failover.add_volume("w", {"other"});
    failover.add_volume("x", {});
  }
  // (bytes or -errno, first byte) of each read of 100 bytes.
  std::vector<std::pair<int64_t, int>> read(const std::vector<std::string>& paths) {
    std::vector<RemoteRequest> requests;
    for (size_t i = 0; i < paths.size(); ++i) requests.push_back({0, 0, 100, &memory[i * 100]});
    const auto inbox = std::make_shared<RemoteInbox>();
    failover.read(std::make_shared<RemoteRequests>(requests, paths, nullptr, inbox, 7));
    std::vector<std::pair<int64_t, int>> out(paths.size());
    for (size_t answered = 0; answered < paths.size();) {
      const auto results = inbox->take(RemoteInbox::Clock::now() + 20s);
      REQUIRE_FALSE(results.empty());
      for (const RemoteResult& r : results) {
        ++answered;
        const size_t i = r.number - 7;
        out[i] = {r.error != 0 ? -r.error : static_cast<int64_t>(r.bytes),
                  static_cast<int>(memory[i * 100])};
      }
    }
    return out;
  }
};

}  // namespace

TEST_CASE("failover: the first place that has the bytes serves them") {
  for (const bool threaded : {false, true}) {
    CAPTURE(threaded);
    Setup s;
    s.places->threaded = threaded;
    s.places->says = {{"owner", 1}, {"copy", 2}, {"other", 3}};
    s.source->says = {{"v", 4}, {"w", 5}, {"x", 6}};
    using Answers = std::vector<std::pair<int64_t, int>>;
    CHECK(s.read({"v", "w", "x", "v"}) == Answers{{100, 1}, {100, 3}, {100, 6}, {100, 1}});
    s.places->join();
    s.places->says["owner"] = -EHOSTDOWN;
    s.places->says["other"] = -ENODATA;
    CHECK(s.read({"v", "w", "x", "v"}) == Answers{{100, 2}, {100, 5}, {100, 6}, {100, 2}});
    s.places->join();
    s.places->says["copy"] = -EIO;
    CHECK(s.read({"v", "v"}) == Answers{{100, 4}, {100, 4}});
    s.places->join();
    const auto figures = s.failover.figures();
    CHECK(figures.reads == 3);
    CHECK(figures.bytes == 300);
    CHECK(figures.reads_elsewhere == 2);
    CHECK(figures.reads_last == 5);
    CHECK(figures.unwritten == 1);
    CHECK(figures.failed == 0);
    // Back again: nothing is remembered.
    s.places->says["owner"] = 9;
    CHECK(s.read({"v"}) == Answers{{100, 9}});
    s.places->join();
  }
}

TEST_CASE("failover: what nobody serves fails with the last one's error") {
  Setup s;
  s.places->says = {{"owner", -EHOSTDOWN}, {"copy", -ENODATA}};
  s.source->says = {{"v", -ESTALE}};
  CHECK(s.read({"v"})[0].first == -ESTALE);
  CHECK(s.read({"unknown"})[0].first == -ENOENT);
  CHECK(s.failover.figures().failed == 2);

  Failover alone(s.places, nullptr);
  alone.add_volume("v", {"owner", "copy"});
  const auto inbox = std::make_shared<RemoteInbox>();
  alone.read(
      std::make_shared<RemoteRequests>(std::vector<RemoteRequest>{{0, 0, 100, s.memory.data()}},
                                       std::vector<std::string>{"v"}, nullptr, inbox, 0));
  CHECK(inbox->take(RemoteInbox::Clock::now() + 20s)[0].error == ENODATA);
}

TEST_CASE("failover: a copy that ends early is not the volume that was meant") {
  Setup s;
  s.places->says = {{"owner", 1}, {"copy", 2}};
  s.places->missing = 1;
  s.source->says = {{"v", 4}};
  CHECK(s.read({"v"})[0] == std::pair<int64_t, int>{100, 4});
}

TEST_CASE("failover: cancelled reads and closed engines ask nobody else") {
  Setup s;
  s.places->says = {{"owner", -ECANCELED}, {"copy", 2}};
  CHECK(s.read({"v"})[0].first == -ECANCELED);
  CHECK(s.places->calls == 1);
  s.failover.close();
  CHECK(s.read({"v", "x"})[0].first == -ECANCELED);
  CHECK(s.places->calls == 1);
  CHECK(s.source->calls == 0);
}

TEST_CASE("failover: nobody is asked for a read that was given up") {
  Setup s;
  s.places->says = {{"owner", -EHOSTDOWN}, {"copy", 2}};
  const auto inbox = std::make_shared<RemoteInbox>();
  const auto requests =
      std::make_shared<RemoteRequests>(std::vector<RemoteRequest>{{0, 0, 100, s.memory.data()}},
                                       std::vector<std::string>{"v"}, nullptr, inbox, 0);
  requests->abandon();
  s.failover.read(requests);
  CHECK(s.places->calls == 1);
  CHECK(inbox->take(RemoteInbox::Clock::now()).empty());
}
