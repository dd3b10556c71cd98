// The io_uring engine: conformance in its variants and with troubled completions; its own promises.
//
// Where io_uring may not be used the cases report that and pass: the threads engine serves there.
#include "io/uring.h"

#include <cstdio>
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

}  // namespace
}  // namespace headrace::io
