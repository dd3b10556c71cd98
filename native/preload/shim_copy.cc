#include "preload/shim_copy.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "preload/shim_calls.h"

namespace headrace::preload::shim {
namespace {

// O_LARGEFILE is 0 for programs in 64 bits, but some say what the kernel calls so.
constexpr int kLargeFile = 0100000;
constexpr int kHarmless = O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW | kLargeFile;

int64_t nanoseconds(const timespec& t) { return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec; }

timespec timespec_of(int64_t ns) {
  int64_t seconds = ns / 1'000'000'000;
  if (ns % 1'000'000'000 < 0) --seconds;
  return {seconds, ns - seconds * 1'000'000'000};
}

// The original that this thread asked for last. A signal that mixes two up costs nothing: what is
// known of it is compared all the same.
struct Asked {
  int64_t device, inode, at_ns;
};
[[gnu::tls_model("initial-exec")]] constinit thread_local Asked t_asked{};
constexpr int64_t kAskedForNs = 10'000'000;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return nanoseconds(now);
}

// Whether the path leads to the file that was copied, and it has not changed since.
bool leads_there(const BoardFile& file, int folder, const char* path) {
  struct stat now;
  return ask(file, folder, path, &now) && is_unchanged(file, now);
}

// The daemon's descriptor, or the tier's file. O_NONBLOCK: should something else stand there, it
// must not hold us.
int open_place(const Plane& plane, const Named& named, const CopyPlace& place, int flags) {
  char path[512];
  if (place.copy == Copy::kMemory) {
    descriptor_path(path, plane.process, place.where);
  } else if (!plane.board.tier_path(named.file, place.where, path, sizeof path)) {
    return -1;
  }
  return kernel_open(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | (flags & O_CLOEXEC), 0);
}

bool is_the_copy(int fd, const BoardFile& file, const CopyPlace& place) {
  struct stat status;
  return kernel_fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         status.st_dev == place.device && status.st_ino == place.inode &&
         status.st_size == file.size;
}

}  // namespace

bool is_same_file(const BoardFile& file, const struct stat& now) {
  return static_cast<int64_t>(now.st_dev) == file.device &&
         static_cast<int64_t>(now.st_ino) == file.inode;
}

bool is_unchanged(const BoardFile& file, const struct stat& now) {
  return is_same_file(file, now) && now.st_size == file.size &&
         nanoseconds(now.st_mtim) == file.mtime_ns && nanoseconds(now.st_ctim) == file.ctime_ns;
}

bool ask(const BoardFile& file, int folder, const char* path, struct stat* now) {
  const int64_t at_ns = now_ns();
  if (kernel_fstatat(folder, path, now, 0) != 0) return false;
  t_asked = {file.device, file.inode, at_ns};
  return true;
}

bool ask_again(const BoardFile& file, const char* path, struct stat* now) {
  if (t_asked.device == file.device && t_asked.inode == file.inode &&
      now_ns() - t_asked.at_ns < kAskedForNs) {
    struct statx known;
    if (syscall(SYS_statx, AT_FDCWD, path, AT_STATX_DONT_SYNC, STATX_BASIC_STATS, &known) == 0) {
      const auto time = [](const statx_timestamp& t) { return timespec{t.tv_sec, t.tv_nsec}; };
      *now = {};
      now->st_dev = makedev(known.stx_dev_major, known.stx_dev_minor);
      now->st_ino = known.stx_ino;
      now->st_size = static_cast<off_t>(known.stx_size);
      now->st_mtim = time(known.stx_mtime);
      now->st_ctim = time(known.stx_ctime);
      if (is_unchanged(file, *now)) return true;
    }
  }
  return ask(file, AT_FDCWD, path, now);
}

bool is_plain_read(int flags) {
  return (flags & O_ACCMODE) == O_RDONLY && (flags & ~(O_ACCMODE | kHarmless)) == 0;
}

bool may_write(int flags) {
  return (flags & O_PATH) == 0 && ((flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0);
}

int open_copy(const Plane& plane, const Named& named, int folder, const char* path, int flags) {
  if (named.file < 0) return -1;
  const BoardFile& file = plane.board.file(named.file);
  if ((flags & O_NOFOLLOW) != 0 && (file.flags & kIsLink) != 0) return -1;
  const CopyPlace place = plane.board.place(named.file);
  if (place.copy == Copy::kNone) return -1;
  if (plane.ring != nullptr && ring_is_written(plane.ring, plane.ring_capacity, named.file)) {
    return -1;
  }
  const int saved_errno = errno;
  int fd = -1;
  if ((plane.immutable() && named.sure) || leads_there(file, folder, path)) {
    fd = open_place(plane, named, place, flags);
  }
  if (fd >= 0 &&
      (!is_the_copy(fd, file, place) || !plane.board.still(named.file, place.generation) ||
       ((flags & O_NONBLOCK) == 0 && fcntl(fd, F_SETFL, 0) != 0))) {
    kernel_close(fd);
    fd = -1;
  }
  plane.report(named.file, fd < 0 ? Opened::kRefused : Opened::kCopy);
  if (fd >= 0 && plane.ring != nullptr) {
    auto* ring = static_cast<RingHeader*>(plane.ring);
    ring->copy_bytes.fetch_add(static_cast<uint64_t>(file.size), std::memory_order_relaxed);
    if (place.copy == Copy::kTier) ring->tier_copies.fetch_add(1, std::memory_order_relaxed);
  }
  errno = saved_errno;
  return fd;
}

void opened_original(const Plane& plane, const Named& named, int fd, int flags) {
  if (!named.below_root || (flags & (O_DIRECTORY | O_PATH)) != 0) return;
  const int saved_errno = errno;
  if (may_write(flags)) {
    if (named.file >= 0) {
      if (plane.ring != nullptr) {
        ring_note_written(plane.ring, plane.ring_capacity, named.file);
      }
      plane.report(named.file, Opened::kWriting);
      errno = saved_errno;
    }
    return;
  }
  int64_t bytes = -1;
  if (named.file < 0 || simulating()) {
    struct stat status;
    if (kernel_fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
      errno = saved_errno;
      return;
    }
    bytes = status.st_size;
  }
  plane.report(named.file, named.file < 0 ? Opened::kUnknown : Opened::kOriginal);
  if (named.file >= 0 && plane.ring != nullptr) {
    static_cast<RingHeader*>(plane.ring)
        ->original_bytes.fetch_add(static_cast<uint64_t>(plane.board.file(named.file).size),
                                   std::memory_order_relaxed);
  }
  if (bytes >= 0) simulate_whole_file(static_cast<uint64_t>(bytes));
  errno = saved_errno;
}

void describe(const BoardFile& file, struct stat* status) {
  memset(status, 0, sizeof *status);
  status->st_dev = static_cast<dev_t>(file.device);
  status->st_ino = static_cast<ino_t>(file.inode);
  status->st_mode = file.mode;
  status->st_nlink = file.links;
  status->st_uid = file.uid;
  status->st_gid = file.gid;
  status->st_size = file.size;
  status->st_blksize = file.block_bytes;
  status->st_blocks = file.blocks;
  status->st_atim = timespec_of(file.atime_ns);
  status->st_mtim = timespec_of(file.mtime_ns);
  status->st_ctim = timespec_of(file.ctime_ns);
}

}  // namespace headrace::preload::shim
