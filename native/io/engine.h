// Engine: performs many reads at once. The one interface between readers and the operating system.
//
// An engine belongs to one thread (the caller of `read`), is made lazily in the process that uses
// it, and is never carried over a fork. `read` returns when every read has completed; `on_done` is
// called once for each, as it completes, possibly on another thread and concurrently, so that
// checksums are computed while the rest is still in flight. It must not throw.
//
// No read is in flight without a place of `EngineOptions::in_flight`; an engine waits for the first
// and takes what it gets of the rest.
//
// `read` throws for what no single read met (memory is out, a ring takes no calls any more), and
// only after every read that had begun is over: its memory may be used again. Where an engine
// cannot make sure of that it throws ReadsLost.
//
// An engine retries short reads, EINTR and EAGAIN itself. It reports and never throws for what a
// single read met: `error` is 0 or an errno value, `done` the bytes that arrived. End of file is
// `error == 0 && done < length`.
//
// What every engine does alike, held by engine_conformance.h: a read of length 0 moves nothing and
// is fine (a path is still opened and checked); a path that is no regular file is EISDIR or EINVAL,
// and opening it never blocks; no read fails because the engine itself holds too many files open.
// An engine that finds itself moved to another thread, or inherited by a forked child, makes its
// ring or threads anew: slower, and safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "core/mapping.h"
#include "io/in_flight.h"

namespace headrace::io {

// What a foreign file must still look like when it is opened for reading.
struct FileCheck {
  uint64_t size_bytes = 0;
  int64_t mtime_ns = -1;  // -1: not recorded
};

struct Read {
  int fd = -1;          // an open file, or, when `path` is set, the directory that `path` is below
  uint64_t offset = 0;  // multiple of the volume's alignment when `fd` was opened with O_DIRECT
  size_t length = 0;    // the same
  std::byte* dest = nullptr;  // the same
  uint64_t buffer_id = 0;     // arena buffer that `dest` lies in; 0: none (never registered)

  const char* path = nullptr;  // open this file below `fd`, check it, read it, close it
  FileCheck check;             // ESTALE is reported when an opened file differs from this

  // Set by readers for the mmap engine: where `fd` is mapped, and whether to compute the checksum
  // in the same pass as the copy. Other engines ignore both.
  const Mapping* mapping = nullptr;
  bool want_crc = false;
  bool crc_done = false;
  uint32_t crc = 0;

  int error = 0;
  size_t done = 0;
  int64_t took_ns = 0;    // by the device, opening included
  int64_t open_ns = 0;    // of that, opening the file
  bool resident = false;  // the bytes of `path` lay in the page cache when it was opened
  unsigned others = 0;    // reads of all engines that were in flight when this one began

  uint32_t user = 0;    // for the caller
  uint32_t volume = 0;  // its number in the catalog
};

using OnDone = std::function<void(Read&)>;

// The kernel may still write to the memory of some of the reads: it must never be used again
// (`Buffer::lost`). Holds no text, so that it can be thrown when memory is out.
class ReadsLost : public std::exception {
 public:
  ReadsLost(int system_errno, unsigned reads) : system_errno(system_errno), reads(reads) {}
  const char* what() const noexcept override { return "reads in flight were lost"; }

  const int system_errno;  // why
  const unsigned reads;    // how many of them
};

struct EngineOptions {
  // Reads in flight of this engine while `in_flight` sets no limit. 32 saturated the test machine's
  // disk at 110 kB, 64 at 4 kB.
  unsigned queue_depth = 64;
  // The same for the `threads` engine, which needs a thread for each and holds at most one file
  // open in each.
  unsigned threads = 16;
  // Places that engines share, and the record of their reads. Null: an engine is bounded by its own
  // depth alone.
  std::shared_ptr<InFlight> in_flight = nullptr;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* name() const = 0;
  virtual void read(std::span<Read> reads, const OnDone& on_done) = 0;
  // Tells the engine where arena buffer `buffer_id` lies, so that it may register it with the
  // kernel. Ignored where that is not possible; `forget_buffer` before the memory is unmapped.
  virtual void know_buffer(uint64_t buffer_id, std::span<std::byte> memory);
  virtual void forget_buffer(uint64_t buffer_id);
};

inline void Engine::know_buffer(uint64_t, std::span<std::byte>) {}
inline void Engine::forget_buffer(uint64_t) {}

// io_uring. Returns null and says why in `*reason` where the kernel, a seccomp filter, a sysctl or
// the build forbids it.
std::unique_ptr<Engine> make_uring_engine(const EngineOptions& options, std::string* reason);

// preadv on a pool of threads. Always available.
std::unique_ptr<Engine> make_threads_engine(const EngineOptions& options);

// Copies from the volumes' mappings, in the calling thread. For bytes that lie in the page cache.
std::unique_ptr<Engine> make_mmap_engine();

// `uring` where it works, else `threads`; `*reason` says why it fell back, else is empty.
std::unique_ptr<Engine> make_best_engine(const EngineOptions& options, std::string* reason);

}  // namespace headrace::io
