// Attempt: how far one read has come, and what a system call's answer means for it.
//
// The rules that every engine shares: which errors are tried again and how often, where a short
// read goes on, what is the end of the file, whether an opened file is the one that was indexed,
// how many files may be open. Owns nothing and moves no bytes: an engine performs the calls.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "io/engine.h"
#include "io/syscalls.h"

namespace headrace::io {

// Calls without progress that a read may cost. Signals and cancelled requests come singly; a file
// system that says EAGAIN this often in a row means it.
inline constexpr unsigned kRetriesMax = 16;

// One call asks for no more: the kernel moves at most 0x7ffff000 bytes, and a multiple of every
// alignment keeps O_DIRECT happy.
inline constexpr size_t kCallBytesMax = size_t{1} << 30;

// An open that is refused with EMFILE or ENFILE while none of our files is open: others hold them
// all, and may let go. So many waits of `kFileWaitMs` (a second), and the read fails.
inline constexpr unsigned kFileWaitsMax = 100;
inline constexpr unsigned kFileWaitMs = 10;

inline bool is_transient(int error) {
  return error == EINTR || error == EAGAIN || error == ECANCELED;
}
inline bool is_out_of_files(int error) { return error == EMFILE || error == ENFILE; }

enum class Next { kFinished, kAgain };

struct Attempt {
  Read* read = nullptr;
  int fd = -1;
  size_t from = 0;     // the next call reads from here (bytes into the read) ...
  size_t reached = 0;  // ... which may lie before what has arrived: O_DIRECT restarts aligned
  unsigned retries = 0;

  std::byte* dest() const { return read->dest + from; }
  uint64_t offset() const { return read->offset + from; }
  size_t bytes() const {
    const size_t left = read->length - from;
    return left < kCallBytesMax ? left : kCallBytesMax;
  }

  // Takes the answer of a call that asked for `bytes()` at `offset()`: bytes, or -errno. After
  // kFinished `read->error` and `read->done` are final.
  Next advance(int64_t result, const Syscalls& sys);
  // Reports `error` with what has arrived. Always kFinished.
  Next fail(int error);
};

// 0, or why `fd` is not the file that was indexed: EISDIR, EINVAL (no regular file), ESTALE.
int check_file(int fd, const FileCheck& check, const Syscalls& sys);

// How many files an engine that would like `wanted` may hold open: half of what RLIMIT_NOFILE
// leaves after a share for the program itself, at least one.
unsigned open_files_max(unsigned wanted);

}  // namespace headrace::io
