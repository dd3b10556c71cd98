// What the tests of the reader share: a reader that ends with the test, and batches checked against
// what the store holds.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <iterator>
#include <thread>

#include "core/error.h"
#include "io/reader.h"
#include "testing/store_builder.h"

namespace headrace::io::reader_testing {

using headrace::testing::StoreSpec;
using headrace::testing::TestStore;
using namespace std::chrono_literals;

inline constexpr double kLong = 60;

// A reader that ends its threads with the test.
struct Reading {
  std::shared_ptr<Reader> reader;
  Reading(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
          std::vector<int> parts = {0})
      : reader(Reader::make(std::move(catalog), options, std::move(parts))) {}
  ~Reading() { CHECK(reader->close(kLong)); }
  Reader* operator->() const { return reader.get(); }
  std::shared_ptr<Batch> read(const std::vector<int64_t>& indices) const {
    return reader->submit(indices)->wait(kLong);
  }
};

inline std::string slot_text(const Batch& batch, size_t slot) {
  return {reinterpret_cast<const char*>(batch.buffer->data) + batch.offsets[slot],
          static_cast<size_t>(batch.lengths[slot])};
}

// Every slot of the batch but those in `failed` is what the store holds.
inline void check_batch(const TestStore& store, const Batch& batch,
                        const std::vector<int64_t>& indices, const std::vector<int>& parts = {0},
                        const std::vector<uint64_t>& failed = {}) {
  REQUIRE(batch.indices == indices);
  REQUIRE(batch.samples == indices.size());
  REQUIRE(batch.parts == parts.size());
  REQUIRE(batch.offsets.size() == indices.size() * parts.size());
  REQUIRE(batch.labels.size() == indices.size());
  std::vector<uint64_t> found;
  for (const Failure& failure : batch.failures) found.push_back(failure.slot);
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

inline ReaderOptions with(EngineChoice engine, DirectReads direct) {
  ReaderOptions options;
  options.engine = engine;
  options.direct = direct;
  options.engine_options.threads = 4;
  return options;
}

inline bool uring_works() {
  static const bool works = [] {
    std::string reason;
    const bool made = make_uring_engine({}, &reason) != nullptr;
    if (!made) MESSAGE("io_uring is left out: " << reason);
    return made;
  }();
  return works;
}
inline std::vector<EngineChoice> engines() {
  std::vector<EngineChoice> list{EngineChoice::kAuto, EngineChoice::kThreads, EngineChoice::kMmap};
  if (uring_works()) list.push_back(EngineChoice::kUring);
  return list;
}
inline const std::vector<DirectReads> kDirect{DirectReads::kAuto, DirectReads::kAlways,
                                              DirectReads::kNever};

inline void for_every_route(const std::function<void(ReaderOptions)>& body) {
  for (const EngineChoice engine : engines()) {
    for (const DirectReads direct : kDirect) {
      CAPTURE(static_cast<int>(engine));
      CAPTURE(static_cast<int>(direct));
      body(with(engine, direct));
    }
  }
}

inline ErrorKind wait_error(Job& job) {
  try {
    job.wait(kLong);
  } catch (const Error& error) {
    return error.kind;
  }
  FAIL("the batch was delivered");
  return ErrorKind::kVolumeTimeout;
}

// Waits, without `Job::wait`, which would let the job through the budget.
inline bool becomes(const std::function<bool()>& condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(1ms);
  }
  return false;
}

inline size_t open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd"), end;
  return static_cast<size_t>(std::distance(entries, end));
}

}  // namespace headrace::io::reader_testing
