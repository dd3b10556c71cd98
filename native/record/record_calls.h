// The C library's own functions behind those that recording adds to the shim's: reads, writes,
// waits.
#pragma once

#include <poll.h>
#include <stdio.h>
#include <sys/select.h>
#include <sys/types.h>
#include <sys/uio.h>

namespace headrace::record {

struct RecordCalls {
  ssize_t (*read)(int, void*, size_t);
  ssize_t (*pread)(int, void*, size_t, off_t);
  ssize_t (*readv)(int, const iovec*, int);
  ssize_t (*preadv)(int, const iovec*, int, off_t);
  ssize_t (*preadv2)(int, const iovec*, int, off_t, int);
  ssize_t (*write)(int, const void*, size_t);
  ssize_t (*pwrite)(int, const void*, size_t, off_t);
  ssize_t (*writev)(int, const iovec*, int);
  ssize_t (*pwritev)(int, const iovec*, int, off_t);
  ssize_t (*pwritev2)(int, const iovec*, int, off_t, int);
  off_t (*lseek)(int, off_t, int);
  int (*close)(int);
  int (*close_range)(unsigned, unsigned, int);
  void (*closefrom)(int);
  int (*dup2)(int, int);
  int (*dup3)(int, int, int);
  void* (*mmap)(void*, size_t, int, int, int, off_t);
  int (*fsync)(int);
  int (*fdatasync)(int);
  int (*poll)(pollfd*, nfds_t, int);
  int (*select)(int, fd_set*, fd_set*, fd_set*, timeval*);
  size_t (*fread)(void*, size_t, size_t, FILE*);
  size_t (*fread_unlocked)(void*, size_t, size_t, FILE*);
  size_t (*fwrite)(const void*, size_t, size_t, FILE*);
  size_t (*fwrite_unlocked)(const void*, size_t, size_t, FILE*);
  int (*fclose)(FILE*);
};

// All of them. `close_range` and what else an older library lacks is null.
const RecordCalls& originals();

}  // namespace headrace::record
