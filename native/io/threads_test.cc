// The threads engine: conformance, plain and with system calls that fail; its own promises.
#include "io/threads.h"

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "io/attempt.h"
#include "io/engine_conformance.h"

namespace headrace::io {
namespace {

using namespace conformance;

std::unique_ptr<Engine> one_thread(EngineOptions options) {
  options.threads = 1;
  return make_threads_engine(options);
}
std::unique_ptr<Engine> sixteen_threads(EngineOptions options) {
  options.threads = 16;
  return make_threads_engine(options);
}

// A table is of plain functions, so what they count is global. Every call takes a number; a fault
// is chosen by it, whichever thread calls.
std::atomic<uint64_t> g_calls;
std::atomic<uint64_t> g_injected;
std::atomic<uint64_t> g_target;  // the call that fails, for the faults that strike once

int inject(int error) {
  ++g_injected;
  errno = error;
  return -1;
}

ssize_t troubled_preadv(int fd, const iovec* parts, int count, off_t offset) {
  const uint64_t call = ++g_calls;
  if (call % 7 == 0) return inject(EINTR);
  if (call % 11 == 0) return inject(EAGAIN);
  const ssize_t result = kSyscalls.preadv(fd, parts, count, offset);
  if (call % 3 == 0 && result > 1) {
    ++g_injected;
    return result - result / 3;  // off every boundary, also for O_DIRECT
  }
  return result;
}

int troubled_openat(int directory, const char* path, int flags) {
  const uint64_t call = ++g_calls;
  if (call % 5 == 0) return inject(EINTR);
  if (call % 97 == 0) return inject(EAGAIN);
  if (call % 89 == 0) return inject(EMFILE);
  return kSyscalls.openat(directory, path, flags);
}

// Passes reads on, and proves at the end that the trouble was real.
class Troubled final : public Engine {
 public:
  explicit Troubled(const EngineOptions& options) {
    Syscalls sys = kSyscalls;
    sys.preadv = troubled_preadv;
    sys.openat = troubled_openat;
    engine_ = make_threads_engine(options, sys);
  }
  const char* name() const override { return "troubled threads"; }
  void read(std::span<Read> reads, const OnDone& on_done) override {
    const uint64_t before = g_injected;
    engine_->read(reads, on_done);
    if (reads.size() >= 300) CHECK(g_injected > before);
  }

 private:
  std::unique_ptr<Engine> engine_;
};

std::unique_ptr<Engine> troubled(const EngineOptions& options) {
  return std::make_unique<Troubled>(options);
}

HEADRACE_ENGINE_CONFORMANCE("one thread", one_thread);
HEADRACE_ENGINE_CONFORMANCE("16 threads", sixteen_threads);
HEADRACE_ENGINE_CONFORMANCE("troubled threads", troubled);

ssize_t preadv_eio_once(int fd, const iovec* parts, int count, off_t offset) {
  if (++g_calls == g_target) return inject(EIO);
  return kSyscalls.preadv(fd, parts, count, offset);
}

TEST_CASE("an error of the disk is reported once, to the read that met it") {
  Folder folder;
  const auto bytes = folder.write("data", kFileBytes);
  const File file(folder.path("data"), O_RDONLY);
  Syscalls sys = kSyscalls;
  sys.preadv = preadv_eio_once;
  for (const uint64_t target : {1, 17, 100}) {
    g_calls = 0;
    g_injected = 0;
    g_target = target;
    const auto engine = make_threads_engine({.threads = 4}, sys);
    Memory memory(100 * 4096);
    auto reads = random_reads(file.fd, 100, kFileBytes / 2, 4096, 1, memory, 1);
    read_all(*engine, reads);
    CHECK(g_injected == 1);
    CHECK(count_wrong(reads, bytes) == 1);
    CHECK(std::count_if(reads.begin(), reads.end(), [](auto& r) { return r.error == EIO; }) == 1);
  }
}

ssize_t preadv_half_then_eio(int fd, const iovec* parts, int count, off_t offset) {
  if (++g_calls > 1) return inject(EIO);
  iovec part = parts[0];
  part.iov_len /= 2;
  return kSyscalls.preadv(fd, &part, count, offset);
}

TEST_CASE("what arrived before an error is told") {
  Folder folder;
  const auto bytes = folder.write("data", 8192);
  const File file(folder.path("data"), O_RDONLY);
  Syscalls sys = kSyscalls;
  sys.preadv = preadv_half_then_eio;
  g_calls = 0;
  g_injected = 0;
  const auto engine = make_threads_engine({.threads = 1}, sys);
  Memory memory(8192);
  std::vector<Read> reads(1);
  reads[0].fd = file.fd;
  reads[0].length = 8192;
  reads[0].dest = memory.at(0);
  read_all(*engine, reads);
  CHECK(g_injected == 1);
  CHECK(reads[0].error == EIO);
  CHECK(reads[0].done == 4096);
  CHECK(std::memcmp(memory.at(0), bytes.data(), 4096) == 0);
}

ssize_t preadv_never(int, const iovec*, int, off_t) { return inject(EAGAIN); }
int openat_never(int, const char*, int) { return inject(EMFILE); }

TEST_CASE("retries are bounded") {
  Folder folder;
  folder.write("data", 8192);
  const File file(folder.path("data"), O_RDONLY);
  Syscalls sys = kSyscalls;
  sys.preadv = preadv_never;
  sys.openat = openat_never;
  g_injected = 0;
  const auto engine = make_threads_engine({.threads = 2}, sys);
  Memory memory(8192);
  std::vector<Read> reads(2);
  reads[0].fd = file.fd;
  reads[0].length = 4096;
  reads[0].dest = memory.at(0);
  reads[1] = path_read(folder.fd(), "data", 8192, memory.at(0));
  read_all(*engine, reads);
  CHECK(reads[0].error == EAGAIN);
  CHECK(reads[1].error == EMFILE);
  CHECK(g_injected == kRetriesMax + 1 + kFileWaitsMax + 1);
}

TEST_CASE("reads run on several threads, and slow ones side by side") {
  Folder folder;
  folder.write("data", 8192);
  const File file(folder.path("data"), O_RDONLY);
  const auto engine = make_threads_engine({.threads = 8});
  Memory memory(8192);
  std::vector<Read> reads(8);
  for (Read& read : reads) {
    read.fd = file.fd;
    read.length = 1024;
    read.dest = memory.at(static_cast<size_t>(&read - reads.data()) * 1024);
  }
  std::mutex mutex;
  std::set<std::thread::id> threads;
  const auto start = std::chrono::steady_clock::now();
  engine->read(reads, [&](Read&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  CHECK(threads.size() == 8);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(8 * 200));
}

}  // namespace
}  // namespace headrace::io
