// The reader under faults: each is a failure of its slot alone, or an error of its batch.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>
#include <new>

#include "io/attempt.h"
#include "testing/reader_testing.h"

using namespace headrace;
using namespace headrace::io::reader_testing;
using io::DirectReads;
using io::EngineChoice;
using io::FailureKind;
using io::ReaderOptions;

// Does what an engine does whose ring broke with reads in flight: they are lost, and written to
// later.
class LosingEngine final : public io::Engine {
 public:
  explicit LosingEngine(std::vector<std::byte*>* lost) : lost_(lost) {}
  const char* name() const override { return "losing"; }
  void read(std::span<io::Read> reads, const io::OnDone&) override {
    for (const io::Read& read : reads) lost_->push_back(read.dest);
    throw io::ReadsLost(EBADF, static_cast<unsigned>(reads.size()));
  }

 private:
  std::vector<std::byte*>* lost_;
};

TEST_CASE("memory of lost reads is never used again: their batch fails, the next ones are right") {
  TestStore store({.samples = 60});
  const auto catalog = store.catalog();
  std::vector<std::byte*> lost;
  int engines_made = 0;
  ReaderOptions options = with(EngineChoice::kThreads, DirectReads::kNever);
  options.workers = 1;
  options.make_engine = [&](const io::EngineOptions& engine) -> std::unique_ptr<io::Engine> {
    ++engines_made;
    if (engines_made == 1) return std::make_unique<LosingEngine>(&lost);
    return io::make_threads_engine(engine);
  };
  store.evict();
  const Reading reading(catalog, options);
  for (int batch = 0; batch < 3; ++batch) {
    CHECK(wait_error(*reading->submit(store.all())) == ErrorKind::kVolume);
  }
  REQUIRE(!lost.empty());
  CHECK(reading->mapped_bytes() == 0);
  CHECK(reading->stats().buffered_bytes == 0);
  CHECK(reading->stats().reads.in_flight == 0);
  options.make_engine = nullptr;
  const Reading again(catalog, options);
  std::vector<std::shared_ptr<io::Batch>> batches;
  for (int batch = 0; batch < 8; ++batch) {
    batches.push_back(again.read(store.all()));
    check_batch(store, *batches.back(), store.all());
  }
  // What the kernel would do now meets nothing: nobody else was given these addresses.
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  for (std::byte* dest : lost) {
    CHECK(read(zeros, dest, 1) == -1);
    CHECK(errno == EFAULT);
  }
  close(zeros);
}

TEST_CASE(
    "a worker that cannot be made is an error of its batch, and the next batch makes another") {
  TestStore store({.samples = 60});
  int failures = 2, made = 0;
  for (const bool bad_alloc : {true, false}) {
    CAPTURE(bad_alloc);
    failures = 2;
    made = 0;
    ReaderOptions options;
    options.workers = 1;
    options.make_engine = [&](const io::EngineOptions& engine) -> std::unique_ptr<io::Engine> {
      ++made;
      if (failures-- <= 0) return io::make_threads_engine(engine);
      if (bad_alloc) throw std::bad_alloc();
      throw Error(ErrorKind::kVolume, "no engine today");
    };
    store.evict();
    const Reading reading(store.catalog(), options);
    for (int batch = 0; batch < 2; ++batch) {
      const auto job = reading->submit(store.all());
      if (bad_alloc) {
        CHECK_THROWS_AS(job->wait(kLong), std::bad_alloc);
      } else {
        CHECK(wait_error(*job) == ErrorKind::kVolume);
      }
    }
    check_batch(store, *reading.read(store.all()), store.all());
    CHECK(made == 3);
  }
}

int again_calls, again_refusals;

TEST_CASE("a file that says EAGAIN is asked a few times, then that is the error") {
  io::Syscalls sys = io::kSyscalls;
  sys.preadv = [](int fd, const iovec* parts, int count, off_t offset) -> ssize_t {
    ++again_calls;
    if (again_refusals-- <= 0) return io::kSyscalls.preadv(fd, parts, count, offset);
    errno = EAGAIN;
    return -1;
  };
  for (const bool tree : {false, true}) {
    TestStore store({.samples = 20, .tree = tree});
    const auto catalog = store.catalog();
    catalog->set_syscalls(sys);
    const auto arena = Arena::make(1 << 20);
    again_calls = 0;
    again_refusals = 5;
    auto batch = catalog->read_one(*arena, 5, -1, 0, -1, true);
    CHECK(batch->failures.empty());
    CHECK(again_calls == 6);
    again_calls = 0;
    again_refusals = INT_MAX;
    batch = catalog->read_one(*arena, 5, -1, 0, -1, true);
    REQUIRE(batch->failures.size() == 1);
    CHECK(batch->failures[0].kind == FailureKind::kSystem);
    CHECK(batch->failures[0].system_errno == EAGAIN);
    CHECK(again_calls == static_cast<int>(io::kRetriesMax) + 1);
  }
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
