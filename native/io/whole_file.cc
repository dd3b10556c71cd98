#include "io/whole_file.h"

#include <time.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "io/attempt.h"
#include "io/blocking.h"
#include "io/residency.h"

namespace headrace::io {
namespace {

// An open that is refused for want of descriptors is tried again for so long: 50 x 1 ms.
constexpr unsigned kOpenTriesMax = 50;

FileIdentity identity_of(const struct stat& status) {
  const auto ns = [](const timespec& t) {
    return int64_t{t.tv_sec} * 1'000'000'000 + int64_t{t.tv_nsec};
  };
  return {.size = static_cast<uint64_t>(status.st_size),
          .mtime_ns = ns(status.st_mtim),
          .ctime_ns = ns(status.st_ctim),
          .ino = status.st_ino,
          .dev = status.st_dev};
}

int kind_error(const struct stat& status) {
  if (S_ISDIR(status.st_mode)) return EISDIR;
  return S_ISREG(status.st_mode) ? 0 : EINVAL;
}

// A descriptor, or -errno.
int open_file(const char* path, const Syscalls& sys) {
  for (unsigned tries = 0;;) {
    const int fd = sys.openat(AT_FDCWD, path, kOpenFlags);
    if (fd >= 0) return fd;
    const int error = errno;
    // EAGAIN is a lease that another process must give up first: not a matter of milliseconds.
    if (error != EINTR && !is_out_of_files(error)) return -error;
    if (++tries > kOpenTriesMax) return -error;
    if (error != EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool set_direct(int fd, bool on) {
  return fcntl(fd, F_SETFL, on ? O_NONBLOCK | O_DIRECT : O_NONBLOCK) == 0;  // as it was opened
}

// The bytes of an open file of `size` bytes. A file that has fewer is ESTALE.
WholeFile read_open(int fd, const FileIdentity& file, std::byte* dest, ColdReads cold,
                    const Syscalls& sys, std::atomic<uint64_t>& direct_refused) {
  WholeFile whole{.tier = resident(fd, 0, file.size) ? FileTier::kPageCache : FileTier::kSource};
  bool direct = whole.tier == FileTier::kSource && cold == ColdReads::kDirect &&
                direct_refused.load(std::memory_order_relaxed) != file.dev;
  if (direct && !set_direct(fd, true)) {
    direct_refused.store(file.dev, std::memory_order_relaxed);
    direct = false;
  }
  if (whole.tier == FileTier::kSource && !direct) {
    posix_fadvise(fd, 0, static_cast<off_t>(file.size), POSIX_FADV_WILLNEED);
  }
  Read read = read_blocking(fd, 0, direct ? room_for(file.size) : file.size, dest, sys);
  if (direct && read.error == EINVAL) {
    direct_refused.store(file.dev, std::memory_order_relaxed);
    set_direct(fd, false);
    read = read_blocking(fd, 0, file.size, dest, sys);
  }
  whole.error = read.error != 0 ? read.error : read.done == file.size ? 0 : ESTALE;
  return whole;
}

// Files of /proc say that they are empty, and are not.
int check_empty(int fd, const Syscalls& sys) {
  std::byte byte;
  const Read read = read_blocking(fd, 0, 1, &byte, sys);
  return read.error != 0 ? read.error : read.done == 0 ? 0 : ESTALE;
}

}  // namespace

bool changed_just_now(int64_t ctime_ns) {
  constexpr int64_t kSecondNs = 1'000'000'000, kTickNs = 20'000'000;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const int64_t tick_ns = ctime_ns % kSecondNs == 0 ? kSecondNs + kTickNs : kTickNs;
  return ctime_ns > int64_t{now.tv_sec} * kSecondNs + now.tv_nsec - tick_ns;
}

int identify(const char* path, const FileCalls& calls, FileIdentity* identity) {
  struct stat status;
  if (calls.stat(path, &status) != 0) return errno;
  *identity = identity_of(status);
  return kind_error(status);
}

int compare(int fd, const FileIdentity& expected, const Syscalls& sys) {
  struct stat status;
  if (sys.fstat(fd, &status) != 0) return errno;
  if (const int error = kind_error(status); error != 0) return error;
  return identity_of(status) == expected ? 0 : ESTALE;
}

WholeFile read_whole(const char* path, const FileIdentity& expected, std::byte* dest,
                     ColdReads cold, const FileCalls& calls,
                     std::atomic<uint64_t>& direct_refused) {
  const int fd = open_file(path, calls.file);
  if (fd < 0) return {.error = -fd};
  WholeFile whole{.error = compare(fd, expected, calls.file)};
  if (whole.error == 0) {
    if (expected.size == 0) {
      whole = {.error = check_empty(fd, calls.file), .tier = FileTier::kPageCache};
    } else {
      whole = read_open(fd, expected, dest, cold, calls.file, direct_refused);
    }
  }
  if (whole.error == 0) whole.error = compare(fd, expected, calls.file);
  if (whole.error == 0 && changed_just_now(expected.ctime_ns)) whole.error = ESTALE;
  calls.file.close(fd);
  return whole;
}

}  // namespace headrace::io
