// The system calls that blocking reads are made of, as a table.
//
// Tests hand an engine a table that fails on the nth call; everything else uses `kSyscalls`. Each
// entry behaves as the call of its name: -1 and errno on failure.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace headrace::io {

struct Syscalls {
  ssize_t (*preadv)(int fd, const iovec* parts, int count, off_t offset);
  int (*openat)(int directory, const char* path, int flags);
  int (*fstat)(int fd, struct stat* status);
  int (*close)(int fd);
};

inline constexpr Syscalls kSyscalls = {
    .preadv = [](int fd, const iovec* parts, int count, off_t offset) -> ssize_t {
      return ::preadv(fd, parts, count, offset);
    },
    .openat = [](int directory, const char* path, int flags) -> int {
      return ::openat(directory, path, flags);
    },
    .fstat = [](int fd, struct stat* status) -> int { return ::fstat(fd, status); },
    .close = [](int fd) -> int { return ::close(fd); },
};

// A FIFO must not hang the open, and a child process must not inherit the file.
inline constexpr int kOpenFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

}  // namespace headrace::io
