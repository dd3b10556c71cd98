// The io_uring engine: conformance in its variants and with troubled completions; its own promises.
//
// Where io_uring may not be used the cases report that and pass: the threads engine serves there.
#include "io/uring.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <new>
#include <random>
#include <thread>

#include "io/attempt.h"
#include "io/engine_conformance.h"

namespace headrace::io {
namespace {

using namespace conformance;

std::unique_ptr<Engine> make(const EngineOptions& options, const RingOptions& ring) {
  std::string reason;
  auto engine = make_uring_engine(options, ring, &reason);
  if (!engine) {
    CHECK(!reason.empty());
    MESSAGE("no io_uring here, so the threads engine stands in: " << reason);
    return make_threads_engine(options);
  }
  CHECK(engine->name() == std::string("uring"));
  return engine;
}

bool is_available() {
  std::string reason;
  return make_uring_engine({}, &reason) != nullptr;
}

std::unique_ptr<Engine> plain(const EngineOptions& options) { return make(options, {}); }
std::unique_ptr<Engine> unregistered(const EngineOptions& options) {
  return make(options, {.registered_buffers = false});
}

// Rewrites completions by chance of a fixed seed, and proves that it did.
class Troubled final : public Engine {
 public:
  explicit Troubled(const EngineOptions& options) {
    RingOptions ring;
    ring.on_completion = [this](RingOp op, int result) { return trouble(op, result); };
    engine_ = make(options, ring);
  }
  const char* name() const override { return "troubled uring"; }
  void read(std::span<Read> reads, const OnDone& on_done) override {
    const uint64_t before = injected_;
    engine_->read(reads, on_done);
    if (reads.size() >= 300 && is_available()) CHECK(injected_ > before);
  }
  void know_buffer(uint64_t id, std::span<std::byte> memory) override {
    engine_->know_buffer(id, memory);
  }
  void forget_buffer(uint64_t id) override { engine_->forget_buffer(id); }

 private:
  int trouble(RingOp op, int result) {
    const uint64_t dice = random_() % 100;
    if (dice >= 30 || (op == RingOp::kOpen && dice >= 20)) return result;
    ++injected_;
    if (op == RingOp::kOpen) {
      if (result >= 0) ::close(result);
      return dice < 5 ? -EINTR : dice < 10 ? -EAGAIN : dice < 15 ? -ECANCELED : -ENFILE;
    }
    if (dice < 5) return -EINTR;
    if (dice < 10) return -EAGAIN;
    if (dice < 15) return -ECANCELED;
    return result > 1 ? result - static_cast<int>(random_() % static_cast<unsigned>(result))
                      : result;
  }

  std::mt19937_64 random_{42};
  uint64_t injected_ = 0;
  std::unique_ptr<Engine> engine_;
};

std::unique_ptr<Engine> troubled(const EngineOptions& options) {
  return std::make_unique<Troubled>(options);
}

HEADRACE_ENGINE_CONFORMANCE("uring", plain);
HEADRACE_ENGINE_CONFORMANCE("uring without registered buffers", unregistered);
HEADRACE_ENGINE_CONFORMANCE("troubled uring", troubled);

TEST_CASE("an error of the disk is reported once, to the read that met it") {
  if (!is_available()) return;
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  for (const int target : {1, 17, 100}) {
    int completions = 0, injected = 0;
    RingOptions ring;
    ring.on_completion = [&](RingOp, int result) {
      if (++completions != target) return result;
      ++injected;
      return -EIO;
    };
    const auto engine = make({.queue_depth = 8}, ring);
    Memory memory(100 * 4096);
    auto reads = random_reads(file.fd, 100, kFileBytes / 2, 4096, 1, memory, 1);
    read_all(*engine, reads);
    CHECK(injected == 1);
    CHECK(count_wrong(reads, bytes) == 1);
    CHECK(std::count_if(reads.begin(), reads.end(), [](auto& r) { return r.error == EIO; }) == 1);
  }
}

TEST_CASE("retries are bounded") {
  if (!is_available()) return;
  Folder folder;
  folder.write("data", 8192);
  const File file(folder.path("data"), O_RDONLY);
  unsigned injected = 0;
  RingOptions ring;
  ring.on_completion = [&](RingOp op, int result) {
    ++injected;
    if (op == RingOp::kOpen && result >= 0) ::close(result);
    return op == RingOp::kOpen ? -EMFILE : -EAGAIN;
  };
  const auto engine = make({}, ring);
  Memory memory(8192);
  std::vector<Read> reads(2);
  reads[0].fd = file.fd;
  reads[0].length = 4096;
  reads[0].dest = memory.at(0);
  reads[1] = path_read(folder.fd(), "data", 8192, memory.at(0));
  read_all(*engine, reads);
  CHECK(reads[0].error == EAGAIN);
  CHECK(reads[1].error == EMFILE);
  CHECK(injected == kRetriesMax + 1 + kFileWaitsMax + 1);
}

// What the kernel has pinned for this process, in kB.
long pinned_kb() {
  long kb = -1;
  std::FILE* status = std::fopen("/proc/self/status", "re");
  REQUIRE(status != nullptr);
  char line[256];
  while (std::fgets(line, sizeof line, status) != nullptr) {
    if (std::sscanf(line, "VmPin: %ld kB", &kb) == 1) break;
  }
  std::fclose(status);
  return kb;
}

TEST_CASE("a known buffer is pinned until it is forgotten") {
  if (!is_available()) return;
  const auto engine = make({}, {});
  Memory memory(4 << 20);
  const long before = pinned_kb();
  engine->know_buffer(5, memory.span());
  if (pinned_kb() == before) {
    MESSAGE("the kernel registers no buffers here");
    return;
  }
  CHECK(pinned_kb() >= before + 4096);
  engine->forget_buffer(5);
  CHECK(pinned_kb() == before);
}

TEST_CASE("an engine may move between threads, one call at a time") {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  const auto engine = make({.queue_depth = 8}, {});
  Memory memory(100 * 4096);
  engine->know_buffer(1, memory.span());
  const auto read = [&] {
    memory.wipe();
    auto reads = random_reads(file.fd, 100, kFileBytes, 4096, 1, memory, 1);
    for (Read& r : reads) r.buffer_id = 1;
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  };
  for (int i = 0; i < 4; ++i) {
    std::thread(read).join();
    read();
  }
  std::thread([&] { engine->forget_buffer(1); }).join();
  read();
}

// -- rings that fail: what was read is right, or the caller is told and its memory is left alone
// ----

// A read of a pipe stays in flight until somebody writes to it.
class Pipe {
 public:
  Pipe() { REQUIRE(::pipe2(ends_, O_CLOEXEC) == 0); }
  ~Pipe() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  Read read(std::byte* dest, size_t length) const {
    Read read;
    read.fd = ends_[0];
    read.offset = UINT64_MAX;  // a pipe has no places
    read.length = length;
    read.dest = dest;
    return read;
  }
  void write(size_t length) const {
    const std::vector<char> bytes(length, 'w');
    REQUIRE(::write(ends_[1], bytes.data(), length) == static_cast<ssize_t>(length));
  }

 private:
  int ends_[2];
};

int failing_after(std::atomic<int>& calls, int working, int error) {
  return calls++ < working ? 0 : -error;
}

TEST_CASE(
    "a ring that takes no calls any more: what it holds is awaited, the rest is read without it") {
  if (!is_available()) return;
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  for (const int error : {EIO, EBADF, EPERM, EINVAL}) {
    for (const int working : {0, 1, 2, 5, 10}) {
      CAPTURE(error);
      CAPTURE(working);
      const File file(folder.path("data"), O_RDONLY | O_DIRECT);
      auto places = std::make_shared<InFlight>(8);
      std::atomic<int> calls = 0;
      bool broken = true;
      RingOptions ring;
      ring.lost_after = std::chrono::milliseconds(300);
      // A closed descriptor would be the ring's own: it stays open here, and leaks with the test.
      ring.on_enter = [&] { return broken ? failing_after(calls, working, error) : 0; };
      const auto engine = make({.queue_depth = 8, .in_flight = places}, ring);
      Memory memory(100 * 4096);
      for (int round = 0; round < 2; ++round) {  // the second with a new ring
        memory.wipe();
        auto reads = random_reads(file.fd, 100, kFileBytes / 2, 4096, 4096, memory, 1);
        const int before = calls;
        if (error == EBADF) {
          // With its descriptor gone a ring of this kind brings nothing more.
          try {
            read_all(*engine, reads);
          } catch (const ReadsLost& lost) {
            CHECK(lost.system_errno == EBADF);
            CHECK(lost.reads > 0);
            CHECK(places->taken() == 0);
            break;
          }
        } else {
          read_all(*engine, reads);
        }
        if (broken) CHECK(calls > before + working);
        CHECK(count_wrong(reads, bytes) == 0);
        CHECK(places->taken() == 0);
        broken = false;
      }
    }
  }
}

TEST_CASE(
    "reads that a broken ring never brings are lost: the caller hears it, the engine goes on") {
  if (!is_available()) return;
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  const Pipe pipe;
  auto places = std::make_shared<InFlight>(8);
  std::atomic<int> calls = 0;
  bool broken = true;
  RingOptions ring;
  ring.lost_after = std::chrono::milliseconds(20);
  ring.on_enter = [&] { return broken ? failing_after(calls, 1, EIO) : 0; };
  const auto engine = make({.queue_depth = 8, .in_flight = places}, ring);
  Memory memory(100 * 4096), lost_memory(4096);
  {
    auto reads = random_reads(file.fd, 4, kFileBytes / 2, 4096, 1, memory, 1);
    reads.push_back(pipe.read(lost_memory.at(0), 100));
    reads.push_back(path_read(folder.fd(), "data", 4096, memory.at(50 * 4096)));
    int error = 0;
    unsigned lost_reads = 0;
    try {
      engine->read(reads, [](Read&) {});
    } catch (const ReadsLost& lost) {
      error = lost.system_errno;
      lost_reads = lost.reads;
    }
    CHECK(error == EIO);
    CHECK(lost_reads >= 1);
  }  // what the engine knew of the reads is gone, too
  CHECK(calls > 1);
  CHECK(places->taken() == 0);
  broken = false;
  pipe.write(100);
  auto reads = random_reads(file.fd, 100, kFileBytes, 4096, 1, memory, 2);
  read_all(*engine, reads);
  CHECK(count_wrong(reads, bytes) == 0);
}

TEST_CASE("what is thrown with reads in flight leaves only when they are over") {
  if (!is_available()) return;
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  for (const bool on_done_throws : {false, true}) {
    CAPTURE(on_done_throws);
    const Pipe pipe;
    auto places = std::make_shared<InFlight>(8);
    std::atomic<bool> thrown = false, written = false, wrong_order = false, returned = false;
    RingOptions ring;
    ring.on_completion = [&](RingOp, int result) {
      if (on_done_throws || thrown) return result;
      thrown = true;
      throw std::bad_alloc();
    };
    const auto engine = make({.queue_depth = 8, .in_flight = places}, ring);
    Memory memory(100 * 4096), slow_memory(4096);
    std::thread reading([&] {
      std::vector<Read> reads{pipe.read(slow_memory.at(0), 100)};
      for (const Read& read : random_reads(file.fd, 20, kFileBytes / 2, 4096, 1, memory, 1)) {
        reads.push_back(read);
      }
      try {
        engine->read(reads, [&](Read&) {
          if (!on_done_throws || thrown) return;
          thrown = true;
          throw std::bad_alloc();
        });
      } catch (const std::bad_alloc&) {
        wrong_order = !written;
        returned = true;
      }
    });
    for (int ms = 0; ms < 10'000 && !thrown; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(thrown);
    // An engine that did not wait would be back by now.
    for (int ms = 0; ms < 100 && !returned; ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    written = true;
    pipe.write(100);
    reading.join();
    CHECK(returned);
    CHECK(!wrong_order);
    CHECK(slow_memory.at(99)[0] == std::byte{'w'});
    CHECK(places->taken() == 0);
    auto reads = random_reads(file.fd, 100, kFileBytes, 4096, 1, memory, 2);
    read_all(*engine, reads);
    CHECK(count_wrong(reads, bytes) == 0);
  }
}

// The descriptors of this process that are rings.
std::vector<int> ring_descriptors() {
  std::vector<int> rings;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.find("[io_uring]") != target.npos)
      rings.push_back(std::stoi(entry.path().filename()));
  }
  return rings;
}

TEST_CASE("a ring whose descriptor was closed, or is another file's by now, is left alone") {
  if (!is_available()) return;
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  for (const bool reused : {false, true}) {
    CAPTURE(reused);
    const auto before = ring_descriptors();
    const auto engine = make({.queue_depth = 8}, {});
    const auto rings = ring_descriptors();
    REQUIRE(rings.size() == before.size() + 1);
    int ring = -1;
    for (const int fd : rings) {
      if (std::find(before.begin(), before.end(), fd) == before.end()) ring = fd;
    }
    REQUIRE(::close(ring) == 0);
    if (reused) REQUIRE(::dup2(file.fd, ring) == ring);
    Memory memory(100 * 4096);
    for (int round = 0; round < 2; ++round) {
      memory.wipe();
      auto reads = random_reads(file.fd, 100, kFileBytes, 4096, 1, memory, 1);
      read_all(*engine, reads);
      CHECK(count_wrong(reads, bytes) == 0);
    }
    if (reused) {
      CHECK(::fcntl(ring, F_GETFD) >= 0);  // the other file is open still
      ::close(ring);
    }
  }
}

}  // namespace
}  // namespace headrace::io
