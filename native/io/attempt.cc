#include "io/attempt.h"

#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/resource.h>

#include <algorithm>

namespace headrace::io {
namespace {

// The largest alignment that a disk asks for; every smaller one divides it.
constexpr size_t kDirectAlignment = 4096;

// Programs keep libraries, sockets and data files of their own open.
constexpr rlim_t kFilesForTheProgram = 32;

bool is_direct(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0;
}

bool is_end_of_file(int fd, uint64_t position, const Syscalls& sys) {
  struct stat status;
  if (sys.fstat(fd, &status) != 0) return false;
  uint64_t size = static_cast<uint64_t>(status.st_size);
  if (S_ISBLK(status.st_mode) && ::ioctl(fd, BLKGETSIZE64, &size) != 0) return false;
  return position >= size;
}

}  // namespace

Next Attempt::fail(int error) {
  read->error = error;
  read->done = reached;
  return Next::kFinished;
}

Next Attempt::advance(int64_t result, const Syscalls& sys) {
  if (result < 0) {
    const int error = static_cast<int>(-result);
    if (is_transient(error) && ++retries <= kRetriesMax) return Next::kAgain;
    return fail(error);
  }
  if (result == 0) return fail(0);  // end of file
  const size_t end = from + static_cast<size_t>(result);
  if (end <= reached) {  // restarted at a boundary, and cut short at the same place
    if (is_end_of_file(fd, read->offset + reached, sys)) return fail(0);
    return ++retries <= kRetriesMax ? Next::kAgain : fail(EIO);
  }
  reached = end;
  retries = 0;
  if (reached == read->length) return fail(0);

  from = reached;
  if (!is_direct(fd)) return Next::kAgain;
  // A direct read that ends off a block boundary has met the end of the file, or (on file systems
  // that fall back to the page cache) was cut short. Going on from an odd offset would be EINVAL:
  // restart at a boundary.
  if (reached % kDirectAlignment != 0) {
    if (is_end_of_file(fd, read->offset + reached, sys)) return fail(0);
    from = reached - reached % kDirectAlignment;
  }
  return Next::kAgain;
}

int check_file(int fd, const FileCheck& check, const Syscalls& sys) {
  struct stat status;
  if (sys.fstat(fd, &status) != 0) return errno;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (!S_ISREG(status.st_mode)) return EINVAL;
  if (static_cast<uint64_t>(status.st_size) != check.size_bytes) return ESTALE;
  const int64_t mtime_ns = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  if (check.mtime_ns != -1 && mtime_ns != check.mtime_ns) return ESTALE;
  return 0;
}

unsigned open_files_max(unsigned wanted) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1;
  if (limit.rlim_cur == RLIM_INFINITY) return std::max(wanted, 1u);
  if (limit.rlim_cur <= kFilesForTheProgram) return 1;
  const rlim_t share = std::max<rlim_t>((limit.rlim_cur - kFilesForTheProgram) / 2, 1);
  return static_cast<unsigned>(std::clamp<rlim_t>(wanted, 1, share));
}

}  // namespace headrace::io
