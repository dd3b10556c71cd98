// Samples held in memory, batches put together of several tiers, samples written to a file: the
// bytes are always those of the sample that was asked for, whatever is held and whatever fails.
#include "io/sample_cache.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "core/crc32c.h"
#include "core/error.h"
#include "io/assemble.h"
#include "io/direct_writer.h"
#include "io/sample_writer.h"
#include "testing/batch_content.h"
#include "testing/store_builder.h"

using namespace headrace;
using namespace headrace::io;
using headrace::testing::content;
using headrace::testing::make_batch;

namespace {

constexpr uint64_t kSamples = 500;

// Every sample of the batch is itself, but for those whose slots failed.
bool is_right(const Batch& batch, const std::vector<int64_t>& indices) {
  if (batch.indices != indices || batch.samples != indices.size()) return false;
  std::vector<bool> failed(batch.samples * batch.parts);
  for (const Failure& failure : batch.failures) failed[failure.slot] = true;
  for (uint64_t k = 0; k < batch.samples; ++k) {
    if (batch.labels[k] != indices[k] % 10 - 1) return false;
    for (uint64_t p = 0; p < batch.parts; ++p) {
      const uint64_t slot = k * batch.parts + p;
      const std::string found(
          reinterpret_cast<const char*>(batch.buffer->data) + batch.offsets[slot],
          static_cast<size_t>(batch.lengths[slot]));
      if (!failed[slot] && found != content(indices[k], p)) return false;
    }
  }
  return true;
}

std::vector<int64_t> some(std::mt19937& random, size_t count) {
  std::vector<int64_t> indices(count);
  for (int64_t& index : indices) index = static_cast<int64_t>(random() % kSamples);
  return indices;
}

std::shared_ptr<Batch> read_missing(const Hits& hits, uint64_t parts) {
  std::vector<int64_t> indices;
  for (const int64_t at : hits.missing) indices.push_back(hits.indices[static_cast<size_t>(at)]);
  return indices.empty() ? nullptr : make_batch(indices, parts);
}

Failure failure_of(uint64_t slot) {
  Failure failure{};
  failure.slot = slot;
  return failure;
}

}  // namespace

TEST_CASE("any mixture of held and missing samples comes in the order asked for") {
  for (const uint64_t parts : {1, 3}) {
    std::mt19937 random(1);
    const auto cache = SampleCache::make(kSamples, parts, 400'000 * parts);
    for (int round = 0; round < 60; ++round) {
      const auto indices = some(random, random() % 40);
      const auto hits = cache->look_up(indices);
      const auto misses = read_missing(*hits, parts);
      CHECK(is_right(*cache->gather(*hits, misses), indices));
      if (misses != nullptr) cache->insert(*misses);
      CHECK(cache->mapped_bytes() <= cache->quota_bytes());
    }
    CHECK(cache->held_samples() > 0);
    CHECK(cache->held_samples() < kSamples);
  }
}

TEST_CASE("what is held stays held when the quota is full") {
  const auto cache = SampleCache::make(kSamples, 1, 200'000);
  std::vector<int64_t> all(kSamples);
  for (size_t i = 0; i < kSamples; ++i) all[i] = static_cast<int64_t>(i);
  const uint64_t taken = cache->insert(*make_batch(all));
  CHECK(taken > 0);
  const auto before = cache->look_up(all)->held;
  CHECK(cache->insert(*make_batch(all)) == 0);
  CHECK(cache->look_up(all)->held == before);
}

TEST_CASE("a sample that comes twice in a batch takes room once") {
  std::vector<int64_t> once(kSamples);
  std::vector<int64_t> often;
  for (size_t i = 0; i < kSamples; ++i) {
    once[i] = static_cast<int64_t>(i);
    often.insert(often.end(), 5, once[i]);
  }
  const auto expected = SampleCache::make(kSamples, 1, 200'000);
  const auto cache = SampleCache::make(kSamples, 1, 200'000);
  CHECK(cache->insert(*make_batch(often)) == expected->insert(*make_batch(once)));
  CHECK(cache->look_up(once)->held == expected->look_up(once)->held);
}

TEST_CASE("a failed sample is not held") {
  const auto cache = SampleCache::make(kSamples, 2, 1 << 20);
  auto batch = make_batch({3, 1, 5}, 2);
  batch->failures.push_back(failure_of(3));  // the second part of sample 1
  CHECK(cache->insert(*batch) == 2);
  CHECK(cache->look_up(std::vector<int64_t>{1, 3, 5})->missing == std::vector<int64_t>{0});
}

TEST_CASE("failures of what was read keep their samples") {
  const auto cache = SampleCache::make(kSamples, 1, 1 << 20);
  cache->insert(*make_batch({10, 30}));
  const std::vector<int64_t> asked = {10, 20, 30, 40};
  const auto hits = cache->look_up(asked);
  const auto misses = make_batch({20, 40});
  misses->failures.push_back(failure_of(1));
  const auto batch = cache->gather(*hits, misses);
  REQUIRE(batch->failures.size() == 1);
  CHECK(batch->failures[0].slot == 3);
  CHECK(is_right(*batch, asked));
}

TEST_CASE("a smaller quota gives memory back, but not under a look-up") {
  const auto cache = SampleCache::make(kSamples, 1, 1 << 20);
  std::vector<int64_t> indices = {1, 2, 3, 2};
  cache->insert(*make_batch({1, 2, 3}));
  auto hits = cache->look_up(indices);
  cache->set_quota(0);
  CHECK(cache->held_samples() == 0);
  CHECK(cache->mapped_bytes() > 0);
  CHECK(is_right(*cache->gather(*hits, nullptr), indices));
  hits.reset();
  CHECK(cache->mapped_bytes() == 0);
  CHECK(cache->insert(*make_batch({1})) == 0);
  cache->set_quota(1 << 20);
  CHECK(cache->insert(*make_batch({1})) == 1);
}

TEST_CASE("mistakes are refused") {
  const auto cache = SampleCache::make(kSamples, 1, 1 << 20);
  CHECK_THROWS_AS(cache->look_up(std::vector<int64_t>{-1}), Error);
  CHECK_THROWS_AS(cache->look_up(std::vector<int64_t>{kSamples}), Error);
  CHECK_THROWS_AS(cache->insert(*make_batch({1}, 2)), Error);
  const auto hits = cache->look_up(std::vector<int64_t>{1, 2});
  CHECK_THROWS_AS(cache->gather(*hits, nullptr), Error);
  CHECK_THROWS_AS(cache->gather(*hits, make_batch({1})), Error);
  CHECK_THROWS_AS(SampleCache::make(1, 0, 1), Error);
  CHECK_THROWS_AS(SampleCache::make(UINT64_MAX, 1, 1), Error);
}

TEST_CASE("threads insert, look up and gather while the quota moves") {
  const auto cache = SampleCache::make(kSamples, 1, 300'000);
  std::atomic<int> wrong{0};
  std::atomic<bool> done{false};
  std::thread turner([&] {
    for (uint64_t k = 0; !done; ++k) {
      cache->set_quota(k % 3 * 200'000);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> readers;
  for (unsigned t = 0; t < 4; ++t) {
    readers.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int round = 0; round < 50; ++round) {
        const auto indices = some(random, 10);
        const auto hits = cache->look_up(indices);
        const auto misses = read_missing(*hits, 1);
        if (misses != nullptr) cache->insert(*misses);
        if (!is_right(*cache->gather(*hits, misses), indices)) ++wrong;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
  done = true;
  turner.join();
  CHECK(wrong == 0);
}

TEST_CASE("a slab that goes takes none of the samples that others hold") {
  std::vector<int64_t> all(kSamples);
  for (size_t i = 0; i < kSamples; ++i) all[i] = static_cast<int64_t>(i);
  const auto batch = make_batch(all);  // 1.25 MB
  for (int round = 0; round < 20; ++round) {
    const auto cache = SampleCache::make(kSamples, 1, 2 << 20);
    // Two get room for the same samples at once: what one of them wrote is nobody's.
    std::vector<std::thread> writers;
    for (int t = 0; t < 2; ++t) writers.emplace_back([&] { cache->insert(*batch); });
    for (std::thread& writer : writers) writer.join();
    cache->set_quota(cache->mapped_bytes() - 1);  // the newest slab goes
    CHECK(cache->look_up(all)->held.size() == cache->held_samples());
  }
}

TEST_CASE("a batch that comes whole from one tier keeps its memory") {
  const auto arena = Arena::make(0);
  const auto batch = make_batch({5, 6});
  const std::vector<int64_t> asked = {105, 106};
  const Part part{batch, {0, 1}};
  const auto same = assemble(*arena, asked, {&part, 1});
  CHECK(same->buffer == batch->buffer);
  CHECK(same->indices == asked);
  CHECK(batch->indices == std::vector<int64_t>{5, 6});
}

TEST_CASE("parts are put where they belong, failures included") {
  const auto arena = Arena::make(0);
  std::vector<Part> parts = {{make_batch({7, 9}, 2), {2, 0}}, {make_batch({8}, 2), {1}}};
  auto failing = std::make_shared<Batch>(*parts[0].batch);
  failing->failures.push_back(failure_of(1));  // second part of 7
  parts[0].batch = failing;
  const std::vector<int64_t> asked = {9, 8, 7};
  const auto batch = assemble(*arena, asked, parts);
  CHECK(is_right(*batch, asked));
  REQUIRE(batch->failures.size() == 1);
  CHECK(batch->failures[0].slot == 5);
}

TEST_CASE("parts that do not fill a batch exactly are refused") {
  const auto arena = Arena::make(0);
  const std::vector<int64_t> asked = {1, 2};
  for (const std::vector<int64_t>& positions :
       std::vector<std::vector<int64_t>>{{0, 0}, {0, 2}, {-1, 0}, {0}, {0, 1, 2}}) {
    const Part part{make_batch({1, 2}), positions};
    CHECK_THROWS_AS(assemble(*arena, asked, {&part, 1}), Error);
  }
  const Part none{nullptr, {0, 1}};
  CHECK_THROWS_AS(assemble(*arena, asked, {&none, 1}), Error);
  CHECK_THROWS_AS(assemble(*arena, asked, {}), Error);
  const std::vector<Part> different = {{make_batch({1}), {0}}, {make_batch({2}, 2), {1}}};
  CHECK_THROWS_AS(assemble(*arena, asked, different), Error);
}

TEST_CASE("samples are written back to back, with the checksums of their bytes") {
  const testing::Folder folder;
  const int fd = open(folder.path("out").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  std::vector<int64_t> indices(400);
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(i);
  const auto batch = make_batch(indices, 2);
  std::vector<int64_t> positions;
  std::string expected;
  std::vector<uint32_t> checksums;
  for (int64_t k = 399; k >= 0; k -= 1 + k % 3) {
    positions.push_back(k);
    for (uint64_t p = 0; p < 2; ++p) {
      const std::string bytes = content(k, p);
      expected += bytes;
      checksums.push_back(
          crc32c(0, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
    }
  }
  CHECK(write_samples(fd, 100, *batch, positions) == checksums);
  std::string found(expected.size() + 1, '\0');
  CHECK(pread(fd, found.data(), found.size(), 100) == static_cast<ssize_t>(expected.size()));
  found.pop_back();
  CHECK(found == expected);
  CHECK_THROWS_AS(write_samples(fd, 0, *batch, std::vector<int64_t>{400}), Error);
  close(fd);
  try {
    write_samples(fd, 0, *batch, positions);
    FAIL("a closed file was written");
  } catch (const Error& e) {
    CHECK(e.system_errno == EBADF);
  }
}

TEST_CASE("samples that are written past the page cache are the same, however they are cut") {
  const testing::Folder folder;
  const std::string path = folder.path("direct");
  constexpr uint64_t kOffset = 8192;
  close(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  std::vector<int64_t> indices(3000);
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(i);
  const auto batch = make_batch(indices, 2);  // 15 MB: several buffers full
  DirectWriter writer(path, kOffset);
  std::string expected;
  const auto check = [&](const std::vector<int64_t>& positions) {
    std::vector<uint32_t> checksums;
    for (const int64_t k : positions) {
      for (uint64_t p = 0; p < 2; ++p) {
        const std::string bytes = content(k, p);
        expected += bytes;
        checksums.push_back(
            crc32c(0, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()));
      }
    }
    CHECK(writer.append(*batch, positions) == checksums);
    std::string found(expected.size(), '\0');
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    CHECK(pread(fd, found.data(), found.size(), kOffset) == static_cast<ssize_t>(found.size()));
    close(fd);
    CHECK(found == expected);
  };
  check({});
  check({7});
  check({4, 13});  // both empty
  check(indices);
  CHECK_THROWS_AS(writer.append(*batch, std::vector<int64_t>{1, 3000}), Error);
  check({1, 2, 3});  // what failed before has left nothing
  CHECK_THROWS_AS(DirectWriter(path, 100), Error);
  CHECK_THROWS_AS(DirectWriter(folder.path("nothing"), 0), Error);
}
