// What programs do with an open descriptor that a copy cannot do for its original.
//
// A copy has the original's bytes as they were when it was opened. A lock on it would hold nobody
// off, what is set on it would be lost, it has no attributes, and what others append would never
// come. So these calls go to the original: by its path where they ask or set something once, and
// where the descriptor itself counts (locks, copies within the kernel, a file that grows) the
// original takes the copy's place.
#include "preload/shim_descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <atomic>

#include "preload/export.h"
#include "preload/shim_calls.h"
#include "preload/shim_copy.h"

namespace headrace::preload::shim {
namespace {

// Whether this process has locked parts of files. Such locks are the process's: closing any
// descriptor of a file lets go of all that it has there.
std::atomic<bool> g_has_locks{false};

long kernel_fcntl(int fd, int command, long argument) {
  return syscall(SYS_fcntl, fd, command, argument);
}

// At the end of a file: whether there is more by now.
bool goes_on(int fd) {
  const Held plane;
  if (!plane || plane->immutable()) return false;
  const Original original(*plane, fd);
  return original && original.changed() && original.take_place();
}

bool take_place(int fd) {
  const Held plane;
  if (!plane) return false;
  const Original original(*plane, fd);
  return original && original.take_place();
}

// `by_path` of the original's path where the descriptor is of a copy, else `itself`.
template <class ByPath, class Itself>
auto of_original(int fd, ByPath by_path, Itself itself) {
  const Held plane;
  if (plane) {
    const Original original(*plane, fd);
    if (original) return by_path(original.path());
  }
  return itself();
}

// A shared lock of a whole file (HDF5 holds one while it reads) is asked for at the original, so
// that it waits for a writer or is refused as ever. Whoever has it needs no more: nobody changes a
// copy. False: refused.
bool share(int fd, int operation) {
  const Held plane;
  if (!plane || !Original(*plane, fd)) return true;
  const int original =
      kernel_open(AT_FDCWD, Original(*plane, fd).path(), O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
  if (original < 0) return true;
  const bool shared = calls().flock(original, operation) == 0;
  const int saved_errno = errno;
  kernel_close(original);
  if (shared) {  // whoever had it before may have written
    const Original now(*plane, fd);
    if (now && now.changed()) now.take_place();
  }
  errno = saved_errno;
  return shared;
}

int lock(int fd, int operation) {
  if ((operation & LOCK_EX) != 0) take_place(fd);
  if ((operation & LOCK_SH) != 0 && !share(fd, operation)) return -1;
  return calls().flock(fd, operation);
}

int control(int fd, int command, void* argument) {
  switch (command) {
    case F_SETLK:
    case F_SETLKW:
      g_has_locks.store(true, std::memory_order_relaxed);
      [[fallthrough]];
    case F_GETLK:
    case F_OFD_GETLK:
    case F_OFD_SETLK:
    case F_OFD_SETLKW:
    case F_SETLEASE:
    case F_GETLEASE:
      take_place(fd);
      break;
    default:
      break;
  }
  return calls().fcntl(fd, command, argument);
}

int lock_part(int fd, int command, off_t bytes) {
  g_has_locks.store(true, std::memory_order_relaxed);
  take_place(fd);
  return calls().lockf(fd, command, bytes);
}

int sync_with(int (*call)(int), int fd) {
  take_place(fd);
  return call(fd);
}

// Tried with the copy first: of other requests than those of file systems nothing need be known.
int request_of(int fd, unsigned long request, void* argument) {
  const int result = calls().ioctl(fd, request, argument);
  const auto type = _IOC_TYPE(request);
  if (result != -1 || (type != 'f' && type != 'X' && type != _IOC_TYPE(FICLONE))) return result;
  const int saved_errno = errno;
  int of = fd;
  if (request == FICLONE) of = static_cast<int>(reinterpret_cast<intptr_t>(argument));
  if (request == FICLONERANGE && argument != nullptr) {
    of = static_cast<int>(static_cast<file_clone_range*>(argument)->src_fd);
  }
  if (take_place(of)) return calls().ioctl(fd, request, argument);
  errno = saved_errno;
  return result;
}

}  // namespace

Original::Original(const Plane& plane, int fd) : fd_(fd) {
  const int saved_errno = errno;
  if (plane.board.has_copies() && kernel_fstat(fd, &now_) == 0 &&
      plane.board.has_device(now_.st_dev)) {
    const int64_t number = plane.board.find_copy(now_.st_dev, now_.st_ino);
    uint32_t bytes = 0;
    const char* name = number < 0 ? nullptr : plane.board.name(number, &bytes);
    if (name != nullptr && bytes <= kShimPathBytesMax) {
      memcpy(path_, name, bytes);
      path_[bytes] = '\0';
      const BoardFile& file = plane.board.file(number);
      if (kernel_fstatat(AT_FDCWD, path_, &now_, 0) == 0 && is_same_file(file, now_)) file_ = &file;
    }
  }
  errno = saved_errno;
}

bool Original::changed() const { return !is_unchanged(*file_, now_); }

bool Original::take_place() const {
  const int saved_errno = errno;
  const int original =
      kernel_open(AT_FDCWD, path_, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
  bool placed = false;
  if (original >= 0) {
    struct stat status;
    const long flags = kernel_fcntl(fd_, F_GETFL, 0);
    const long of_fd = kernel_fcntl(fd_, F_GETFD, 0);
    const off_t at = lseek(fd_, 0, SEEK_CUR);
    placed = kernel_fstat(original, &status) == 0 && is_same_file(*file_, status) && flags >= 0 &&
             of_fd >= 0 && lseek(original, at, SEEK_SET) == at &&
             kernel_fcntl(original, F_SETFL, flags & O_NONBLOCK) == 0 &&
             syscall(SYS_dup3, original, fd_, (of_fd & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0) == fd_;
    if (!placed || !g_has_locks.load(std::memory_order_relaxed)) kernel_close(original);
  }
  errno = saved_errno;
  return placed;
}

bool follow(const Plane& plane, const BoardFile& file, int fd) {
  if (plane.immutable() || (file.size != 0 && lseek(fd, 0, SEEK_CUR) <= 0)) return false;
  return goes_on(fd);
}

}  // namespace headrace::preload::shim

namespace shim = headrace::preload::shim;

HEADRACE_EXPORT(ssize_t, read, int fd, void* buffer, size_t bytes) {
  const auto call = shim::calls().read;
  const ssize_t done = call(fd, buffer, bytes);
  return done == 0 && bytes != 0 && shim::goes_on(fd) ? call(fd, buffer, bytes) : done;
}

HEADRACE_EXPORT(int, flock, int fd, int operation) { return shim::lock(fd, operation); }

#define HEADRACE_FCNTL(symbol)                             \
  HEADRACE_EXPORT(int, symbol, int fd, int command, ...) { \
    va_list arguments;                                     \
    va_start(arguments, command);                          \
    void* argument = va_arg(arguments, void*);             \
    va_end(arguments);                                     \
    return shim::control(fd, command, argument);           \
  }
HEADRACE_FCNTL(fcntl)
HEADRACE_FCNTL(fcntl64)

#define HEADRACE_LOCKF(symbol)                                     \
  HEADRACE_EXPORT(int, symbol, int fd, int command, off_t bytes) { \
    return shim::lock_part(fd, command, bytes);                    \
  }
HEADRACE_LOCKF(lockf)
HEADRACE_LOCKF(lockf64)

HEADRACE_EXPORT(int, ioctl, int fd, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  return shim::request_of(fd, request, argument);
}

HEADRACE_EXPORT(ssize_t, copy_file_range, int from, off_t* from_at, int to, off_t* to_at,
                size_t bytes, unsigned flags) {
  const auto call = shim::calls().copy_file_range;
  const ssize_t copied = call(from, from_at, to, to_at, bytes, flags);
  // Not between a copy's file system and another.
  if (copied != -1 || errno != EXDEV || !shim::take_place(from)) return copied;
  return call(from, from_at, to, to_at, bytes, flags);
}

// What a program has written by another descriptor may still be in memory.
HEADRACE_EXPORT(int, fsync, int fd) { return shim::sync_with(shim::calls().fsync, fd); }
HEADRACE_EXPORT(int, fdatasync, int fd) { return shim::sync_with(shim::calls().fdatasync, fd); }
HEADRACE_EXPORT(int, syncfs, int fd) { return shim::sync_with(shim::calls().syncfs, fd); }

// Those that may be asked by a path: SYMBOL(fd, …) is BY_PATH(path, …).
#define HEADRACE_BY_PATH(result, symbol, parameters, arguments, by_path)                  \
  HEADRACE_EXPORT(result, symbol, int fd, HEADRACE_UNPACK parameters) {                   \
    return shim::of_original(                                                             \
        fd, [&](const char* path) -> result { return by_path; },                          \
        [&]() -> result { return shim::calls().symbol(fd, HEADRACE_UNPACK arguments); }); \
  }
#define HEADRACE_UNPACK(...) __VA_ARGS__

HEADRACE_BY_PATH(ssize_t, fgetxattr, (const char* name, void* value, size_t bytes),
                 (name, value, bytes), getxattr(path, name, value, bytes))
HEADRACE_BY_PATH(ssize_t, flistxattr, (char* names, size_t bytes), (names, bytes),
                 listxattr(path, names, bytes))
HEADRACE_BY_PATH(int, fsetxattr, (const char* name, const void* value, size_t bytes, int flags),
                 (name, value, bytes, flags), setxattr(path, name, value, bytes, flags))
HEADRACE_BY_PATH(int, fremovexattr, (const char* name), (name), removexattr(path, name))
HEADRACE_BY_PATH(int, fchmod, (mode_t mode), (mode), chmod(path, mode))
HEADRACE_BY_PATH(int, fchown, (uid_t user, gid_t group), (user, group), chown(path, user, group))
HEADRACE_BY_PATH(int, futimens, (const timespec times[2]), (times),
                 utimensat(AT_FDCWD, path, times, 0))
HEADRACE_BY_PATH(int, futimes, (const timeval times[2]), (times), utimes(path, times))
HEADRACE_BY_PATH(int, fstatfs, (struct statfs * status), (status), statfs(path, status))
HEADRACE_BY_PATH(int, fstatvfs, (struct statvfs * status), (status), statvfs(path, status))
// One layout on 64-bit machines.
HEADRACE_EXPORT(int, fstatfs64, int fd, struct statfs* status) { return shim_fstatfs(fd, status); }
HEADRACE_EXPORT(int, fstatvfs64, int fd, struct statvfs* status) {
  return shim_fstatvfs(fd, status);
}

HEADRACE_EXPORT(int, chroot, const char* path) {
  const int result = shim::calls().chroot(path);
  if (result == 0) shim::look_elsewhere();
  return result;
}
