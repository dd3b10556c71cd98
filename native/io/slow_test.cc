// The simulated storage: its figures in virtual time, and the engine that suffers them.
#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <thread>

#include "core/error.h"
#include "io/engine_conformance.h"
#include "io/reader.h"
#include "io/slow_engine.h"
#include "io/slow_files.h"
#include "testing/child_process.h"
#include "testing/store_builder.h"

using namespace headrace;
using io::InFlight;
using io::SlowFigures;
using io::SlowModel;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

std::vector<double> latencies(SlowModel& model, size_t count, bool opens = false) {
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i) {
    const int64_t now = static_cast<int64_t>(i) * 1000 * kSecond;  // each finds it idle
    values.push_back(static_cast<double>(model.admit(now, 0, opens).due_ns - now) / kSecond);
  }
  std::sort(values.begin(), values.end());
  return values;
}

// An engine behind a storage that takes 200 us and forgets no rule of engines.
std::unique_ptr<io::Engine> make_slow(const io::EngineOptions& options) {
  io::EngineOptions inner = options;
  inner.in_flight = nullptr;
  return io::make_slow_engine(
      io::make_threads_engine(inner),
      std::make_shared<SlowModel>(SlowFigures{.latency_median_s = 2e-5, .latency_sigma = 0.5}),
      options);
}

}  // namespace

HEADRACE_ENGINE_CONFORMANCE("slow", make_slow);

TEST_CASE("latencies have the median and the tail that were asked for, and a seed repeats them") {
  const SlowFigures figures{
      .latency_median_s = 0.03, .latency_sigma = 0.8, .open_median_s = 0.01, .seed = 5};
  SlowModel model(figures), same(figures), other({.latency_median_s = 0.03, .seed = 6});
  const auto values = latencies(model, 20'000);
  CHECK(values[10'000] == doctest::Approx(0.03).epsilon(0.03));
  CHECK(values[19'800] == doctest::Approx(0.03 * std::exp(2.326 * 0.8)).epsilon(0.06));
  CHECK(values == latencies(same, 20'000));
  CHECK(values != latencies(other, 20'000));
  SlowModel opening({.open_median_s = 0.01});
  CHECK(latencies(opening, 3, true)[1] == doctest::Approx(0.01));
  CHECK(latencies(opening, 3, false)[1] == 0);
  CHECK(opening.admit_open(0) == kSecond / 100);
}

TEST_CASE("all transfers share the link, and each has a bound of its own") {
  SlowModel link({.latency_median_s = 0.001, .bandwidth_bytes_per_s = 1e9});
  for (int i = 1; i <= 50; ++i) {  // 100 MB each, all at once: one after the other at 1 GB/s
    CHECK(link.admit(0, 100'000'000, false).due_ns == i * kSecond / 10 + kSecond / 1000);
  }
  // It has been idle since: the debt of the past is not the present's.
  CHECK(link.admit(100 * kSecond, 1'000'000'000, false).due_ns == 101 * kSecond + kSecond / 1000);
  // Fractions of nanoseconds are not lost, however small the transfers.
  SlowModel quick({.bandwidth_bytes_per_s = 3e9});
  int64_t due = 0;
  for (int i = 0; i < 3'000'000; ++i) due = quick.admit(0, 1, false).due_ns;
  CHECK(due == doctest::Approx(1'000'000).epsilon(1e-6));
  SlowModel stream({.stream_bytes_per_s = 1e8});
  for (int i = 0; i < 5; ++i) CHECK(stream.admit(0, 200'000'000, false).due_ns == 2 * kSecond);
}

TEST_CASE("what moves no bytes passes by the transfers that queue for the link") {
  SlowModel model({.open_median_s = 0.001, .bandwidth_bytes_per_s = 1e6});
  CHECK(model.admit(0, 5'000'000, false).due_ns == 5 * kSecond);
  CHECK(model.admit_open(0) == kSecond / 1000);
  CHECK(model.admit(0, 0, false).due_ns == 0);
  CHECK(model.admit(0, 1'000'000, false).due_ns == 6 * kSecond);
}

TEST_CASE("a file's requests follow when they are due, however late its thread is woken") {
  // It began a minute ago, so that all of it is due already: nothing is slept here.
  const auto model = std::make_shared<SlowModel>(SlowFigures{
      .latency_median_s = 0.5, .open_median_s = 0.25, .bandwidth_bytes_per_s = 1 << 20});
  const io::SlowFiles files(model, {"/"});
  const int64_t begun = SlowModel::now_ns() - 60 * kSecond;
  files.look_delay(begun);
  const io::SlowAnswer answer = files.read_delay(begun, 3 << 20);  // three requests
  CHECK(answer.error == 0);
  CHECK(answer.due_ns == begun + kSecond / 4 + 3 * (kSecond + kSecond / 2));
  // The link was given away up to the last byte, and not beyond.
  const int64_t sent = answer.due_ns - kSecond / 2;
  CHECK(model->admit(begun, 1 << 20, false).due_ns == sent + kSecond + kSecond / 2);
}

TEST_CASE("requests queue for the servers there are") {
  SlowModel disk({.latency_median_s = 0.01, .parallelism = 1});
  for (int i = 1; i <= 20; ++i) CHECK(disk.admit(0, 0, false).due_ns == i * kSecond / 100);
  SlowModel four({.latency_median_s = 0.01, .parallelism = 4});
  for (int i = 0; i < 20; ++i) CHECK(four.admit(0, 0, false).due_ns == (i / 4 + 1) * kSecond / 100);
}

TEST_CASE("some reads fail, as many as asked for, and move no bytes") {
  SlowModel model({.error_rate = 0.1, .seed = 3});
  int errors = 0;
  for (int i = 0; i < 20'000; ++i) errors += model.admit(0, 1, false).error == EIO;
  CHECK(errors == doctest::Approx(2000).epsilon(0.1));
  CHECK(model.stats().errors == static_cast<uint64_t>(errors));
  CHECK(model.stats().requests == 20'000);
  CHECK(model.stats().bytes == static_cast<uint64_t>(20'000 - errors));
}

TEST_CASE("latency changes in steps, scheduled or at once") {
  SlowModel model({.latency_median_s = 0.01, .steps = {{10, 5}, {20, 0.5}}});
  const int64_t origin = SlowModel::now_ns();
  const auto takes = [&](double at_s) {
    const int64_t now = origin + static_cast<int64_t>(at_s * kSecond);
    return static_cast<double>(model.admit(now, 0, false).due_ns - now) / kSecond;
  };
  CHECK(takes(5) == doctest::Approx(0.01));
  CHECK(takes(15) == doctest::Approx(0.05));
  CHECK(takes(25) == doctest::Approx(0.005));
  model.scale_latency(4);
  CHECK(takes(25) == doctest::Approx(0.02));
  CHECK_THROWS_AS(model.scale_latency(0), Error);
}

TEST_CASE("forked children queue for the same storage") {
  SlowModel model({.bandwidth_bytes_per_s = 1e9});
  CHECK(model.admit(0, 1'000'000'000, false).due_ns == kSecond);
  const auto end = testing::in_child([&] {
    if (model.admit(0, 1'000'000'000, false).due_ns != 2 * kSecond) return 1;
    model.scale_latency(3);
    return 0;
  });
  CHECK(end.exit_code == 0);
  CHECK(model.admit(0, 1'000'000'000, false).due_ns == 3 * kSecond);
  CHECK(model.latency_factor(0) == 3);
  CHECK(model.stats().requests == 3);
}

TEST_CASE("figures that make no sense are refused") {
  for (const SlowFigures& figures : std::vector<SlowFigures>{{.latency_median_s = -1},
                                                             {.latency_sigma = NAN},
                                                             {.open_median_s = 1e9},
                                                             {.bandwidth_bytes_per_s = -5},
                                                             {.parallelism = 5000},
                                                             {.error_rate = 1.5},
                                                             {.steps = {{5, 1}, {4, 1}}},
                                                             {.steps = {{5, 0}}}}) {
    CHECK_THROWS_AS(SlowModel{figures}, Error);
  }
}

TEST_CASE("a thousand reads are in flight on one thread, and none is early") {
  io::conformance::Folder folder;
  const auto bytes = folder.write("data", io::conformance::kFileBytes);
  const io::conformance::File file(folder.path("data"), O_RDONLY);
  const auto model = std::make_shared<SlowModel>(SlowFigures{.latency_median_s = 0.02});
  const auto places = std::make_shared<InFlight>(1000);
  const auto engine =
      io::make_slow_engine(io::make_threads_engine({.threads = 1}), model, {.in_flight = places});
  io::conformance::Memory memory(2000 * 512);
  auto reads =
      io::conformance::random_reads(file.fd, 2000, io::conformance::kFileBytes, 512, 1, memory, 1);
  io::conformance::read_all(*engine, reads);
  CHECK(io::conformance::count_wrong(reads, bytes) == 0);
  const io::InFlightStats stats = places->stats();
  CHECK(stats.in_flight_most == 1000);
  CHECK(stats.in_flight == 0);
  // Bucket 28 begins at 16,384 us; a read of 20 ms or more lies there or later.
  CHECK(std::accumulate(stats.latency_us.begin(), stats.latency_us.begin() + 28, uint64_t{0}) == 0);
  CHECK(std::string(engine->name()) == "simulated slow over threads");
}

TEST_CASE("a simulated store delivers its samples by every route, and never from the page cache") {
  for (const bool tree : {false, true}) {
    testing::TestStore store({.samples = 100, .volumes = 2, .tree = tree});
    store.warm();
    const auto model = std::make_shared<SlowModel>(
        SlowFigures{.latency_median_s = 1e-4, .open_median_s = 1e-4, .error_rate = 0.2});
    for (const auto engine : {io::EngineChoice::kAuto, io::EngineChoice::kMmap}) {
      io::ReaderOptions options;
      options.engine = engine;
      options.slow = model;
      options.coalesce_gap_bytes = 0;
      const auto reader = io::Reader::make(store.catalog(), options, {0});
      uint64_t failed = 0, errors = model->stats().errors;
      for (int round = 0; round < 5; ++round) {
        const auto batch = reader->submit(store.all())->wait(60);
        CHECK(batch->stats.cached_reads == 0);
        for (const io::Failure& failure : batch->failures) CHECK(failure.system_errno == EIO);
        failed += batch->failures.size();
        std::vector<bool> is_failed(100);
        for (const io::Failure& failure : batch->failures) is_failed[failure.slot] = true;
        for (size_t i = 0; i < 100; ++i) {
          const std::string text(
              reinterpret_cast<const char*>(batch->buffer->data) + batch->offsets[i],
              static_cast<size_t>(batch->lengths[i]));
          if (!is_failed[i]) CHECK(text == store.contents[i][0].value_or(""));
        }
      }
      errors = model->stats().errors - errors;
      CHECK(errors > 0);            // provoked,
      CHECK(failed < errors);       // mostly mended by the second try,
      if (tree) CHECK(failed > 0);  // and else reported
      CHECK(reader->engine_name().starts_with("simulated slow over "));
      CHECK(reader->close(60));
    }
  }
}

TEST_CASE("closing does not wait for a storage that is as slow as it pleases") {
  testing::TestStore store({.samples = 50});
  io::ReaderOptions options;
  options.slow = std::make_shared<SlowModel>(SlowFigures{.latency_median_s = 1000});
  const auto reader = io::Reader::make(store.catalog(), options, {0});
  const auto job = reader->submit(store.all());
  while (reader->stats().reads.in_flight == 0) std::this_thread::yield();
  CHECK(reader->close(60));
  CHECK(job->wait(1)->failures.empty());
}
