// Blocking reads: one read performed to its end by the calling thread.
//
// What the threads engine's threads do, and what io_uring's engine does when its ring breaks.
#pragma once

#include <condition_variable>
#include <mutex>

#include "io/engine.h"
#include "io/syscalls.h"

namespace headrace::io {

// Counts the files that an engine holds open, so that its own concurrency never makes an open
// fail. Safe for concurrent callers.
class OpenFiles {
 public:
  // Waits until fewer than `files_max` places are taken, then takes one.
  void acquire(unsigned files_max);
  void release();
  // The holder of a place has opened its file, or closed it.
  void opened();
  void closed();
  // An open was refused for want of descriptors: returns true when one of our files was closed, or
  // still will be; false after a while in which none was open and others must hold them.
  bool wait_for_close();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned places_taken_ = 0;
  unsigned open_ = 0;
  uint64_t closed_ = 0;
};

// Performs `read` as engine.h describes, and sets `error` and `done`. `files_max`: see
// `open_files_max`.
void read_blocking(Read& read, const Syscalls& sys, OpenFiles& files, unsigned files_max);

// The same for `length` bytes of an open file from `offset` on.
Read read_blocking(int fd, uint64_t offset, uint64_t length, std::byte* dest, const Syscalls& sys);

}  // namespace headrace::io
