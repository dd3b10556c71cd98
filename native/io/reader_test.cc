// The reader: batches equal their samples by every route.
#include <sys/resource.h>

#include "testing/reader_testing.h"

using namespace headrace;
using namespace headrace::io::reader_testing;
using io::DirectReads;
using io::EngineChoice;
using io::Job;
using io::ReaderOptions;

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

TEST_CASE("ranges of samples are read by every route, and whole ones are still checked") {
  TestStore store({.samples = 100, .volumes = 2});
  for_every_route([&](ReaderOptions options) {
    const Reading reading(store.catalog(), options);
    const std::vector<int64_t> indices = store.some(40);
    std::vector<io::Range> ranges;
    for (size_t i = 0; i < indices.size(); ++i) {
      const uint64_t length =
          store.contents[static_cast<size_t>(indices[i])][0].value_or("").size();
      const uint64_t start = i % 4 == 0 ? 0 : length * i / (2 * indices.size());
      ranges.push_back({start, i % 4 == 0 ? length : (length - start) / 2});
    }
    const auto batch = reading->submit(indices, ranges)->wait(kLong);
    REQUIRE(batch != nullptr);
    REQUIRE(batch->failures.empty());
    for (size_t i = 0; i < indices.size(); ++i) {
      const std::string wanted = store.contents[static_cast<size_t>(indices[i])][0].value_or("");
      REQUIRE(static_cast<uint64_t>(batch->lengths[i]) == ranges[i].size);
      CHECK(std::memcmp(batch->buffer->data + batch->offsets[i], wanted.data() + ranges[i].start,
                        ranges[i].size) == 0);
    }
    CHECK_THROWS_AS(reading->submit({1, 2}, {{0, 0}}), Error);
    const uint64_t length = store.contents[3][0].value_or("").size();
    for (const io::Range& range :
         std::vector<io::Range>{{length + 1, 0}, {1, length}, {UINT64_MAX, 2}, {0, UINT64_MAX}}) {
      CHECK_THROWS_AS(reading->submit({3}, {range})->wait(kLong), Error);
    }
  });
}
