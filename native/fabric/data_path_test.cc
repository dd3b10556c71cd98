// Initiator and TargetQueues over socket pairs: what the loops do beyond the queue pairs' protocol.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <random>
#include <thread>

#include "fabric/initiator.h"
#include "fabric/target_queues.h"
#include "io/residency.h"
#include "testing/pdu_bytes.h"

using namespace headrace;
using namespace headrace::fabric;
using namespace headrace::testing;

namespace {

using Clock = io::RemoteInbox::Clock;

// A file of known bytes without a name, exported as namespace 1.
struct Disk {
  explicit Disk(size_t size) : data(pattern(size)), exports(std::make_shared<Exports>()) {
    fd = ::open(std::filesystem::temp_directory_path().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC,
                0600);
    REQUIRE(fd >= 0);
    REQUIRE(::write(fd, data.data(), size) == static_cast<ssize_t>(size));
    exports->add(1, fd, size, 512);
  }
  ~Disk() { ::close(fd); }

  Bytes data;
  std::shared_ptr<Exports> exports;
  int fd = -1;
};

struct Bench {
  explicit Bench(Disk& disk, InitiatorOptions options = {},
                 TargetQueuesOptions target_options = {.loops = 2, .readers = 4})
      : disk(disk), target(target_options), initiator(options) {
    number = initiator.add_target(1 << 20);
    initiator.add_volume("url", number, {1, 512, (disk.data.size() + 511) / 512});
  }

  // A queue between both; its other ends stay ours to break. Returns the initiator's end.
  int connect(uint16_t entries = 32, uint8_t dgst = 3) {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const int kept = ::dup(ends[0]);
    TargetQpairOptions there;
    there.entries = entries;
    there.dgst = dgst;
    there.sq_flow_control = false;
    target.adopt(ends[1], there, disk.exports, 7, {});
    QpairOptions here;
    here.entries = entries;
    here.dgst = dgst;
    here.sq_flow_control = false;
    initiator.attach(number, static_cast<uint16_t>(++label), ends[0], here);
    return kept;
  }

  // Reads ranges; returns each one's errno value.
  std::vector<int> read(const std::vector<io::RemoteRequest>& requests) {
    const auto inbox = std::make_shared<io::RemoteInbox>();
    initiator.read(std::make_shared<io::RemoteRequests>(
        requests, std::vector<std::string>(requests.size(), "url"), nullptr, inbox, 0));
    std::vector<int> errors(requests.size(), -1);
    const auto deadline = Clock::now() + std::chrono::seconds(30);
    for (size_t answered = 0; answered < requests.size();) {
      const auto results = inbox->take(deadline);
      REQUIRE(!results.empty());
      for (const io::RemoteResult& result : results) {
        REQUIRE(errors[result.number] == -1);
        errors[result.number] = result.error;
        ++answered;
      }
    }
    return errors;
  }

  // Random ranges, checked.
  void check(unsigned seed, size_t count) {
    std::mt19937 random(seed);
    std::vector<Bytes> memory(count);
    std::vector<io::RemoteRequest> requests;
    for (Bytes& bytes : memory) {
      const size_t length = 1 + random() % 50000;
      bytes.resize(length);
      requests.push_back({0, random() % (disk.data.size() - length), length, bytes.data()});
    }
    for (const int error : read(requests)) REQUIRE(error == 0);
    for (size_t i = 0; i < count; ++i) {
      REQUIRE(std::equal(memory[i].begin(), memory[i].end(),
                         disk.data.begin() + static_cast<ptrdiff_t>(requests[i].offset)));
    }
  }

  Disk& disk;
  TargetQueues target;
  Initiator initiator;
  uint64_t number = 0;
  int label = 0;
};

template <class Condition>
bool until(Condition condition) {
  for (int i = 0; i < 1000 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

// Whether none of its pages is in the page cache any more. Those that another processor has touched
// just now stay where they are at first, and one page that is left may bring its neighbours back.
bool evicted(const Disk& disk) {
  constexpr uint64_t kPage = 4096;
  for (int attempt = 0; attempt < 100; ++attempt) {
    REQUIRE(::posix_fadvise(disk.fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    bool any = false;
    for (uint64_t at = 0; at < disk.data.size() && !any; at += kPage)
      any = io::resident(disk.fd, at, kPage);
    if (!any) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace

TEST_CASE("threads read at once over several queues") {
  Disk disk(1 << 20);
  Bench bench(disk);
  const int ends[] = {bench.connect(), bench.connect(4, 0), bench.connect(2, 1)};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      for (unsigned round = 0; round < 4; ++round) bench.check(seed * 10 + round, 60);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(bench.initiator.figures().reads == 3 * 4 * 60);
  CHECK(bench.initiator.figures().failed == 0);
  for (const int end : ends) ::close(end);
}

TEST_CASE("large reads go from the page cache to the socket uncopied, with and without digests") {
  Disk disk(1 << 20);
  for (const uint8_t dgst : {0, 3}) {
    Bench bench(disk);
    const int end = bench.connect(32, dgst);
    bench.check(1, 100);
    const TargetFigures figures = bench.target.figures();
    CHECK(figures.reads_uncopied > 10);
    CHECK(figures.reads_uncopied < figures.reads);
    CHECK(bench.initiator.figures().digest_errors == 0);
    ::close(end);
  }
}

TEST_CASE("what is not in the page cache is read, also past it") {
  Disk disk(1 << 20);
  REQUIRE(::fsync(disk.fd) == 0);
  for (const uint64_t cache_bytes : {uint64_t{1}, uint64_t{1} << 40}) {
    // Where files live in memory nothing is ever cold: then this reads what is hot.
    const bool cold = evicted(disk);
    Bench bench(disk, {}, {.loops = 1, .readers = 4, .cache_bytes = cache_bytes});
    const int end = bench.connect();
    bench.check(1, 60);
    if (cold) CHECK(bench.target.figures().reads_cold > 0);
    if (cold && cache_bytes == 1) CHECK(!io::resident(disk.fd, 0, disk.data.size()));
    ::close(end);
  }
}

TEST_CASE("a file that shrank is a read error, however large the read") {
  Disk disk(1 << 20);
  Bench bench(disk);
  const int end = bench.connect();
  REQUIRE(::ftruncate(disk.fd, 100000) == 0);
  Bytes memory(3 * 65536);
  CHECK(bench.read({{0, 0, 65536, memory.data()},
                    {0, 65536, 65536, memory.data() + 65536},
                    {0, 200000, 65536, memory.data() + 131072}}) == std::vector{0, EIO, EIO});
  ::close(end);
}

TEST_CASE("a queue that breaks is read again on another, and told") {
  Disk disk(1 << 20);
  Bench bench(disk);
  const int broken = bench.connect();
  std::thread breaker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    ::shutdown(broken, SHUT_RDWR);
  });
  std::thread reader([&] { bench.check(1, 400); });
  breaker.join();
  REQUIRE(until([&] { return bench.initiator.figures().lost_queues == 1; }));
  const auto lost = bench.initiator.take_lost();
  REQUIRE(lost.size() == 1);
  CHECK(lost[0].label == 1);
  CHECK(lost[0].target == bench.number);
  const int other = bench.connect();
  reader.join();
  CHECK(bench.initiator.figures().failed == 0);
  ::close(broken);
  ::close(other);
}

TEST_CASE("a target that is given up fails what waits, and is read again when it returns") {
  Disk disk(1 << 16);
  Bench bench(disk);
  Bytes memory(512);
  std::thread waiting([&] { CHECK(bench.read({{0, 0, 512, memory.data()}})[0] == EHOSTDOWN); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  bench.initiator.give_up(bench.number, EHOSTDOWN);
  waiting.join();
  CHECK(bench.read({{0, 0, 512, memory.data()}})[0] == EHOSTDOWN);
  const int end = bench.connect();
  REQUIRE(until([&] { return bench.read({{0, 0, 512, memory.data()}})[0] == 0; }));
  CHECK(memory == Bytes(disk.data.begin(), disk.data.begin() + 512));
  ::close(end);
}

TEST_CASE("closing answers everything that waits") {
  Disk disk(1 << 16);
  Bench bench(disk);
  Bytes memory(512);
  std::thread waiting([&] { CHECK(bench.read({{0, 0, 512, memory.data()}})[0] == ECANCELED); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  bench.initiator.close();
  waiting.join();
  CHECK(bench.read({{0, 0, 512, memory.data()}})[0] == ECANCELED);
}

TEST_CASE("a read without a queue ends at its deadline") {
  Disk disk(1 << 16);
  Bench bench(disk, {.read_deadline_s = 0.05});
  Bytes memory(512);
  CHECK(bench.read({{0, 0, 512, memory.data()}})[0] == ETIMEDOUT);
}

TEST_CASE("a target without queues for a read's deadline fails later reads at once") {
  Disk disk(1 << 16);
  Bench bench(disk, {.read_deadline_s = 0.2});
  const int broken = bench.connect();
  bench.check(1, 5);
  ::shutdown(broken, SHUT_RDWR);
  REQUIRE(until([&] { return bench.initiator.figures().lost_queues == 1; }));
  Bytes memory(512);
  const int first = bench.read({{0, 0, 512, memory.data()}})[0];
  CHECK((first == ETIMEDOUT || first == EHOSTDOWN));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  CHECK(bench.read({{0, 0, 512, memory.data()}})[0] == EHOSTDOWN);
  const int end = bench.connect();
  REQUIRE(until([&] { return bench.read({{0, 0, 512, memory.data()}})[0] == 0; }));
  ::close(broken);
  ::close(end);
}

TEST_CASE("a volume may be a window of a namespace, and ends where that ends") {
  Disk disk(1 << 16);
  Bench bench(disk);
  const int end = bench.connect();
  struct Window {
    uint64_t first, bytes, offset, length, expected;
  };
  for (const Window& w : std::vector<Window>{{0, 1 << 16, 0, 700, 700},
                                             {1, 5000, 0, 5000, 5000},
                                             {513, 1000, 999, 10, 1},
                                             {513, 1000, 1000, 10, 0},
                                             {4096, 0, 0, 10, 0},
                                             {65'000, 536, 500, 600, 36},
                                             {65'000, ~uint64_t{0}, 500, 600, 36},
                                             {1 << 20, 100, 0, 10, 0}}) {
    bench.initiator.add_volume("url", bench.number, {1, 512, 128, w.first, w.bytes});
    Bytes memory(w.length, std::byte{0xa5});
    REQUIRE(bench.read({{0, w.offset, w.length, memory.data()}})[0] == 0);
    const size_t from = std::min<size_t>(w.first + w.offset, disk.data.size());
    CHECK(std::equal(memory.begin(), memory.begin() + static_cast<ptrdiff_t>(w.expected),
                     disk.data.begin() + static_cast<ptrdiff_t>(from)));
    CHECK(std::all_of(memory.begin() + static_cast<ptrdiff_t>(w.expected), memory.end(),
                      [](std::byte b) { return b == std::byte{0xa5}; }));
  }
  ::close(end);
}

TEST_CASE("a socket that cannot be waited for is a lost queue") {
  Disk disk(1 << 16);
  Bench bench(disk);
  const int file = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);  // epoll takes no files
  REQUIRE(file >= 0);
  bench.initiator.attach(bench.number, 9, file, {});
  REQUIRE(until([&] { return bench.initiator.figures().lost_queues == 1; }));
  const auto lost = bench.initiator.take_lost();
  REQUIRE(lost.size() == 1);
  CHECK(lost[0].label == 9);
  CHECK(lost[0].reason == "the socket cannot be waited for");
  const int end = bench.connect();
  bench.check(2, 5);
  ::close(end);
}

TEST_CASE("in a forked child reads fail, and the parent's connections stay") {
  Disk disk(1 << 16);
  Bench bench(disk);
  const int end = bench.connect();
  bench.check(1, 5);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    Bytes memory(512);
    const bool refused = bench.read({{0, 0, 512, memory.data()}})[0] == ECANCELED;
    bench.initiator.close();
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  bench.check(2, 5);
  CHECK(bench.initiator.figures().lost_queues == 0);
  ::close(end);
}

TEST_CASE("dropping an association closes its queues") {
  Disk disk(1 << 16);
  Bench bench(disk);
  const int end = bench.connect();
  bench.check(1, 5);
  CHECK(bench.target.figures().queues == 1);
  bench.target.drop(6);
  bench.target.drop(7);
  REQUIRE(until([&] { return bench.target.figures().queues == 0; }));
  ::close(end);
}

TEST_CASE("what is adopted after closing is closed") {
  Disk disk(1 << 16);
  Bench bench(disk);
  bench.target.close();
  const int end = bench.connect();
  std::byte one;
  ::shutdown(end, SHUT_WR);
  CHECK(::recv(end, &one, 1, 0) == 0);
  ::close(end);
}

TEST_CASE("a host that breaks the protocol gets a TermReq and is closed") {
  Disk disk(1 << 16);
  TargetQueues target({});
  int ends[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
  target.adopt(ends[1], {}, disk.exports, 1, from_hex("04 00 ff 00 48000000"));
  Bytes answer(200);
  const ssize_t count = ::recv(ends[0], answer.data(), answer.size(), MSG_WAITALL);
  REQUIRE(count == 24 + 8);
  CHECK(read_term_req(answer).status == FatalStatus::kInvalidHeaderField);
  CHECK(read_term_req(answer).info == 2);
  ::close(ends[0]);
  CHECK(until([&] { return target.figures().queues == 0; }));
  CHECK(target.figures().faults == 1);
}
