// The catalog: indices over segments, single reads, and what is refused before memory is taken.
#include "io/catalog.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "core/error.h"
#include "testing/store_builder.h"

using namespace headrace;
using io::Batch;
using io::Catalog;
using io::FailureKind;
using testing::StoreSpec;
using testing::TestStore;

namespace {

std::string text(const Batch& batch) {
  return {reinterpret_cast<const char*>(batch.buffer->data) + batch.offsets[0],
          static_cast<size_t>(batch.lengths[0])};
}

StoreSpec small(uint32_t seed = 1) {
  StoreSpec spec;
  spec.samples = 60;
  spec.seed = seed;
  return spec;
}
StoreSpec small_tree() {
  StoreSpec spec = small();
  spec.tree = true;
  return spec;
}

// Reads sample 3, whose extent was made impossible, and expects a refusal without memory.
void check_refused(const TestStore& store) {
  const auto catalog = store.catalog();
  const auto arena = Arena::make(1 << 20);
  try {
    catalog->read_one(*arena, 3, -1, 0, -1, true);
    FAIL("an impossible extent was read");
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::kCorruptStore);
    CHECK(error.path == "test.hrd");
    CHECK(std::string(error.what()).find("sample 3 ") != std::string::npos);
  }
  CHECK(arena->mapped_bytes() == 0);
}

}  // namespace

TEST_CASE("indices outside the store are refused, in every direction") {
  const TestStore store(small());
  const auto catalog = store.catalog();
  const auto arena = Arena::make(1 << 20);
  for (const int64_t index : {int64_t{-1}, int64_t{60}, INT64_MIN, INT64_MAX}) {
    try {
      catalog->read_one(*arena, index, -1, 0, -1, true);
      FAIL("an impossible index was read");
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::kSampleNotFound);
    }
  }
  CHECK_NOTHROW(catalog->check_index(0));
  CHECK_NOTHROW(catalog->check_index(59));
}

TEST_CASE("segments follow each other, share part names and keep their volumes apart") {
  StoreSpec parts = small(2);
  parts.parts = 3;
  const TestStore first(small(1)), second(parts), third(small(3));
  const TestStore* stores[] = {&first, &second, &third};
  Catalog catalog;
  for (const TestStore* store : stores) store->add_to(catalog);
  catalog.seal();
  CHECK(catalog.samples() == 180);
  CHECK(catalog.volumes() == 9);
  CHECK(catalog.part_names() == std::vector<std::string>{"", "part1", "part2"});
  const auto arena = Arena::make(1 << 20);
  for (int64_t i = 0; i < 180; ++i) {
    const auto& contents = stores[i / 60]->contents[static_cast<size_t>(i % 60)];
    for (size_t p = 0; p < contents.size(); ++p) {
      const auto batch = catalog.read_one(*arena, i, static_cast<int>(p), 0, -1, true);
      CHECK(batch->failures.empty());
      REQUIRE(text(*batch) == contents[p].value_or(""));
    }
  }
  CHECK(catalog.segment_of(59).base == 0);
  CHECK(catalog.segment_of(60).base == 60);
  CHECK(catalog.segment_of(179).base == 120);
}

TEST_CASE("empty segments stand between others without taking an index") {
  StoreSpec none = small();
  none.samples = 0;
  const TestStore empty(none), full(small());
  Catalog catalog;
  empty.add_to(catalog);
  full.add_to(catalog);
  empty.add_to(catalog);
  empty.add_to(catalog);
  full.add_to(catalog);
  catalog.seal();
  const auto arena = Arena::make(1 << 20);
  for (const int64_t i : {0, 59, 60, 119}) {
    CHECK(text(*catalog.read_one(*arena, i, -1, 0, -1, true)) ==
          full.contents[static_cast<size_t>(i % 60)][0]);
  }
  CHECK_THROWS_AS(catalog.check_index(120), Error);
}

TEST_CASE("any range of a sample can be read, in files and in trees") {
  for (const bool tree : {false, true}) {
    const TestStore store(tree ? small_tree() : small());
    const auto catalog = store.catalog();
    const auto arena = Arena::make(1 << 20);
    for (size_t i = 0; i < 60; ++i) {
      const std::string& whole = *store.contents[i][0];
      for (const uint64_t start : {uint64_t{0}, uint64_t{1}, whole.size() / 2, whole.size(),
                                   whole.size() + 1, UINT64_MAX}) {
        for (const int64_t size : {int64_t{-1}, int64_t{0}, int64_t{1}, int64_t{700}, INT64_MAX}) {
          const auto batch =
              catalog->read_one(*arena, static_cast<int64_t>(i), -1, start, size, true);
          const uint64_t from = std::min<uint64_t>(start, whole.size());
          const auto count = size < 0 ? std::string::npos : static_cast<size_t>(size);
          REQUIRE(batch->failures.empty());
          REQUIRE(text(*batch) == whole.substr(from, count));
        }
      }
    }
  }
}

TEST_CASE("a flipped bit is a checksum failure, with both checksums; unverified it is not") {
  const TestStore store(small());
  const auto& extent = store.spec.extents[3][0];
  REQUIRE(extent.length > 10);
  const char flipped = static_cast<char>((*store.contents[3][0])[5] ^ 4);
  testing::patch_file(store.paths[extent.volume], extent.offset + 5, {flipped});
  const auto catalog = store.catalog();
  const auto arena = Arena::make(1 << 20);
  const auto batch = catalog->read_one(*arena, 3, -1, 0, -1, true);
  REQUIRE(batch->failures.size() == 1);
  const io::Failure& failure = batch->failures[0];
  CHECK(failure.kind == FailureKind::kChecksum);
  CHECK(failure.crc_expected == extent.crc);
  CHECK(failure.crc_found != extent.crc);
  CHECK(failure.volume == extent.volume);
  CHECK(failure.offset == extent.offset);
  CHECK(failure.length == extent.length);
  CHECK(catalog->read_one(*arena, 3, -1, 0, -1, false)->failures.empty());
  CHECK(catalog->read_one(*arena, 3, -1, 0, 7, true)->failures.empty());  // a range has no checksum
  CHECK(catalog->read_one(*arena, 4, -1, 0, -1, true)->failures.empty());
}

TEST_CASE("files of a tree that vanished, changed, or became something else are failures") {
  TestStore store(small_tree());
  std::filesystem::remove(store.file_of(1));
  std::filesystem::resize_file(store.file_of(2), 1);
  testing::write_file(store.file_of(3), std::string(store.contents[3][0]->size(), 'z'));
  timespec times[2] = {{1, 0}, {1, 0}};
  REQUIRE(utimensat(AT_FDCWD, store.file_of(3).c_str(), times, 0) == 0);
  std::filesystem::remove(store.file_of(4));
  REQUIRE(mkfifo(store.file_of(4).c_str(), 0600) == 0);
  std::filesystem::remove(store.file_of(5));
  std::filesystem::create_directory(store.file_of(5));
  store.spec.names[6] += std::string("\0hidden", 7);
  const auto catalog = store.catalog();
  const auto arena = Arena::make(1 << 20);
  for (const int64_t i : {1, 2, 3, 4, 5, 6}) {
    CAPTURE(i);
    const auto batch = catalog->read_one(*arena, i, -1, 0, -1, true);
    REQUIRE(batch->failures.size() == 1);
    CHECK(batch->failures[0].kind == FailureKind::kChanged);
  }
  CHECK(text(*catalog->read_one(*arena, 8, -1, 0, -1, true)) == store.contents[8][0]);
}

TEST_CASE("extents that leave their volume are refused before memory is taken") {
  const auto with = [](testing::ExtentSpec extent, bool tree) {
    TestStore store(tree ? small_tree() : small());
    store.spec.offset_width = store.spec.length_width = 8;
    store.spec.volume_width = 4;
    store.spec.extents[3][0] = extent;
    check_refused(store);
  };
  const TestStore plain(small());
  const uint64_t end = plain.volume_bytes(0);
  with({0, end - 10, 11, 0, -1, 0}, false);
  with({0, end + 1, 0, 0, -1, 0}, false);
  with({0, 0, end + 1, 0, -1, 0}, false);
  with({0, UINT64_MAX, 1, 0, -1, 0}, false);
  with({0, 100, UINT64_MAX - 50, 0, -1, 0}, false);
  with({0, UINT64_MAX, UINT64_MAX, 0, -1, 0}, false);
  with({3, 0, 1, 0, -1, 0}, false);
  with({UINT32_MAX, 0, 1, 0, -1, 0}, false);
  with({0, 0, uint64_t{1} << 60, 0, -1, 0}, true);
  with({0, 0, UINT64_MAX, 0, -1, 0}, true);
  with({1, 0, 1, 0, -1, 0}, true);
}

TEST_CASE("an extent may end exactly where its volume ends") {
  TestStore store(small());
  const uint64_t end = store.volume_bytes(0);
  store.spec.crc = false;
  store.spec.extents[3][0] = {0, end - 10, 10, 0, -1, 0};
  store.spec.extents[4][0] = {0, end, 0, 0, -1, 0};
  const auto catalog = store.catalog();
  const auto arena = Arena::make(1 << 20);
  CHECK(catalog->read_one(*arena, 3, -1, 0, -1, true)->failures.empty());
  CHECK(catalog->read_one(*arena, 4, -1, 0, -1, true)->failures.empty());
}

TEST_CASE("more volumes than descriptors are opened for each read") {
  StoreSpec spec = small();
  spec.volumes = 30;
  const TestStore store(spec);
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  CHECK(!store.catalog()->open_per_read());
  rlimit low = before;
  low.rlim_cur = 70;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &low) == 0);
  const auto catalog = store.catalog();
  CHECK(catalog->open_per_read());
  const auto arena = Arena::make(1 << 20);
  for (size_t i = 0; i < 60; ++i) {
    CHECK(text(*catalog->read_one(*arena, static_cast<int64_t>(i), -1, 0, -1, true)) ==
          store.contents[i][0]);
  }
  setrlimit(RLIMIT_NOFILE, &before);
}
