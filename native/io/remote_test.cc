// Remote volumes: batches equal their samples whatever order, delay and failures their engine has,
// and answers that come too late change nothing.
#include <doctest/doctest.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "core/error.h"
#include "io/reader.h"
#include "testing/store_builder.h"

using namespace headrace;
using namespace std::chrono_literals;
using io::Batch;
using io::FailureKind;
using io::Reader;
using io::ReaderOptions;
using io::RemoteRequests;
using testing::TestStore;

namespace {

constexpr double kLong = 60;

// Objects in memory. A thread of its own answers, in random order.
class FakeObjects final : public io::RemoteEngine {
 public:
  explicit FakeObjects(const TestStore& store) {
    for (const std::string& path : store.paths) {
      std::ifstream file(path, std::ios::binary);
      objects["fake://" + path] = {std::istreambuf_iterator<char>(file), {}};
    }
    thread_ = std::thread([this] { run(); });
  }
  ~FakeObjects() override {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  void read(std::shared_ptr<RemoteRequests> requests) override {
    ++calls;
    if (at_once) {
      for (size_t i = 0; i < requests->requests().size(); ++i) answer(*requests, i);
      return;
    }
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < requests->requests().size(); ++i) waiting_.emplace_back(requests, i);
    wake_.notify_all();
  }
  void turn(unsigned reads_in_flight) override { turned = reads_in_flight; }
  std::string name() const override { return "fake"; }

  std::map<std::string, std::string> objects;
  bool at_once = false;
  // May answer in its own way: true if it did, or never will.
  std::function<bool(RemoteRequests&, size_t)> strange;
  std::atomic<int> calls{0};
  std::atomic<unsigned> turned{0};
  std::atomic<uint64_t> asked_bytes{0};
  std::atomic<uint64_t> longest{0};

  std::string bytes_of(const RemoteRequests& requests, size_t i) const {
    const auto& request = requests.requests()[i];
    return objects.at(requests.path(i)).substr(request.offset, request.length);
  }
  void answer(RemoteRequests& requests, size_t i) {
    const uint64_t length = requests.requests()[i].length;
    asked_bytes += length;
    longest = std::max<uint64_t>(longest, length);
    if (strange && strange(requests, i)) return;
    const std::string bytes = bytes_of(requests, i);
    if (i % 2 == 0) {
      std::memcpy(requests.requests()[i].dest, bytes.data(), bytes.size());
      requests.finish(i, bytes.size(), 0);
    } else {
      requests.finish_with(i, std::as_bytes(std::span(bytes)), 0);
    }
    CHECK(!requests.finish(i, 1, EIO));  // only the first counts
  }

 private:
  void run() {
    std::mt19937 random(7);
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
      if (stop_) return;
      const size_t pick = random() % waiting_.size();
      auto [requests, i] = waiting_[pick];
      waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(pick));
      lock.unlock();
      answer(*requests, i);
      requests.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::pair<std::shared_ptr<RemoteRequests>, size_t>> waiting_;
  bool stop_ = false;
  std::thread thread_;
};

struct RemoteStore {
  TestStore store;
  std::shared_ptr<FakeObjects> objects;
  std::shared_ptr<io::Catalog> catalog = std::make_shared<io::Catalog>();

  explicit RemoteStore(testing::StoreSpec spec = {.samples = 200, .volumes = 3})
      : store(spec), objects(std::make_shared<FakeObjects>(store)) {
    std::vector<std::unique_ptr<io::Volume>> volumes;
    for (size_t v = 0; v < store.paths.size(); ++v) {
      volumes.push_back(std::make_unique<io::Volume>(
          io::VolumeKind::kRemote, "fake://" + store.paths[v], store.volume_bytes(v), -1));
    }
    catalog->add_segment(testing::open_image(testing::build_directory(store.spec), "test.hrd"),
                         std::move(volumes));
    catalog->set_remote(objects);
    catalog->seal();
  }
};

struct Reading {
  std::shared_ptr<Reader> reader;
  Reading(const RemoteStore& store, ReaderOptions options = {})
      : reader(Reader::make(store.catalog, options, {0})) {}
  ~Reading() { CHECK(reader->close(kLong)); }
  std::shared_ptr<Batch> read(const std::vector<int64_t>& indices) const {
    return reader->submit(indices)->wait(kLong);
  }
};

void check_batch(const TestStore& store, const Batch& batch, const std::vector<int64_t>& indices,
                 const std::vector<uint64_t>& failed = {}) {
  std::vector<uint64_t> found;
  for (const io::Failure& failure : batch.failures) found.push_back(failure.slot);
  REQUIRE(found == failed);
  for (size_t i = 0; i < indices.size(); ++i) {
    if (std::find(failed.begin(), failed.end(), i) != failed.end()) continue;
    const std::string text(reinterpret_cast<const char*>(batch.buffer->data) + batch.offsets[i],
                           static_cast<size_t>(batch.lengths[i]));
    REQUIRE(text == store.contents[static_cast<size_t>(indices[i])][0].value_or(""));
  }
}

}  // namespace

TEST_CASE("remote batches equal their samples, whatever order the answers come in") {
  RemoteStore remote;
  for (const bool at_once : {false, true}) {
    for (const unsigned depth : {0u, 1u, 5u}) {
      CAPTURE(at_once);
      CAPTURE(depth);
      remote.objects->at_once = at_once;
      ReaderOptions options;
      options.reads_in_flight = depth;
      options.remote_gap_bytes = 0;
      const Reading reading(remote, options);
      for (int round = 0; round < 5; ++round) {
        const auto indices = remote.store.some(100);
        const auto batch = reading.read(indices);
        check_batch(remote.store, *batch, indices);
        CHECK(batch->stats.remote_reads > 0);
        CHECK(batch->stats.direct_reads + batch->stats.buffered_reads == 0);
      }
      const io::ReaderStats stats = reading.reader->stats();
      CHECK(stats.reads.in_flight == 0);
      CHECK(stats.reads.reads > 0);
      if (depth != 0) CHECK(stats.reads.in_flight_most <= depth);
      CHECK(reading.reader->engine_name() == "fake");
    }
  }
}

TEST_CASE(
    "gaps between remote samples are read while they are a share of the bytes that are wanted") {
  RemoteStore remote({.samples = 400, .volumes = 1, .length_max = 3000, .gap_max = 4000});
  ReaderOptions options;
  options.remote_free_gap_bytes = 0;
  uint64_t wanted = 0;
  for (const auto& sample : remote.store.contents) wanted += sample[0].value_or("").size();
  uint64_t requests_before = UINT64_MAX;
  for (const double overshoot : {0.0, 0.1, 0.25, 10.0}) {
    CAPTURE(overshoot);
    options.remote_overshoot = overshoot;
    const Reading reading(remote, options);
    const auto batch = reading.read(remote.store.all());
    check_batch(remote.store, *batch, remote.store.all());
    CHECK(static_cast<double>(batch->stats.bytes_read) <=
          static_cast<double>(wanted) * (1 + overshoot));
    CHECK(batch->stats.remote_reads < requests_before);
    requests_before = batch->stats.remote_reads;
  }
  CHECK(requests_before == 1);
  options.remote_gap_bytes = 100;
  const Reading narrow(remote, options);
  CHECK(narrow.read(remote.store.all())->stats.remote_reads > 300);
  options = {};
  options.remote_overshoot = 0;
  options.remote_free_gap_bytes = 16 << 10;  // empty samples lie between gaps
  const Reading records(remote, options);    // gaps as of records' headers and padding
  CHECK(records.read(remote.store.all())->stats.remote_reads == 1);
}

TEST_CASE("remote ranges are joined and cut into large requests") {
  RemoteStore remote({.samples = 20, .volumes = 1, .length_max = 1 << 20});
  ReaderOptions options;
  options.remote_request_bytes_max = 3 << 20;
  const Reading reading(remote, options);
  const auto batch = reading.read(remote.store.all());
  check_batch(remote.store, *batch, remote.store.all());
  const uint64_t bytes = batch->stats.bytes_read;
  CHECK(bytes > 5 << 20);
  CHECK(batch->stats.remote_reads == (bytes + (3 << 20) - 1) / (3 << 20));
  CHECK(remote.objects->longest == 3 << 20);
}

TEST_CASE("single remote samples and ranges of them are read through the engine") {
  RemoteStore remote({.samples = 2, .volumes = 1, .length_max = 12 << 20, .seed = 4});
  const auto arena = Arena::make(1 << 20);
  for (int64_t i = 0; i < 2; ++i) {
    const auto batch = remote.catalog->read_one(*arena, i, -1, 0, -1, true);
    check_batch(remote.store, *batch, {i});
  }
  CHECK(remote.objects->longest == io::kRemotePieceBytes);  // large ones come in pieces
  const auto range = remote.catalog->read_one(*arena, 1, -1, 5, 7, true);
  CHECK(std::string(reinterpret_cast<const char*>(range->buffer->data), 7) ==
        remote.store.contents[1][0]->substr(5, 7));
  remote.objects->strange = [](RemoteRequests& requests, size_t i) {
    return requests.finish(i, 0, ENOENT);
  };
  const auto failed = remote.catalog->read_one(*arena, 1, -1, 0, -1, true);
  REQUIRE(failed->failures.size() == 1);
  CHECK(failed->failures[0].system_errno == ENOENT);
  remote.catalog->set_remote(nullptr);
  CHECK(remote.catalog->read_one(*arena, 1, -1, 0, -1, true)->failures[0].system_errno == ENOTSUP);
}

TEST_CASE(
    "errors, short answers and wrong bytes are tried once more, then failures of their slots") {
  for (const int times : {1, 2}) {
    for (const char* what : {"error", "short", "long", "flipped"}) {
      CAPTURE(times);
      CAPTURE(what);
      RemoteStore remote;
      const auto& extent = remote.store.spec.extents[30][0];
      REQUIRE(extent.length > 2);
      std::atomic<int> met{0};
      remote.objects->strange = [&](RemoteRequests& requests, size_t i) {
        const auto& request = requests.requests()[i];
        if (request.volume != extent.volume || request.offset > extent.offset ||
            request.offset + request.length <= extent.offset || met >= times) {
          return false;
        }
        ++met;
        std::string bytes = remote.objects->bytes_of(requests, i);
        const size_t at = extent.offset - request.offset;
        if (what == std::string("error")) return requests.finish(i, 0, ECONNRESET);
        if (what == std::string("long")) return requests.finish(i, request.length + 1, 0);
        if (what == std::string("short")) bytes.resize(at + 1);
        if (what == std::string("flipped")) bytes[at] ^= 4;
        return requests.finish_with(i, std::as_bytes(std::span(bytes)), 0);
      };
      ReaderOptions options;
      options.remote_gap_bytes = 0;
      const Reading reading(remote, options);
      const std::vector<int64_t> indices{1, 30, 60};
      const auto batch = reading.read(indices);
      CHECK(met == times);
      if (times == 1) {
        check_batch(remote.store, *batch, indices);
        continue;
      }
      check_batch(remote.store, *batch, indices, {1});
      const io::Failure& failure = batch->failures[0];
      if (what == std::string("error")) CHECK(failure.system_errno == ECONNRESET);
      if (what == std::string("long")) CHECK(failure.system_errno == EPROTO);
      if (what == std::string("short")) CHECK(failure.kind == FailureKind::kShort);
      if (what == std::string("flipped")) CHECK(failure.kind == FailureKind::kChecksum);
    }
  }
}

TEST_CASE("a request that is never answered is ETIMEDOUT at the deadline, and named before") {
  RemoteStore remote;
  std::mutex mutex;
  std::vector<std::pair<std::shared_ptr<RemoteRequests>, size_t>> kept;
  remote.objects->strange = [&](RemoteRequests&, size_t) { return true; };
  std::shared_ptr<Batch> batch;
  {
    ReaderOptions options;
    options.remote_deadline_s = 0.2;
    const Reading reading(remote, options);
    const auto job = reading.reader->submit({30});
    std::string waiting;
    for (int i = 0; i < 1000 && waiting.find("fake://") == std::string::npos; ++i) {
      waiting = job->waiting_for();
      std::this_thread::sleep_for(100us);
    }
    CHECK(waiting.find("1 of 1 reads, one of them in volume fake://") != std::string::npos);
    batch = job->wait(kLong);
    CHECK(remote.objects->calls == 1);  // no second wait of that length
    CHECK(reading.reader->stats().reads.in_flight == 0);
  }
  REQUIRE(batch->failures.size() == 1);
  CHECK(batch->failures[0].kind == FailureKind::kSystem);
  CHECK(batch->failures[0].system_errno == ETIMEDOUT);
}

TEST_CASE("answers after the deadline or after the end of everything are harmless") {
  std::vector<std::shared_ptr<RemoteRequests>> late;
  {
    RemoteStore remote;
    class Forgetful final : public io::RemoteEngine {
     public:
      explicit Forgetful(std::vector<std::shared_ptr<RemoteRequests>>& kept) : kept_(kept) {}
      void read(std::shared_ptr<RemoteRequests> requests) override {
        std::lock_guard lock(mutex_);
        kept_.push_back(std::move(requests));
      }
      void turn(unsigned) override {}
      std::string name() const override { return "forgetful"; }

     private:
      std::mutex mutex_;
      std::vector<std::shared_ptr<RemoteRequests>>& kept_;
    };
    ReaderOptions options;
    options.remote = std::make_shared<Forgetful>(late);
    options.remote_deadline_s = 0.02;
    const auto reader = Reader::make(remote.catalog, options, {0});
    CHECK(reader->submit(remote.store.all())->wait(kLong)->failures.size() > 100);
    CHECK(reader->close(kLong));
  }
  REQUIRE(!late.empty());
  for (const auto& requests : late) {
    for (size_t i = 0; i < requests->requests().size(); ++i) {
      CHECK(!requests->open(i));
      std::memset(requests->requests()[i].dest, 1, requests->requests()[i].length);
      const std::string bytes(requests->requests()[i].length, 'x');
      CHECK(!requests->finish_with(i, std::as_bytes(std::span(bytes)), 0));
      CHECK(!requests->finish(i, 1, 0));
    }
  }
}

TEST_CASE("closing gives up what is not answered, and says so") {
  RemoteStore remote;
  remote.objects->strange = [](RemoteRequests&, size_t) { return true; };
  const auto reader = Reader::make(remote.catalog, {}, {0});
  const auto job = reader->submit({30});
  while (remote.objects->calls == 0) std::this_thread::sleep_for(1ms);
  CHECK(reader->close(kLong));
  try {
    job->wait(kLong);
    FAIL("the batch was delivered");
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::kInvalidArgument);
  }
}

TEST_CASE("the knob reaches the engine, and bounds what it holds") {
  RemoteStore remote({.samples = 300, .volumes = 3, .gap_max = 40});
  ReaderOptions options;
  options.remote_gap_bytes = 0;
  const Reading reading(remote, options);
  reading.reader->turn(7, {});
  CHECK(remote.objects->turned == 7);
  check_batch(remote.store, *reading.read(remote.store.all()), remote.store.all());
  CHECK(reading.reader->stats().reads.in_flight_most <= 7);
}
