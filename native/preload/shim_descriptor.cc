// What programs do with an open descriptor that a copy cannot do for its original.
//
// A copy has the original's bytes as they were when it was opened. A lock on it would hold nobody
// off, what is set on it would be lost, it has no attributes, and what others append would never
// come. So these calls go to the original: by its path where they ask something once, and where the
// descriptor itself counts (locks, what is set, copies within the kernel, holes, a file that grows)
// the original takes the copy's place.
#include "preload/shim_descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/kcmp.h>
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

// The copy that is open here.
OpenCopy copy_at(int fd) {
  struct stat status {};
  const int saved_errno = errno;
  if (!OpenCopy::possible() || kernel_fstat(fd, &status) != 0) status = {};
  errno = saved_errno;
  return {status.st_dev, status.st_ino};
}

// At the end of a file: whether there is more by now.
bool goes_on(int fd) {
  const OpenCopy copy = copy_at(fd);
  if (!copy || copy->immutable()) return false;
  const Original original(copy, true);
  return original && original.changed() && original.take_place(fd);
}

// What must not be done to a copy is done to its original, which takes the copy's place. False: the
// descriptor is a copy's all the same.
bool take_place(int fd) {
  const OpenCopy copy = copy_at(fd);
  if (!copy) return true;
  const Original original(copy);
  return original && original.take_place(fd);
}

// The same, and errno says that it cannot be: nothing that a program asks for is lost in silence.
bool must_take_place(int fd, int error) {
  if (take_place(fd)) return true;
  errno = error;
  return false;
}

// `by_path` of the original's path where the descriptor is of a copy, else `itself`.
template <class ByPath, class Itself>
auto of_original(int fd, ByPath by_path, Itself itself) {
  if (const OpenCopy copy = copy_at(fd)) {
    const Original original(copy);
    if (original) return by_path(original.path());
  }
  return itself();
}

// A shared lock of a whole file (HDF5 holds one while it reads) is asked for at the original, so
// that it waits for a writer or is refused as ever. Whoever has it needs no more: nobody changes a
// copy. False: refused.
bool share(int fd, int operation) {
  const OpenCopy copy = copy_at(fd);
  if (!copy) return true;
  const Original before(copy);
  if (!before) return true;
  const int original = kernel_open(AT_FDCWD, before.path(), O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
  if (original < 0) return true;
  const bool shared = calls().flock(original, operation) == 0;
  const int saved_errno = errno;
  kernel_close(original);
  if (shared) {  // whoever had it before may have written
    const Original now(copy);
    if (now && now.changed()) now.take_place(fd);
  }
  errno = saved_errno;
  return shared;
}

// A lock of the whole file is the open file's, whichever processes have it. What a parent has open
// too, a shell that redirects say, stays a copy there, and a lock would end with this process.
bool is_the_parents_too(int fd) {
  const int saved_errno = errno;
  const bool same = copy_at(fd) && syscall(SYS_kcmp, getpid(), getppid(), KCMP_FILE, fd, fd) == 0;
  errno = saved_errno;
  return same;
}

int lock(int fd, int operation) {
  if ((operation & LOCK_EX) != 0) {
    if (is_the_parents_too(fd)) {
      errno = ENOLCK;
      return -1;
    }
    if (!must_take_place(fd, ENOLCK)) return -1;
  }
  if ((operation & LOCK_SH) != 0 && !share(fd, operation)) return -1;
  return calls().flock(fd, operation);
}

// What lets go of a lock, or asks for one, is done to a copy where it must: it has none.
bool takes_lock(int command, void* argument) {
  switch (command) {
    case F_SETLK:
    case F_SETLKW:
    case F_OFD_SETLK:
    case F_OFD_SETLKW:
      return argument == nullptr || static_cast<struct flock*>(argument)->l_type != F_UNLCK;
    case F_SETLEASE:
      return reinterpret_cast<intptr_t>(argument) != F_UNLCK;
    default:
      return false;
  }
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
      if (!take_place(fd) && takes_lock(command, argument)) {
        errno = ENOLCK;
        return -1;
      }
      break;
    default:
      break;
  }
  return calls().fcntl(fd, command, argument);
}

int lock_part(int fd, int command, off_t bytes) {
  g_has_locks.store(true, std::memory_order_relaxed);
  if (!take_place(fd) && (command == F_LOCK || command == F_TLOCK)) {
    errno = ENOLCK;
    return -1;
  }
  return calls().lockf(fd, command, bytes);
}

int sync_with(int (*call)(int), int fd) {
  take_place(fd);
  return call(fd);
}

// Flags, versions, extents, clones: a copy has others. Requests of other kinds need no look; those
// that only ask are answered by the copy where the original cannot be asked.
int request_of(int fd, unsigned long request, void* argument) {
  const auto type = _IOC_TYPE(request);
  const bool of_files = type == _IOC_TYPE(FIBMAP) || type == 'f' || type == 'v' || type == 'X' ||
                        type == _IOC_TYPE(FICLONE);
  const bool asks = _IOC_DIR(request) == _IOC_READ || type == _IOC_TYPE(FIBMAP);
  if (of_files && !take_place(fd) && !asks) {
    errno = ESTALE;
    return -1;
  }
  if (request == FICLONE) take_place(static_cast<int>(reinterpret_cast<intptr_t>(argument)));
  if (request == FICLONERANGE && argument != nullptr) {
    take_place(static_cast<int>(static_cast<file_clone_range*>(argument)->src_fd));
  }
  return calls().ioctl(fd, request, argument);
}

// A copy has no holes, and ends where the original did.
off_t seek(int fd, off_t offset, int whence) {
  if (whence == SEEK_DATA || whence == SEEK_HOLE) take_place(fd);
  if (whence == SEEK_END) goes_on(fd);
  return calls().lseek(fd, offset, whence);
}

// `call` reads; at the end of a copy whose original goes on, once more.
template <class Call>
ssize_t read_on(int fd, size_t bytes, Call call) {
  const ssize_t done = call();
  return done == 0 && bytes != 0 && goes_on(fd) ? call() : done;
}

}  // namespace

Original::Original(const OpenCopy& copy, bool again) : copy_(copy) {
  const int saved_errno = errno;
  uint32_t bytes = 0;
  const char* name = copy.name(&bytes);
  if (name != nullptr && bytes <= kShimPathBytesMax) {
    memcpy(path_, name, bytes);
    path_[bytes] = '\0';
    there_ =
        (again ? ask_again(copy.file(), path_, &now_) : ask(copy.file(), AT_FDCWD, path_, &now_)) &&
        is_same_file(copy.file(), now_);
  }
  errno = saved_errno;
}

bool Original::changed() const { return !is_unchanged(copy_.file(), now_); }

bool Original::take_place(int fd) const {
  const int saved_errno = errno;
  const int original =
      kernel_open(AT_FDCWD, path_, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
  bool placed = false;
  if (original >= 0) {
    struct stat status;
    const long flags = kernel_fcntl(fd, F_GETFL, 0);
    const long of_fd = kernel_fcntl(fd, F_GETFD, 0);
    const long at = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    placed = kernel_fstat(original, &status) == 0 && is_same_file(copy_.file(), status) &&
             flags >= 0 && of_fd >= 0 && syscall(SYS_lseek, original, at, SEEK_SET) == at &&
             kernel_fcntl(original, F_SETFL, flags & O_NONBLOCK) == 0 &&
             syscall(SYS_dup3, original, fd, (of_fd & FD_CLOEXEC) != 0 ? O_CLOEXEC : 0) == fd;
    if (!placed || !g_has_locks.load(std::memory_order_relaxed)) kernel_close(original);
  }
  errno = saved_errno;
  return placed;
}

}  // namespace headrace::preload::shim

namespace shim = headrace::preload::shim;

HEADRACE_EXPORT(ssize_t, read, int fd, void* buffer, size_t bytes) {
  return shim::read_on(fd, bytes, [&] { return shim::calls().read(fd, buffer, bytes); });
}
#define HEADRACE_PREAD(symbol)                                                                   \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, void* buffer, size_t bytes, off_t at) {               \
    return shim::read_on(fd, bytes, [&] { return shim::calls().pread(fd, buffer, bytes, at); }); \
  }
HEADRACE_PREAD(pread)
HEADRACE_PREAD(pread64)

#define HEADRACE_LSEEK(symbol)                                       \
  HEADRACE_EXPORT(off_t, symbol, int fd, off_t offset, int whence) { \
    return shim::seek(fd, offset, whence);                           \
  }
HEADRACE_LSEEK(lseek)
HEADRACE_LSEEK(lseek64)

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
  if (copied != -1 || errno != EXDEV || !shim::copy_at(from)) return copied;
  if (!shim::must_take_place(from, EXDEV)) return copied;
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
HEADRACE_BY_PATH(int, fstatfs, (struct statfs * status), (status), statfs(path, status))
HEADRACE_BY_PATH(int, fstatvfs, (struct statvfs * status), (status), statvfs(path, status))
// One layout on 64-bit machines.
HEADRACE_EXPORT(int, fstatfs64, int fd, struct statfs* status) { return shim_fstatfs(fd, status); }
HEADRACE_EXPORT(int, fstatvfs64, int fd, struct statvfs* status) {
  return shim_fstatvfs(fd, status);
}

// What they set is seen by whoever looks at the descriptor afterwards.
#define HEADRACE_SETS(symbol, parameters, arguments)                 \
  HEADRACE_EXPORT(int, symbol, int fd, HEADRACE_UNPACK parameters) { \
    if (!shim::must_take_place(fd, ESTALE)) return -1;               \
    return shim::calls().symbol(fd, HEADRACE_UNPACK arguments);      \
  }
HEADRACE_SETS(fsetxattr, (const char* name, const void* value, size_t bytes, int flags),
              (name, value, bytes, flags))
HEADRACE_SETS(fremovexattr, (const char* name), (name))
HEADRACE_SETS(fchmod, (mode_t mode), (mode))
HEADRACE_SETS(fchown, (uid_t user, gid_t group), (user, group))
HEADRACE_SETS(futimens, (const timespec times[2]), (times))
HEADRACE_SETS(futimes, (const timeval times[2]), (times))

HEADRACE_EXPORT(int, chroot, const char* path) {
  const int result = shim::calls().chroot(path);
  if (result == 0) shim::look_elsewhere();
  return result;
}
