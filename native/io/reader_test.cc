// The reader: batches equal their samples by every route, each fault is a failure of its slot
// alone, memory stays within the budget, and nothing hangs.
#include "io/reader.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <iterator>
#include <thread>

#include "core/error.h"
#include "testing/child_process.h"
#include "testing/store_builder.h"

using namespace headrace;
using io::Batch;
using io::DirectReads;
using io::EngineChoice;
using io::FailureKind;
using io::Job;
using io::Reader;
using io::ReaderOptions;
using testing::StoreSpec;
using testing::TestStore;
using namespace std::chrono_literals;

namespace {

constexpr double kLong = 60;

// A reader that ends its threads with the test.
struct Reading {
  std::shared_ptr<Reader> reader;
  Reading(std::shared_ptr<const io::Catalog> catalog, ReaderOptions options,
          std::vector<int> parts = {0})
      : reader(Reader::make(std::move(catalog), options, std::move(parts))) {}
  ~Reading() { CHECK(reader->close(kLong)); }
  Reader* operator->() const { return reader.get(); }
  std::shared_ptr<Batch> read(const std::vector<int64_t>& indices) const {
    return reader->submit(indices)->wait(kLong);
  }
};

std::string slot_text(const Batch& batch, size_t slot) {
  return {reinterpret_cast<const char*>(batch.buffer->data) + batch.offsets[slot],
          static_cast<size_t>(batch.lengths[slot])};
}

// Every slot of the batch but those in `failed` is what the store holds.
void check_batch(const TestStore& store, const Batch& batch, const std::vector<int64_t>& indices,
                 const std::vector<int>& parts = {0}, const std::vector<uint64_t>& failed = {}) {
  REQUIRE(batch.indices == indices);
  REQUIRE(batch.samples == indices.size());
  REQUIRE(batch.parts == parts.size());
  REQUIRE(batch.offsets.size() == indices.size() * parts.size());
  REQUIRE(batch.labels.size() == indices.size());
  std::vector<uint64_t> found;
  for (const io::Failure& failure : batch.failures) found.push_back(failure.slot);
  REQUIRE(found == failed);
  for (size_t i = 0; i < indices.size(); ++i) {
    for (size_t p = 0; p < parts.size(); ++p) {
      const size_t slot = i * parts.size() + p;
      if (std::find(failed.begin(), failed.end(), slot) != failed.end()) continue;
      const auto& expected = store.contents[static_cast<size_t>(indices[i])];
      REQUIRE(slot_text(batch, slot) == expected[static_cast<size_t>(parts[p])].value_or(""));
      REQUIRE(static_cast<uint64_t>(batch.offsets[slot] + batch.lengths[slot]) <= batch.bytes);
    }
  }
}

ReaderOptions with(EngineChoice engine, DirectReads direct) {
  ReaderOptions options;
  options.engine = engine;
  options.direct = direct;
  options.engine_options.threads = 4;
  return options;
}

bool uring_works() {
  static const bool works = [] {
    std::string reason;
    const bool made = io::make_uring_engine({}, &reason) != nullptr;
    if (!made) MESSAGE("io_uring is left out: " << reason);
    return made;
  }();
  return works;
}
std::vector<EngineChoice> engines() {
  std::vector<EngineChoice> list{EngineChoice::kAuto, EngineChoice::kThreads, EngineChoice::kMmap};
  if (uring_works()) list.push_back(EngineChoice::kUring);
  return list;
}
const std::vector<DirectReads> kDirect{DirectReads::kAuto, DirectReads::kAlways,
                                       DirectReads::kNever};

void for_every_route(const std::function<void(ReaderOptions)>& body) {
  for (const EngineChoice engine : engines()) {
    for (const DirectReads direct : kDirect) {
      CAPTURE(static_cast<int>(engine));
      CAPTURE(static_cast<int>(direct));
      body(with(engine, direct));
    }
  }
}

ErrorKind wait_error(Job& job) {
  try {
    job.wait(kLong);
  } catch (const Error& error) {
    return error.kind;
  }
  FAIL("the batch was delivered");
  return ErrorKind::kVolumeTimeout;
}

// Waits, without `Job::wait`, which would let the job through the budget.
bool becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

size_t open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd"), end;
  return static_cast<size_t>(std::distance(entries, end));
}

}  // namespace

TEST_CASE("random batches equal the samples by every engine, directness and residency") {
  TestStore store({.samples = 500, .volumes = 4});
  for_every_route([&](ReaderOptions options) {
    for (const bool cached : {true, false}) {
      CAPTURE(cached);
      cached ? store.warm() : store.evict();
      const auto catalog = store.catalog();
      const bool evicted = !cached && !catalog->volume(0).resident(0, 4096);
      const bool has_direct = catalog->volume(0).direct_fd() >= 0;
      const Reading reading(catalog, options);
      std::vector<std::shared_ptr<Job>> jobs;
      std::vector<std::vector<int64_t>> batches;
      for (const size_t count : {1, 7, 64, 200}) {
        batches.push_back(store.some(count));
        jobs.push_back(reading->submit(batches.back()));
      }
      io::BatchStats stats;
      for (size_t i = 0; i < jobs.size(); ++i) {
        const auto batch = jobs[i]->wait(kLong);
        REQUIRE(batch != nullptr);
        check_batch(store, *batch, batches[i]);
        stats.cached_reads += batch->stats.cached_reads;
        stats.direct_reads += batch->stats.direct_reads;
        stats.buffered_reads += batch->stats.buffered_reads;
      }
      // The route that was asked for was the route taken.
      if (options.engine == EngineChoice::kMmap) {
        CHECK(stats.cached_reads > 0);
        CHECK(stats.direct_reads + stats.buffered_reads == 0);
      } else if (options.direct == DirectReads::kAlways && has_direct) {
        CHECK(stats.direct_reads > 0);
        CHECK(stats.buffered_reads + stats.cached_reads == 0);
      } else if (options.engine == EngineChoice::kAuto && cached) {
        CHECK(stats.cached_reads > 0);
        CHECK(stats.direct_reads == 0);
      } else if (evicted && options.direct == DirectReads::kAuto && has_direct) {
        CHECK(stats.direct_reads > 0);
      } else if (options.direct == DirectReads::kNever) {
        CHECK(stats.direct_reads == 0);
        CHECK(stats.buffered_reads + stats.cached_reads > 0);
      }
    }
  });
}

TEST_CASE("duplicates, empty batches and samples in any order are served") {
  TestStore store({.samples = 100});
  for_every_route([&](ReaderOptions options) {
    const Reading reading(store.catalog(), options);
    for (const std::vector<int64_t>& indices : std::vector<std::vector<int64_t>>{
             {}, {5, 5, 5}, {7}, {7, 57}, {99, 0, 99, 0}, {3, 2, 1, 2, 3}}) {
      check_batch(store, *reading.read(indices), indices);
    }
    std::vector<int64_t> backwards = store.all();
    std::reverse(backwards.begin(), backwards.end());
    check_batch(store, *reading.read(backwards), backwards);
  });
}

TEST_CASE("neighbours are read as one range, and distant samples are not") {
  TestStore store({.samples = 300, .volumes = 1, .length_max = 3000});
  for (const DirectReads direct : {DirectReads::kAlways, DirectReads::kNever}) {
    ReaderOptions options = with(EngineChoice::kThreads, direct);
    const Reading reading(store.catalog(), options);
    const auto together = reading.read(store.all());
    check_batch(store, *together, store.all());
    const uint64_t reads = together->stats.direct_reads + together->stats.buffered_reads;
    CHECK(reads == (together->stats.bytes_read + (512 << 10) - 1) / (512 << 10));
    const std::vector<int64_t> apart{0, 100, 200, 299};
    const auto batch = reading.read(apart);
    check_batch(store, *batch, apart);
    CHECK(batch->stats.direct_reads + batch->stats.buffered_reads == 4);
  }
}

TEST_CASE("a huge sample is cut into requests, whatever the limit is") {
  TestStore store({.samples = 3, .volumes = 1, .length_max = 5 << 20, .seed = 4});
  const uint64_t length = store.spec.extents[1][0].length;
  REQUIRE(length > 1 << 20);
  for (const uint64_t limit :
       {uint64_t{0}, uint64_t{1}, uint64_t{5000}, uint64_t{64} << 10, UINT64_MAX}) {
    CAPTURE(limit);
    ReaderOptions options = with(EngineChoice::kThreads, DirectReads::kAlways);
    options.request_bytes_max = limit;
    options.coalesce_gap_bytes = limit;
    const Reading reading(store.catalog(), options);
    const auto batch = reading.read({1});
    check_batch(store, *batch, {1});
    if (limit == 64 << 10) {
      CHECK(batch->stats.direct_reads + batch->stats.buffered_reads >= length / limit);
    }
  }
}

TEST_CASE("selected parts come in the order asked for, and missing parts are empty") {
  TestStore store({.samples = 200, .volumes = 5, .parts = 4});
  for_every_route([&](ReaderOptions options) {
    for (const std::vector<int>& parts :
         std::vector<std::vector<int>>{{0}, {3}, {0, 1, 2, 3}, {3, 1}, {2, 0, 3}}) {
      const Reading reading(store.catalog(), options, parts);
      const auto indices = store.some(60);
      check_batch(store, *reading.read(indices), indices, parts);
    }
  });
}

TEST_CASE("several segments with parts of their own are one store") {
  TestStore first({.samples = 50, .seed = 1}), second({.samples = 50, .parts = 3, .seed = 2});
  auto catalog = std::make_shared<io::Catalog>();
  first.add_to(*catalog);
  second.add_to(*catalog);
  catalog->seal();
  const Reading reading(catalog, {}, {0, 2});
  const auto batch = reading.read({10, 60, 99, 49, 50});
  const TestStore* stores[] = {&first, &second, &second, &first, &second};
  const size_t samples[] = {10, 10, 49, 49, 0};
  for (size_t i = 0; i < 5; ++i) {
    const auto& contents = stores[i]->contents[samples[i]];
    CHECK(slot_text(*batch, 2 * i) == contents[0].value_or(""));
    CHECK(slot_text(*batch, 2 * i + 1) == (contents.size() > 2 ? contents[2].value_or("") : ""));
  }
}

TEST_CASE("a hundred volumes in one batch are served, with and without descriptors to spare") {
  TestStore store({.samples = 600, .volumes = 100, .length_max = 500});
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  for (const bool few : {false, true}) {
    // The last reader's threads let go of its descriptors a moment after it was closed.
    REQUIRE(becomes([] { return open_descriptors() < 60; }));
    rlimit limit = before;
    if (few) limit.rlim_cur = 120;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    const auto catalog = store.catalog();
    CHECK(catalog->open_per_read() == few);
    ReaderOptions options = with(EngineChoice::kAuto, DirectReads::kAuto);
    options.workers = 1;
    const Reading reading(catalog, options);
    const auto batch = reading.read(store.all());
    check_batch(store, *batch, store.all());
    CHECK((batch->stats.opened_files > 0) == few);
  }
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_CASE("indices outside the store are refused at once") {
  TestStore store({.samples = 10});
  const Reading reading(store.catalog(), {});
  for (const int64_t index : {int64_t{-1}, int64_t{10}, INT64_MAX}) {
    CHECK_THROWS_AS(reading->submit({0, index}), Error);
  }
  CHECK_NOTHROW(reading.read({9}));
}

TEST_CASE("a flipped bit is a checksum failure of exactly that slot, after a second try") {
  for_every_route([&](ReaderOptions options) {
    TestStore store({.samples = 60, .volumes = 2});
    const auto& extent = store.spec.extents[30][0];
    REQUIRE(extent.length > 0);
    const char flipped = static_cast<char>(store.contents[30][0]->back() ^ 0x80);
    testing::patch_file(store.paths[extent.volume], extent.offset + extent.length - 1, {flipped});
    testing::evict_file(store.paths[extent.volume]);
    const auto catalog = store.catalog();
    {
      const Reading reading(catalog, options);
      const auto batch = reading.read(store.all());
      check_batch(store, *batch, store.all(), {0}, {30});
      const io::Failure& failure = batch->failures[0];
      CHECK(failure.kind == FailureKind::kChecksum);
      CHECK(failure.crc_expected == extent.crc);
      CHECK(failure.crc_found != extent.crc);
      CHECK(failure.offset == extent.offset);
      CHECK(failure.volume == extent.volume);
    }
    options.verify = false;
    const Reading reading(catalog, options);
    CHECK(reading.read({30})->failures.empty());
  });
}

TEST_CASE("a wrong checksum that a second reading mends is no failure") {
  // The directory's checksum is right, the first bytes read are not: the page cache holds a flipped
  // byte that the disk does not, as after a failed transfer. Simulated by a mapping that lost a
  // page of a file which was then made whole again.
  TestStore store({.samples = 40, .volumes = 1});
  store.warm();
  const auto catalog = store.catalog();
  const Reading reading(catalog, with(EngineChoice::kMmap, DirectReads::kNever));
  check_batch(store, *reading.read({0}), {0});
  const Mapping* mapping = catalog->volume(0).mapping();
  REQUIRE(mapping != nullptr);
  const auto size = store.volume_bytes(0);
  std::string bytes(size, '\0');
  std::ifstream(store.paths[0], std::ios::binary).read(bytes.data(), static_cast<long>(size));
  std::filesystem::resize_file(store.paths[0], 0);
  volatile std::byte sink = mapping->data()[5000];
  (void)sink;
  REQUIRE(mapping->damaged() == 1);
  testing::patch_file(store.paths[0], 0, bytes);
  check_batch(store, *reading.read(store.all()), store.all());
}

TEST_CASE("an empty sample with a checksum of something is a failure") {
  TestStore store({.samples = 20});
  REQUIRE(store.spec.extents[7][0].length == 0);
  store.spec.extents[7][0].crc = 5;
  const Reading reading(store.catalog(), {});
  const auto batch = reading.read(store.all());
  check_batch(store, *batch, store.all(), {0}, {7});
  CHECK(batch->failures[0].kind == FailureKind::kChecksum);
}

TEST_CASE("a volume truncated while mapped is short slots, no crash and no zeros, ever after") {
  for (const bool crc : {true, false}) {
    for_every_route([&](ReaderOptions options) {
      CAPTURE(crc);
      TestStore store({.samples = 200, .volumes = 1, .crc = crc});
      store.warm();
      const auto catalog = store.catalog();
      const Reading reading(catalog, options);
      check_batch(store, *reading.read(store.all()), store.all());
      // In the middle of a page, and of a sample: the rest of the page reads as zeros, unfaulted.
      const auto& cut = store.spec.extents[120][0];
      REQUIRE(cut.length > 2);
      const uint64_t end = (cut.offset + cut.length / 2) | 1;
      std::filesystem::resize_file(store.paths[0], end);
      std::vector<uint64_t> lost;
      for (uint64_t i = 0; i < 200; ++i) {
        const auto& extent = store.spec.extents[i][0];
        if (extent.length != 0 && extent.offset + extent.length > end) lost.push_back(i);
      }
      REQUIRE(lost.size() > 50);
      REQUIRE(lost.size() < 150);
      for (int round = 0; round < 3; ++round) {
        CAPTURE(round);
        const auto batch = reading.read(store.all());
        check_batch(store, *batch, store.all(), {0}, lost);
        for (const auto& failure : batch->failures) CHECK(failure.kind == FailureKind::kShort);
      }
    });
  }
}

TEST_CASE("trees of files are served, empty files included") {
  TestStore store({.samples = 150, .tree = true});
  for_every_route([&](ReaderOptions options) {
    const Reading reading(store.catalog(), options);
    const auto batch = reading.read(store.all());
    check_batch(store, *batch, store.all());
    CHECK(batch->stats.opened_files == 150);
    CHECK(reading.read({7})->lengths[0] == 0);
  });
}

TEST_CASE("files of a tree that vanished, changed, shrank or became something else fail alone") {
  for (const bool mtime : {true, false}) {
    for (const EngineChoice engine : engines()) {
      CAPTURE(mtime);
      CAPTURE(static_cast<int>(engine));
      TestStore store({.samples = 80, .tree = true, .mtime = mtime});
      const auto restore_time = [&](size_t i) {
        const int64_t ns = store.spec.extents[i][0].mtime_ns;
        timespec times[2];
        times[0] = times[1] = {ns / 1'000'000'000, ns % 1'000'000'000};
        REQUIRE(utimensat(AT_FDCWD, store.file_of(i).c_str(), times, 0) == 0);
      };
      std::filesystem::remove(store.file_of(10));
      std::filesystem::resize_file(store.file_of(11), store.contents[11][0]->size() / 2);
      restore_time(11);
      std::ofstream(store.file_of(12), std::ios::app) << "more";
      restore_time(12);
      std::ofstream(store.file_of(7), std::ios::app) << "was empty";
      std::filesystem::remove(store.file_of(13));
      REQUIRE(mkfifo(store.file_of(13).c_str(), 0600) == 0);
      std::filesystem::remove(store.file_of(14));
      std::filesystem::create_directory(store.file_of(14));
      store.spec.names[15] += std::string("\0hidden", 7);  // file 15 itself exists
      std::vector<uint64_t> failed{7, 10, 11, 12, 13, 14, 15};
      if (mtime) {
        timespec times[2] = {{1, 0}, {1, 0}};
        REQUIRE(utimensat(AT_FDCWD, store.file_of(16).c_str(), times, 0) == 0);
        failed.push_back(16);
      }
      testing::write_file(store.file_of(17), std::string(store.contents[17][0]->size(), 'z'));
      restore_time(17);
      failed.push_back(17);
      const Reading reading(store.catalog(), with(engine, DirectReads::kAuto));
      const auto batch = reading.read(store.all());
      check_batch(store, *batch, store.all(), {0}, failed);
      for (const auto& failure : batch->failures) {
        CAPTURE(failure.slot);
        CHECK(failure.kind ==
              (failure.slot == 17 ? FailureKind::kChecksum : FailureKind::kChanged));
      }
    }
  }
}

TEST_CASE("a volume that cannot be opened is an error of the batch, and others go on") {
  TestStore store({.samples = 100, .volumes = 3});
  const auto catalog = store.catalog();
  std::filesystem::remove(store.paths[1]);
  std::vector<int64_t> good, bad;
  for (size_t i = 0; i < 100; ++i) {
    const auto& extent = store.spec.extents[i][0];
    if (extent.length != 0) (extent.volume == 1 ? bad : good).push_back(static_cast<int64_t>(i));
  }
  for_every_route([&](ReaderOptions options) {
    const Reading reading(catalog, options);
    CHECK(wait_error(*reading->submit(bad)) == ErrorKind::kVolume);
    check_batch(store, *reading.read(good), good);
  });
}

TEST_CASE("extents that leave their volume end the batch before memory is taken") {
  for (const bool tree : {false, true}) {
    TestStore store({.samples = 20, .tree = tree});
    store.spec.offset_width = store.spec.length_width = 8;
    store.spec.extents[4][0].length = UINT64_MAX - 30;
    const Reading reading(store.catalog(), {});
    CHECK(wait_error(*reading->submit({4, 4, 5})) == ErrorKind::kCorruptStore);
    CHECK(reading->mapped_bytes() == 0);
    check_batch(store, *reading.read({5}), {5});
  }
}

TEST_CASE("lengths whose sum would overflow are refused, and absurd ones get no memory") {
  TestStore store({.samples = 20, .tree = true});
  store.spec.offset_width = store.spec.length_width = 8;
  store.spec.extents[4][0].length = uint64_t{1} << 46;
  const Reading reading(store.catalog(), {});
  CHECK(wait_error(*reading->submit({4})) == ErrorKind::kVolume);
  CHECK(wait_error(*reading->submit(std::vector<int64_t>(1 << 18, 4))) ==
        ErrorKind::kCorruptStore);  // 2^18 * 2^46 = 2^64
  check_batch(store, *reading.read({5}), {5});
}

TEST_CASE("a directory that was truncated while open ends the batch") {
  TestStore store({.samples = 3000, .length_max = 10});
  const auto image = testing::build_directory(store.spec);
  const int fd = testing::memory_file(image.bytes);
  auto catalog = std::make_shared<io::Catalog>();
  catalog->add_segment(Directory::open(fd, "test.hrd"), store.open_volumes());
  catalog->seal();
  const Reading reading(catalog, {});
  check_batch(store, *reading.read(store.all()), store.all());
  REQUIRE(ftruncate(fd, 0) == 0);
  CHECK(wait_error(*reading->submit(store.all())) == ErrorKind::kCorruptStore);
  close(fd);
}

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
