#include "io/blocking.h"

#include <chrono>
#include <thread>

#include "io/attempt.h"
#include "io/residency.h"

namespace headrace::io {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// EINTR is tried again at once; EAGAIN gives the file system 10 us, doubling to 10 ms.
void pause_before_retry(int error, unsigned retries) {
  if (error == EINTR) return;
  const unsigned doublings = retries < 10 ? retries : 10;
  std::this_thread::sleep_for(microseconds(10u << doublings));
}

void read_all(Attempt attempt, const Syscalls& sys) {
  for (;;) {
    const iovec part = {attempt.dest(), attempt.bytes()};
    const ssize_t count = sys.preadv(attempt.fd, &part, 1, static_cast<off_t>(attempt.offset()));
    const int error = count < 0 ? errno : 0;
    if (attempt.advance(count < 0 ? -error : count, sys) == Next::kFinished) return;
    if (error != 0) pause_before_retry(error, attempt.retries);
  }
}

// A descriptor, or -errno.
int open_checked(const Read& read, const Syscalls& sys, OpenFiles& files) {
  unsigned retries = 0;
  unsigned waits = 0;
  for (;;) {
    const int fd = sys.openat(read.fd, read.path, kOpenFlags);
    if (fd >= 0) {
      const int error = check_file(fd, read.check, sys);
      if (error == 0) return fd;
      sys.close(fd);
      return -error;
    }
    const int error = errno;
    if (is_out_of_files(error)) {
      if (!files.wait_for_close() && ++waits > kFileWaitsMax) return -error;
    } else if (is_transient(error) && ++retries <= kRetriesMax) {
      pause_before_retry(error, retries);
    } else {
      return -error;
    }
  }
}

void read_path(Read& read, const Syscalls& sys, OpenFiles& files) {
  const auto begun = InFlight::Clock::now();
  const int fd = open_checked(read, sys, files);
  read.open_ns = (InFlight::Clock::now() - begun) / std::chrono::nanoseconds(1);
  if (fd < 0) {
    read.error = -fd;
    return;
  }
  files.opened();
  read.resident = read.length > 0 && resident(fd, read.offset, read.length);
  if (read.length > 0) read_all(Attempt{.read = &read, .fd = fd}, sys);
  sys.close(fd);
  files.closed();
}

}  // namespace

void OpenFiles::acquire(unsigned files_max) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return places_taken_ < files_max; });
  ++places_taken_;
}

void OpenFiles::release() {
  {
    std::lock_guard lock(mutex_);
    --places_taken_;
  }
  changed_.notify_all();
}

void OpenFiles::opened() {
  std::lock_guard lock(mutex_);
  ++open_;
}

void OpenFiles::closed() {
  {
    std::lock_guard lock(mutex_);
    --open_;
    ++closed_;
  }
  changed_.notify_all();
}

bool OpenFiles::wait_for_close() {
  std::unique_lock lock(mutex_);
  const uint64_t seen = closed_;
  // Timed even while one of ours is open: it may have been closed between the refusal and here.
  changed_.wait_for(lock, milliseconds(kFileWaitMs), [&] { return closed_ != seen; });
  return closed_ != seen || open_ > 0;
}

void read_blocking(Read& read, const Syscalls& sys, OpenFiles& files, unsigned files_max) {
  read.error = 0;
  read.done = 0;
  if (read.path != nullptr) {
    files.acquire(files_max);
    read_path(read, sys, files);
    files.release();
  } else if (read.length > 0) {
    read_all(Attempt{.read = &read, .fd = read.fd}, sys);
  }
}

Read read_blocking(int fd, uint64_t offset, uint64_t length, std::byte* dest, const Syscalls& sys) {
  Read read;
  read.fd = fd;
  read.offset = offset;
  read.length = length;
  read.dest = dest;
  if (length > 0) read_all(Attempt{.read = &read, .fd = fd}, sys);
  return read;
}

}  // namespace headrace::io
