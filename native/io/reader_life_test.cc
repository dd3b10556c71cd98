// The reader over time: memory stays within the budget, nothing hangs, knobs, forks, accounts.

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmath>

#include "testing/child_process.h"
#include "testing/reader_testing.h"

using namespace headrace;
using namespace headrace::io::reader_testing;
using io::Batch;
using io::DirectReads;
using io::EngineChoice;
using io::Job;
using io::Reader;
using io::ReaderOptions;

TEST_CASE("batches that nobody takes stay within the budget") {
  TestStore store({.samples = 8, .volumes = 1, .length_max = 1 << 20, .seed = 3});
  int64_t large = 0;
  for (size_t i = 0; i < 8; ++i) {
    if (store.spec.extents[i][0].length > 300000) large = static_cast<int64_t>(i);
  }
  const uint64_t length = store.spec.extents[static_cast<size_t>(large)][0].length;
  REQUIRE(length > 300000);
  store.warm();
  ReaderOptions options = with(EngineChoice::kAuto, DirectReads::kAuto);
  options.budget_bytes = 4 * length + 4 * 64;
  for (const unsigned workers : {1u, 3u}) {
    options.workers = workers;
    const Reading reading(store.catalog(), options);
    std::vector<std::shared_ptr<Job>> jobs;
    for (int i = 0; i < 40; ++i) jobs.push_back(reading->submit({large}));
    const auto finished = [&] {
      return std::count_if(jobs.begin(), jobs.end(), [](const auto& job) { return job->done(); });
    };
    REQUIRE(becomes([&] { return finished() == 4; }));
    REQUIRE(becomes([&] { return jobs[4]->waiting_for() == "memory within the budget"; }));
    std::this_thread::sleep_for(50ms);
    CHECK(finished() == 4);
    CHECK(reading->mapped_bytes() <= 4 * length * 9 / 8);
    CHECK(jobs[39]->waiting_for() == "a free worker");
    CHECK(jobs[0]->waiting_for() == "nothing");
    for (const auto& job : jobs) {
      check_batch(store, *job->wait(kLong), {large});
      CHECK(reading->mapped_bytes() <= 6 * length * 9 / 8);  // five and the one in our hands
    }
  }
}

TEST_CASE("a batch larger than the budget is let through when it is the oldest") {
  TestStore store({.samples = 100});
  ReaderOptions options;
  options.budget_bytes = 0;
  const Reading reading(store.catalog(), options);
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 10; ++i) jobs.push_back(reading->submit(store.all()));
  REQUIRE(becomes([&] { return jobs[0]->done(); }));
  std::this_thread::sleep_for(30ms);
  CHECK(!jobs[1]->done());
  for (const auto& job : jobs) check_batch(store, *job->wait(kLong), store.all());
}

TEST_CASE("waiting for a later batch first does not deadlock on the budget") {
  TestStore store({.samples = 100});
  ReaderOptions options;
  options.budget_bytes = 0;
  const Reading reading(store.catalog(), options);
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 10; ++i) jobs.push_back(reading->submit(store.all()));
  for (const size_t i : {9, 0, 5, 4, 8, 1, 2, 3, 7, 6}) {
    const auto batch = jobs[i]->wait(kLong);
    REQUIRE(batch != nullptr);
    check_batch(store, *batch, store.all());
  }
}

TEST_CASE("a batch that is dropped undelivered gives its budget back, done or not") {
  TestStore store({.samples = 100});
  ReaderOptions options;
  options.budget_bytes = 0;
  const Reading reading(store.catalog(), options);
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 10; ++i) jobs.push_back(reading->submit(store.all()));
  for (size_t i = 0; i + 1 < jobs.size(); ++i) {
    REQUIRE(becomes([&] { return jobs[i]->done(); }));
    CHECK(!jobs[i + 1]->done());
    jobs[i].reset();
    if (i == 3) jobs[++i].reset();  // one that may be waiting for memory
  }
  CHECK(becomes([&] { return jobs[9]->done(); }));
  check_batch(store, *jobs[9]->wait(kLong), store.all());
}

TEST_CASE("batches that failed give their budget back") {
  TestStore store({.samples = 50, .tree = true});
  store.spec.offset_width = store.spec.length_width = 8;
  store.spec.extents[4][0].length = uint64_t{1} << 46;
  ReaderOptions options;
  options.budget_bytes = 1 << 20;
  const Reading reading(store.catalog(), options);
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 20; ++i) jobs.push_back(reading->submit({4}));
  const auto last = reading->submit({5});
  CHECK(becomes([&] { return last->done(); }));
  for (const auto& job : jobs) CHECK(wait_error(*job) == ErrorKind::kVolume);
  check_batch(store, *last->wait(kLong), {5});
}

TEST_CASE("a batch is delivered once, and its bytes outlive reader, job and catalog") {
  TestStore store({.samples = 50});
  std::shared_ptr<Batch> batch;
  {
    const Reading reading(store.catalog(), {});
    const auto job = reading->submit(store.all());
    batch = job->wait(kLong);
    CHECK(wait_error(*job) == ErrorKind::kInvalidArgument);
    CHECK(job->done());
  }
  check_batch(store, *batch, store.all());
}

TEST_CASE("a wait that is over returns nothing, and the batch can still be had") {
  TestStore store({.samples = 30, .volumes = 1, .length_max = 2 << 20});
  store.evict();
  ReaderOptions options = with(EngineChoice::kThreads, DirectReads::kAuto);
  options.workers = 1;
  const Reading reading(store.catalog(), options);
  const auto first = reading->submit(store.all());
  const auto second = reading->submit({1});
  CHECK(second->wait(0) == nullptr);  // 30 MB stand before it
  CHECK(second->wait(-5) == nullptr);
  CHECK(second->wait(std::nan("")) == nullptr);
  const std::string waiting = second->waiting_for();
  CHECK((waiting == "a free worker" || first->done()));
  check_batch(store, *first->wait(HUGE_VAL), store.all());
  check_batch(store, *second->wait(1e300), {1});
}

TEST_CASE("what a batch waits for can be asked at any moment") {
  TestStore files({.samples = 300, .volumes = 3});
  TestStore tree({.samples = 100, .tree = true});
  for (TestStore* store : {&files, &tree}) {
    const Reading reading(store->catalog(), with(EngineChoice::kThreads, DirectReads::kAlways));
    std::set<std::string> answers;
    for (int i = 0; i < 30; ++i) {
      const auto job = reading->submit(store->all());
      while (!job->done()) answers.insert(job->waiting_for());
      check_batch(*store, *job->wait(kLong), store->all());
    }
    for (const std::string& answer : answers) {
      const bool known = answer == "a free worker" || answer == "the sample directory" ||
                         answer == "memory within the budget" || answer == "nothing" ||
                         answer.find(" reads") != std::string::npos;
      CAPTURE(answer);
      CHECK(known);
    }
    CHECK(answers.size() > 1);
  }
}

TEST_CASE("closing with queued batches answers every one of them") {
  TestStore store({.samples = 100});
  ReaderOptions options;
  options.budget_bytes = 0;
  const auto reader = Reader::make(store.catalog(), options, {0});
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 20; ++i) jobs.push_back(reader->submit(store.all()));
  REQUIRE(becomes([&] { return jobs[0]->done(); }));
  std::thread waiter([&] {
    try {
      while (jobs[19]->wait(kLong) == nullptr) {
      }
    } catch (const Error&) {
    }
  });
  CHECK(reader->close(kLong));
  waiter.join();
  int delivered = 0, refused = 0;
  for (size_t i = 0; i < 19; ++i) {
    try {
      delivered += jobs[i]->wait(kLong) != nullptr;
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::kInvalidArgument);
      ++refused;
    }
  }
  CHECK(delivered + refused == 19);
  CHECK(delivered >= 1);
  CHECK_THROWS_AS(reader->submit({0}), Error);
  CHECK(reader->close(0));  // again
}

TEST_CASE("a reader closes at once when it never read, and when its last job is dropped after") {
  TestStore store({.samples = 10});
  CHECK(Reader::make(store.catalog(), {}, {0})->close(0));
  std::shared_ptr<Job> job;
  {
    const auto reader = Reader::make(store.catalog(), {}, {0});
    job = reader->submit({1, 2});
    CHECK(reader->close(kLong));
  }
  job.reset();
}

TEST_CASE("many threads may submit and take at once") {
  TestStore store({.samples = 300, .volumes = 4});
  ReaderOptions options;
  options.workers = 3;
  options.budget_bytes = 2 << 20;
  const Reading reading(store.catalog(), options);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int round = 0; round < 15; ++round) {
        std::vector<int64_t> indices(40);
        for (auto& i : indices) i = static_cast<int64_t>(random() % 300);
        const auto job = reading->submit(indices);
        if (round % 5 == 4) continue;  // dropped
        const auto batch = job->wait(kLong);
        for (size_t i = 0; i < indices.size(); ++i) {
          const auto& expected = *store.contents[static_cast<size_t>(indices[i])][0];
          wrong += slot_text(*batch, i) != expected;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("pieces of batches are gathered in order, with their failures") {
  TestStore store({.samples = 60, .parts = 2});
  const auto& extent = store.spec.extents[20].front();
  const auto part = extent.part;
  REQUIRE(extent.length > 0);
  const char flipped = static_cast<char>((*store.contents[20][part])[0] ^ 1);
  testing::patch_file(store.paths[extent.volume], extent.offset, {flipped});
  const Reading reading(store.catalog(), {}, {0, 1});
  const std::shared_ptr<const Batch> a = reading.read({1, 2, 20, 3});
  const std::shared_ptr<const Batch> b = reading.read({20, 5, 6});
  REQUIRE(a->failures.size() == 1);
  const std::vector<io::Piece> pieces{{b, 1, 3}, {a, 1, 4}, {a, 0, 0}, {b, 0, 1}, {a, 3, 4}};
  const auto batch = reading->gather(pieces);
  check_batch(store, *batch, {5, 6, 2, 20, 3, 20, 3}, {0, 1}, {2 * 3 + part, 2 * 5 + part});
  CHECK(reading->gather({})->samples == 0);
  const std::vector<std::vector<io::Piece>> wrong{
      {{a, 2, 1}}, {{a, 0, 5}}, {{a, UINT64_MAX, UINT64_MAX}}, {{nullptr, 0, 0}}};
  for (const auto& list : wrong) CHECK_THROWS_AS(reading->gather(list), Error);
  const Reading other(store.catalog(), {}, {0});
  CHECK_THROWS_AS(other->gather(pieces), Error);
}

TEST_CASE("a forked child is refused by the parent's reader, does not hang, and reads by its own") {
  TestStore store({.samples = 200});
  const auto catalog = store.catalog();
  const Reading reading(catalog, {});
  check_batch(store, *reading.read(store.all()), store.all());
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) reading.read(store.all());
  });
  for (int round = 0; round < 10; ++round) {
    auto job = reading->submit(store.all());
    const auto end = testing::in_child([&] {
      int refused = 0;
      for (const auto& action : std::vector<std::function<void()>>{[&] { reading->submit({1}); },
                                                                   [&] { job->wait(1); }}) {
        try {
          action();
        } catch (const Error& error) {
          refused += error.kind == ErrorKind::kInvalidArgument;
        }
      }
      if (refused != 2 || job->done() || job->waiting_for().empty()) return 1;
      if (!reading->close(kLong) || !reading->engine_name().empty()) return 2;
      job.reset();
      const auto arena = Arena::make(1 << 20);
      if (!catalog->read_one(*arena, 3, -1, 0, -1, true)->failures.empty()) return 3;
#if !defined(__SANITIZE_THREAD__)  // which forbids threads in the child of a threaded process
      const auto own = Reader::make(store.catalog(), {}, {0});
      const auto batch = own->submit({1, 2, 3})->wait(kLong);
      if (batch == nullptr || slot_text(*batch, 1) != store.contents[2][0]) return 4;
      if (!own->close(kLong)) return 5;
#endif
      return 0;
    });
    CHECK(end.signal == 0);
    CHECK(end.exit_code == 0);
    check_batch(store, *job->wait(kLong), store.all());
  }
  stop = true;
  busy.join();
}

TEST_CASE("knobs are turned while batches are read, and nothing is lost") {
  TestStore store({.samples = 300, .volumes = 3});
  TestStore tree({.samples = 200, .tree = true});
  for (TestStore* data : {&store, &tree}) {
    for_every_route([&](ReaderOptions options) {
      const Reading reading(data->catalog(), options);
      std::atomic<bool> stop{false};
      std::thread turner([&] {
        std::mt19937 random(5);
        while (!stop) {
          reading->turn(1 + random() % 300, 1 << (12 + random() % 10));
          std::this_thread::sleep_for(200us);
        }
      });
      std::vector<std::shared_ptr<Job>> jobs;
      std::vector<std::vector<int64_t>> batches;
      for (size_t i = 0; i < 60; ++i) {
        batches.push_back(data->some(1 + i % 9));
        jobs.push_back(reading->submit(batches.back()));
      }
      for (size_t i = 0; i < jobs.size(); ++i) {
        check_batch(*data, *jobs[i]->wait(kLong), batches[i]);
      }
      stop = true;
      turner.join();
      const io::ReaderStats stats = reading->stats();
      CHECK(stats.delivered_samples == 291);
      CHECK(stats.buffered_bytes == 0);
      CHECK(stats.ready_bytes == 0);
      CHECK(stats.reads.in_flight == 0);
    });
  }
}

TEST_CASE("small batches get more workers when more reads are wanted in flight, and idle ones go") {
  TestStore store({.samples = 300, .volumes = 1});
  ReaderOptions options = with(EngineChoice::kThreads, DirectReads::kNever);
  const Reading reading(store.catalog(), options);
  const auto read_some = [&] {
    for (int i = 0; i < 10; ++i) reading.read({1});
  };
  read_some();
  CHECK(reading->stats().workers == 2);  // as the options say until somebody turns
  CHECK(reading->stats().reads_in_flight == 2 * 4);
  CHECK(reading->batches_ahead() == 16);
  reading->turn(20, {});
  read_some();
  // Four batches for each read that is wanted in flight, and one: as many as there may be.
  CHECK(reading->stats().workers == io::kWorkersMax);
  CHECK(reading->batches_ahead() == 2 * io::kWorkersMax);
  reading->turn(1000, {});
  CHECK(reading->stats().workers == io::kWorkersMax);
  CHECK(reading->stats().reads_in_flight == 1000);
  reading->turn(1, {});
  CHECK(reading->stats().workers == 5);
  read_some();
  CHECK_THROWS_AS(reading->turn(0, {}), Error);
}

TEST_CASE("more memory lets waiting batches go on at once") {
  TestStore store({.samples = 100});
  ReaderOptions options;
  options.budget_bytes = 0;
  const Reading reading(store.catalog(), options);
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 6; ++i) jobs.push_back(reading->submit(store.all()));
  REQUIRE(becomes([&] { return jobs[0]->done(); }));
  REQUIRE(becomes([&] { return jobs[1]->waiting_for() == "memory within the budget"; }));
  reading->turn({}, 1 << 30);
  CHECK(becomes([&] {
    return std::all_of(jobs.begin(), jobs.end(), [](const auto& job) { return job->done(); });
  }));
  const io::ReaderStats stats = reading->stats();
  CHECK(stats.wait_output_s > 0);
  CHECK(stats.buffer_bytes == 1 << 30);
  CHECK(stats.ready_bytes == stats.buffered_bytes);
  CHECK(stats.ready_bytes > 0);
  for (const auto& job : jobs) check_batch(store, *job->wait(kLong), store.all());
}

TEST_CASE("the reader accounts for what it read, gathered and delivered, and for its time") {
  TestStore store({.samples = 200, .volumes = 2});
  uint64_t bytes = 0;
  for (const auto& sample : store.contents) bytes += sample[0]->size();
  for (const bool cached : {false, true}) {
    CAPTURE(cached);
    store.warm();
    const auto direct = cached ? DirectReads::kAuto : DirectReads::kNever;
    const Reading reading(store.catalog(),
                          with(cached ? EngineChoice::kAuto : EngineChoice::kThreads, direct));
    CHECK(reading->stats().wait_input_s == 0);  // nobody has submitted anything yet
    const auto batch = reading.read(store.all());
    std::this_thread::sleep_for(2ms);
    const io::ReaderStats stats = reading->stats();
    CHECK(stats.delivered_samples == 200);
    CHECK(stats.delivered_bytes == bytes);
    CHECK(stats.gathered_bytes == (cached ? bytes : 0));
    CHECK(stats.reads.reads == batch->stats.direct_reads + batch->stats.buffered_reads);
    CHECK(stats.reads.bytes == batch->stats.bytes_read);
    CHECK((stats.reads.reads == 0) == cached);
    CHECK(stats.busy_s > 0);
    CHECK(stats.wait_input_s >= 0.002);  // at least one idle worker since the delivery
    CHECK(stats.buffered_bytes == 0);
  }
}

TEST_CASE("whoever waits for many batches is rung for each that is done, in any order") {
  TestStore store({.samples = 100});
  ReaderOptions options;
  options.done_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  REQUIRE(options.done_fd >= 0);
  std::vector<std::shared_ptr<Job>> jobs;
  {
    const Reading reading(store.catalog(), options);
    for (int i = 0; i < 20; ++i) jobs.push_back(reading->submit(store.all()));
    size_t taken = 0;
    while (taken < jobs.size()) {
      pollfd wait{options.done_fd, POLLIN, 0};
      REQUIRE(poll(&wait, 1, 10'000) == 1);
      eventfd_t rung = 0;
      REQUIRE(eventfd_read(options.done_fd, &rung) == 0);
      for (auto& job : jobs) {
        if (job == nullptr || !job->done()) continue;
        check_batch(store, *job->wait(kLong), store.all());
        job.reset();
        ++taken;
      }
    }
  }
  CHECK(close(options.done_fd) == 0);
}
