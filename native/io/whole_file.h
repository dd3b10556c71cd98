// One file, read as a whole: what it was when it was read, and its bytes.
//
// Blocking calls without state: the threads of FileReader make them. What is read is trusted only
// if the file was the same before and after; what it was is handed on, so that whoever uses the
// bytes later can ask whether the path still names the same file.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "io/syscalls.h"

namespace headrace::io {

// The system calls of FileReader, as a table: tests hand over calls that fail, change files or
// never return.
struct FileCalls {
  Syscalls file = kSyscalls;
  int (*stat)(const char* path, struct stat* status) =
      [](const char* path, struct stat* status) -> int { return ::stat(path, status); };
};

// Two equal identities of one path: nobody wrote to the file in between, and it is the same file.
// ctime is part of it because mtime can be set back.
struct FileIdentity {
  uint64_t size = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  uint64_t ino = 0;
  uint64_t dev = 0;
  bool operator==(const FileIdentity&) const = default;
};

// Whether a file with this ctime may be changed again without a new one: the kernel's clock for
// files ticks every 1 to 10 ms, and some file systems (Lustre, NFS of old servers) keep whole
// seconds.
bool changed_just_now(int64_t ctime_ns);

// Bytes that lie in the page cache are copied from there in either case.
enum class ColdReads {
  kDirect,  // O_DIRECT where the file system has it: least CPU, the page cache stays as it is
  kFill,    // through the page cache, which keeps what fits for the next epoch
};

enum class FileTier { kNone, kPageCache, kSource };

struct WholeFile {
  int error = 0;  // errno; ESTALE: the file changed while it was read, or is not what was expected
  FileTier tier = FileTier::kNone;
};

// 0 and what the regular file at `path` is, or an errno: EISDIR, EINVAL (neither file nor folder).
int identify(const char* path, const FileCalls& calls, FileIdentity* identity);

// 0 if the open file is what `expected` says, ESTALE if it is not, or another errno.
int compare(int fd, const FileIdentity& expected, const Syscalls& sys);

// Bytes that `read_whole` needs at `dest`, which lies at a multiple of 4096.
inline uint64_t room_for(uint64_t size) { return (size + 4095) & ~uint64_t{4095}; }

// Reads the file that `expected` describes to `dest`. `direct_refused` is set to the device on
// which direct reads turned out to be impossible, and they are not tried there again.
WholeFile read_whole(const char* path, const FileIdentity& expected, std::byte* dest,
                     ColdReads cold, const FileCalls& calls, std::atomic<uint64_t>& direct_refused);

}  // namespace headrace::io
