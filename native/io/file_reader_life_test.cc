// FileReader: nothing it meets holds others up; given up, turned, closed and forked in any state.
#include <atomic>
#include <climits>
#include <cstdlib>
#include <random>

#include "core/error.h"
#include "testing/child_process.h"
#include "testing/file_reader_testing.h"

namespace headrace::io {
namespace {

using namespace conformance;
using namespace file_reader_testing;
using std::chrono::milliseconds;

TEST_CASE("a read that never returns holds up neither other files nor its taker nor close") {
  Folder folder;
  folder.write("stuck", 7777);
  const std::string good = text_of(folder.write("good", 5000));
  let_the_clock_tick();
  Gate gate;
  auto reader = FileReader::make(Gate::options(2));
  auto job = reader->submit({folder.path("stuck"), folder.path("good"), folder.path("good")});
  gate.wait_for(1);
  int error = 0;
  for (const size_t index : {1, 2}) {
    std::optional<FileBytes> bytes;
    do {  // until its read has begun: one that has not would be given up
      std::this_thread::yield();
    } while (reader->stats().reads < 2);
    bytes = job->take(index, 10, &error);
    REQUIRE(bytes);
    CHECK(text_of(*bytes) == good);
  }
  CHECK(!job->done());
  CHECK(job->wait(0.01) == nullptr);
  CHECK(!job->take(0, 60, &error));  // patience is a multiple of what reads take
  CHECK(error == ETIMEDOUT);
  CHECK(reader->stats().gave_up == 1);
  CHECK(reader->stats().in_flight == 1);
  CHECK(!reader->close(0.05));
  job.reset();
  gate.open();
  CHECK(reader->close(10));
}

TEST_CASE("what has not begun is given up at once, and is not read") {
  Folder folder;
  folder.write("stuck", 7777);
  folder.write("good", 5000);
  let_the_clock_tick();
  Gate gate;
  Reader reader(Gate::options(1));
  const auto first = reader->submit({folder.path("stuck")});
  gate.wait_for(1);
  const auto second = reader->submit({folder.path("good"), folder.path("good")});
  int error = 0;
  CHECK(!second->take(0, 60, &error));
  CHECK(error == ECANCELED);
  second->forget(1);
  CHECK(second->done());
  auto third = reader->submit({folder.path("good")});
  third.reset();  // nobody wants it any more
  gate.open();
  REQUIRE(first->wait(10) != nullptr);
  CHECK(reader->stats().reads == 1);
}

TEST_CASE(
    "readers that are turned, starved, dropped and closed in any state end, and lose nothing") {
  Folder folder;
  constexpr unsigned kFiles = 24;
  std::vector<std::string> paths, texts;
  for (unsigned i = 0; i < kFiles; ++i) {
    const std::string name = std::to_string(i);
    texts.push_back(text_of(folder.write(name, 500 + 9000 * i, i)));
    paths.push_back(folder.path(name));
  }
  let_the_clock_tick();
  SlowFigures figures;
  figures.latency_median_s = 2e-4;
  figures.latency_sigma = 1;
  figures.open_median_s = 1e-4;
  figures.open_sigma = 1;
  char root[PATH_MAX];
  REQUIRE(realpath(folder.path("0").c_str(), root) != nullptr);
  const std::string above = std::string(root).substr(0, std::string(root).rfind('/'));
  const auto slow = std::make_shared<const SlowFiles>(std::make_shared<SlowModel>(figures),
                                                      std::vector<std::string>{above});
  std::mt19937 random(7);
  const auto below = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
  uint64_t taken = 0, given_up = 0;
  for (int round = 0; round < 60; ++round) {
    Reader reader({.reads_in_flight = 1 + below(8),
                   .buffer_bytes = uint64_t{64 << 10} << below(5),
                   .slow = below(2) == 0 ? slow : nullptr});
    std::vector<std::shared_ptr<FileJob>> jobs;
    std::vector<std::vector<unsigned>> asked;
    for (unsigned j = 1 + below(6); j > 0; --j) {
      std::vector<std::string> some;
      asked.emplace_back();
      for (unsigned n = 1 + below(8); n > 0; --n) {
        asked.back().push_back(below(kFiles));
        some.push_back(paths[asked.back().back()]);
      }
      jobs.push_back(reader->submit(some));
    }
    if (below(3) == 0) reader->turn(1 + below(8), uint64_t{64 << 10} << below(5), {});
    const bool all = below(2) == 0;  // else it is closed with work left
    for (size_t j = 0; j < jobs.size() && (all || below(4) != 0); ++j) {
      if (all) REQUIRE(jobs[j]->wait(10) != nullptr);
      for (size_t i = 0; i < asked[j].size(); ++i) {
        int error = 0;
        if (const auto bytes = jobs[j]->take(i, 10, &error)) {
          CHECK(text_of(*bytes) == texts[asked[j][i]]);
          ++taken;
        } else {
          CHECK((error == ECANCELED || error == EFBIG || error == ENOBUFS || error == ETIMEDOUT));
          ++given_up;
        }
      }
      jobs[j].reset();
    }
    if (below(2) == 0) jobs.clear();
    CHECK(reader->close(10));
    jobs.clear();
    CHECK(reader.drained());
  }
  CHECK(taken > 100);
  CHECK(given_up > 100);
}

TEST_CASE("many threads submit, take, forget and turn at once") {
  Folder folder;
  std::vector<std::string> paths, texts;
  for (int i = 0; i < 32; ++i) {
    texts.push_back(text_of(folder.write(std::to_string(i), 1000 + 997 * i, i)));
    paths.push_back(folder.path(std::to_string(i)));
  }
  let_the_clock_tick();
  Reader reader({.reads_in_flight = 4, .buffer_bytes = 256 << 10});
  std::atomic<size_t> wrong = 0, served = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (unsigned round = 0; round < 20; ++round) {
        const auto job = reader->submit({paths.begin() + t, paths.begin() + t + 8});
        if (round % 4 == 0) job->forget(round % 8);
        if (round % 5 == 0) reader->turn(1 + round % 7, std::nullopt, std::nullopt);
        if (round % 2 == 0) job->wait(10);
        for (size_t i = 0; i < 8; ++i) {
          int error = 0;
          const auto bytes = job->take(i, 1, &error);
          if (!bytes) continue;
          ++served;
          if (text_of(*bytes) != texts[t + i]) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(served > 100);
  CHECK(reader.drained());
}

#if !defined(__SANITIZE_THREAD__)
TEST_CASE("a forked child is refused, lets go without harm, and reads with its own") {
  Folder folder;
  folder.write("data", 5000);
  let_the_clock_tick();
  Reader reader;
  auto job = reader->submit({folder.path("data")});
  REQUIRE(job->wait(10) != nullptr);
  const auto end = testing::in_child([&] {
    int error = 0;
    if (job->take(0, 1, &error) || error != ECANCELED) return 1;
    if (job->done()) return 2;
    try {
      reader->submit({folder.path("data")});
      return 3;
    } catch (const Error&) {
    }
    job.reset();
    if (!reader->close(1)) return 4;
    Reader own;
    const auto batch = own->submit({folder.path("data")})->wait(5);
    return batch != nullptr && batch->errors[0] == 0 ? 0 : 5;
  });
  CHECK(end.exit_code == 0);
  int error = 0;
  CHECK(job->take(0, 1, &error));
}
#endif

TEST_CASE("closing ends what was submitted, and refuses more") {
  Folder folder;
  folder.write("data", 5000);
  auto reader = FileReader::make({});
  CHECK(reader->close(1));
  const auto job = reader->submit({folder.path("data")});
  const auto batch = job->wait(10);
  REQUIRE(batch != nullptr);
  CHECK(batch->errors[0] == ECANCELED);
  CHECK(reader->submit({})->done());
}

}  // namespace
}  // namespace headrace::io
