// The ring of opens: reports come in order and as they were made; nothing that a writer does or
// leaves undone stops the reader.
#include "preload/open_ring.h"

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "core/error.h"
#include "testing/child_process.h"

using namespace headrace;
using namespace headrace::preload;

namespace {

void report(OpenRing& ring, int64_t file, uint32_t process, Opened what) {
  ring_report(ring.data(), ring.capacity(), file, process, what);
}

RingHeader& header_of(OpenRing& ring) { return *reinterpret_cast<RingHeader*>(ring.data()); }

}  // namespace

TEST_CASE("reports come in order, as they were made") {
  OpenRing ring(64);
  CHECK(ring.take(0).empty());
  report(ring, 5, 100, Opened::kOriginal);
  report(ring, -1, 4194304, Opened::kUnknown);
  report(ring, 4'000'000'000, 7, Opened::kCopy);
  const auto reports = ring.take(0);
  REQUIRE(reports.size() == 3);
  CHECK(reports[0].file == 5);
  CHECK(reports[0].process == 100);
  CHECK(reports[0].what == static_cast<int64_t>(Opened::kOriginal));
  CHECK(reports[1].file == -1);
  CHECK(reports[1].process == 4194304);
  CHECK(reports[2].file == 4'000'000'000);
  CHECK(reports[2].position == 2);
  CHECK(ring.lost() == 0);
  CHECK(ring.totals().opened[static_cast<size_t>(Opened::kCopy)] == 1);
}

TEST_CASE("the oldest reports are lost when nobody takes them, and counted all the same") {
  OpenRing ring(64);
  for (int i = 0; i < 1000; ++i) report(ring, i, 1, Opened::kOriginal);
  const auto reports = ring.take(0);
  REQUIRE(reports.size() == 64);
  CHECK(reports.front().file == 936);
  CHECK(reports.back().file == 999);
  CHECK(ring.lost() == 936);
  CHECK(ring.totals().opened[0] == 1000);
}

TEST_CASE("a reader that waits is woken by a report, and by none when its time is over") {
  OpenRing ring(64);
  const auto begun = std::chrono::steady_clock::now();
  CHECK(ring.take(0.02).empty());
  CHECK(std::chrono::steady_clock::now() - begun >= std::chrono::milliseconds(19));
  std::thread writer([&] {
    while (header_of(ring).asleep.load() == 0) std::this_thread::yield();
    report(ring, 1, 2, Opened::kOriginal);
  });
  CHECK(ring.take(30).size() == 1);  // the test's own limit would end a wait
  writer.join();
}

TEST_CASE("a writer that was killed in the middle costs its own report only") {
  OpenRing ring(64);
  report(ring, 1, 1, Opened::kOriginal);
  header_of(ring).head.fetch_add(1);  // claimed, and never written
  report(ring, 3, 1, Opened::kOriginal);
  auto reports = ring.take(0);
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].file == 1);
  reports = ring.take(0);
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].file == 3);
  CHECK(ring.lost() == 1);
  // One that comes back much later finds its place taken.
  for (int i = 0; i < 62; ++i) report(ring, i, 1, Opened::kOriginal);
  CHECK(ring.take(0).size() == 62);
  report(ring, 70, 1, Opened::kOriginal);  // place 65, where 1 was
  RingSlot& slot = ring_slots(ring.data())[1];
  slot.file.store(uint64_t{2} << 32 | 9);
  slot.who.store(uint64_t{2} << 32 | 9);
  CHECK(ring.take(0).empty());
  CHECK(ring.lost() == 2);
}

TEST_CASE("many processes write at once and nothing is mixed up") {
  OpenRing ring(1 << 16);
  constexpr int kEach = 5000;
  std::vector<std::thread> writers;
  for (uint32_t w = 0; w < 3; ++w) {
    writers.emplace_back([&, w] {
      for (int i = 0; i < kEach; ++i) report(ring, w * kEach + i, w + 1, Opened::kOriginal);
    });
  }
  std::vector<int64_t> next(3, 0);
  uint64_t seen = 0, missing = 0, wrong = 0;
  // A writer that had to wait for a processor in the middle of a report is not waited for.
  while (seen + ring.lost() < 3 * kEach) {
    for (const OpenReport& r : ring.take(1)) {
      const auto w = static_cast<size_t>(r.process - 1);
      wrong += w >= 3;
      if (w >= 3) continue;
      const int64_t number = r.file - static_cast<int64_t>(w) * kEach;
      wrong += number < next[w] || number >= kEach;
      missing += static_cast<uint64_t>(number - next[w]);
      next[w] = number + 1;
      ++seen;
    }
  }
  for (std::thread& writer : writers) writer.join();
  for (const int64_t after : next) missing += static_cast<uint64_t>(kEach - after);
  CHECK(wrong == 0);
  CHECK(seen + ring.lost() == 3 * kEach);
  CHECK(missing == ring.lost());
  CHECK(ring.lost() < kEach);
}

TEST_CASE("nonsense in the ring is neither believed nor waited for") {
  OpenRing ring(1024);
  std::mt19937_64 random(4);
  auto* words = reinterpret_cast<std::atomic<uint64_t>*>(ring.data());
  const size_t count = ring_nbytes(1024) / 8;
  for (int round = 0; round < 300; ++round) {
    for (int k = 0; k < 50; ++k) words[random() % count].store(random());
    header_of(ring).head.store(round % 3 == 0 ? random() : header_of(ring).head.load() + round);
    for (const OpenReport& r : ring.take(0)) {
      REQUIRE(r.file >= -1);
      REQUIRE(r.what < static_cast<int64_t>(kOpenedKinds));
    }
  }
  // It works again by itself.
  ring.take(0);
  report(ring, 77, 1, Opened::kOriginal);
  bool found = false;
  for (int k = 0; k < 5 && !found; ++k) {
    for (const OpenReport& r : ring.take(0)) found = found || r.file == 77;
  }
  CHECK(found);
}

TEST_CASE("a capacity that makes no ring is refused") {
  CHECK_THROWS_AS(OpenRing(0), Error);
  CHECK_THROWS_AS(OpenRing(1000), Error);
  CHECK_THROWS_AS(OpenRing(uint64_t{1} << 40), Error);
}
