// Places for reads in flight: never more than allowed, changed while engines wait, and every read
// recorded.
#include "io/in_flight.h"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "io/engine_conformance.h"

using namespace headrace::io;
using namespace std::chrono_literals;

namespace {

std::vector<std::pair<const char*, conformance::Factory>> engines() {
  std::vector<std::pair<const char*, conformance::Factory>> list{{"threads", &make_threads_engine}};
  std::string reason;
  if (make_uring_engine({}, &reason) != nullptr) {
    list.emplace_back("uring", [](const EngineOptions& options) {
      std::string why;
      return make_uring_engine(options, &why);
    });
  } else {
    MESSAGE("io_uring is left out: " << reason);
  }
  return list;
}

}  // namespace

TEST_CASE("latencies fall into buckets of half an octave of microseconds") {
  CHECK(latency_bucket(0) == 0);
  CHECK(latency_bucket(999) == 0);
  for (size_t i = 0; i < 64; ++i) {
    const double low_us = std::exp2(static_cast<double>(i) / 2);
    const double high_us = std::exp2(static_cast<double>(i + 1) / 2);
    CHECK(latency_bucket(static_cast<int64_t>(std::ceil(low_us * 1000))) == i);
    CHECK(latency_bucket(static_cast<int64_t>(high_us * 1000) - 1) == i);
  }
  CHECK(latency_bucket(INT64_MAX) == 63);
}

TEST_CASE("places are bounded, partly granted, and unbounded without a limit") {
  InFlight places(10);
  CHECK(places.acquire(6) == 6);
  CHECK(places.acquire(6) == 4);
  CHECK(places.try_acquire(1) == 0);
  CHECK(places.acquire_until(1, InFlight::Clock::now() + 1ms) == 0);
  places.release(3);
  CHECK(places.try_acquire(9) == 3);
  CHECK(places.depth(64) == 10);
  InFlight unbounded;
  CHECK(unbounded.acquire(1000) == 1000);
  CHECK(unbounded.depth(64) == 64);
}

TEST_CASE("turning to more wakes who waits, turning to fewer holds back until reads finish") {
  InFlight places(2);
  REQUIRE(places.acquire(2) == 2);
  std::atomic<unsigned> got{0};
  std::thread waiter([&] { got = places.acquire(5); });
  places.turn(4);
  waiter.join();
  CHECK(got == 2);
  places.turn(1);
  const std::vector<int64_t> took(3, 1000);
  places.finished(took, 300);
  CHECK(places.try_acquire(1) == 0);  // one of four is still in flight
  places.finished(std::span(took).first(1), 100);
  CHECK(places.try_acquire(5) == 1);
}

TEST_CASE("a closed reader's engines wait for no place") {
  InFlight places(1);
  REQUIRE(places.acquire(1) == 1);
  std::thread waiter([&] { CHECK(places.acquire(7) == 7); });
  places.close();
  waiter.join();
}

TEST_CASE("reads, bytes, latencies and the integral of reads in flight are recorded") {
  InFlight places(8);
  REQUIRE(places.acquire(8) == 8);
  std::this_thread::sleep_for(2ms);
  const InFlightStats before = places.stats();
  CHECK(before.in_flight == 8);
  CHECK(before.in_flight_s >= 8 * 0.002);
  const std::vector<int64_t> took{1'000, 1'500, 5'000'000};
  places.finished(took, 777);
  const InFlightStats stats = places.stats();
  CHECK(stats.reads == 3);
  CHECK(stats.bytes == 777);
  CHECK(stats.in_flight == 5);
  CHECK(stats.latency_us[0] == 1);
  CHECK(stats.latency_us[1] == 1);
  CHECK(stats.latency_us[24] == 1);  // 4,096 to 5,793 us
  CHECK(std::accumulate(stats.latency_us.begin(), stats.latency_us.end(), uint64_t{0}) == 3);
}

TEST_CASE("engines share the places: never more reads in flight than there are, all delivered") {
  conformance::Folder folder;
  const auto bytes = folder.write("data", conformance::kFileBytes);
  const conformance::File file(folder.path("data"), O_RDONLY);
  for (const auto& [name, make] : engines()) {
    CAPTURE(name);
    const auto places = std::make_shared<InFlight>(3);
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        const auto engine = make({.queue_depth = 16, .threads = 8, .in_flight = places});
        conformance::Memory memory(2000 * 512);
        auto reads =
            conformance::random_reads(file.fd, 2000, conformance::kFileBytes, 512, 1, memory, t);
        conformance::read_all(*engine, reads);
        CHECK(conformance::count_wrong(reads, bytes) == 0);
      });
    }
    for (auto& thread : threads) thread.join();
    const InFlightStats stats = places->stats();
    CHECK(stats.in_flight_most >= 1);
    CHECK(stats.in_flight_most <= 3);
    CHECK(stats.reads == 6000);
    CHECK(stats.in_flight == 0);
    CHECK(places->try_acquire(10) == 3);  // every place was given back
  }
}

TEST_CASE("an engine follows the places beyond its own depth") {
  conformance::Folder folder;
  const auto bytes = folder.write("data", conformance::kFileBytes);
  const conformance::File file(folder.path("data"), O_RDONLY | O_DIRECT);
  for (const auto& [name, make] : engines()) {
    CAPTURE(name);
    const auto places = std::make_shared<InFlight>();
    const auto engine = make({.queue_depth = 2, .threads = 2, .in_flight = places});
    conformance::Memory memory(600 * 16384);
    auto reads =
        conformance::random_reads(file.fd, 600, conformance::kFileBytes, 16384, 512, memory, 1);
    unsigned most = 2;
    for (const unsigned limit : {0u, 1u, 40u, 300u, 5u}) {
      if (limit != 0) places->turn(limit);
      most = std::max(most, limit);
      memory.wipe();
      conformance::read_all(*engine, reads);
      CHECK(conformance::count_wrong(reads, bytes) == 0);
      CHECK(places->stats().in_flight == 0);
      CHECK(places->stats().in_flight_most <= most);
      // A ring is filled before anything completes; threads come as they are scheduled.
      if (std::string(name) == "uring") CHECK(places->stats().in_flight_most == most);
    }
  }
}

TEST_CASE("paths, failures and reads of nothing give their places back too") {
  conformance::Folder folder;
  const auto bytes = folder.write("data", 5000);
  for (const auto& [name, make] : engines()) {
    CAPTURE(name);
    const auto places = std::make_shared<InFlight>(4);
    const auto engine = make({.in_flight = places});
    conformance::Memory memory(300 * 5000);
    std::vector<Read> reads;
    for (size_t i = 0; i < 300; ++i) {
      reads.push_back(conformance::path_read(folder.fd(), i % 7 == 3 ? "missing" : "data", 5000,
                                             memory.at(i * 5000)));
      if (i % 5 == 1) {
        reads.back() = Read{};
        reads.back().fd = folder.fd();
      }
    }
    conformance::read_all(*engine, reads);
    CHECK(places->stats().in_flight == 0);
    CHECK(places->try_acquire(10) == 4);
  }
}
