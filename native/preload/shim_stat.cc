// The stat and access families, under all of their names.
//
// A copy is described as its original. Where the user has said that nothing changes, what is on the
// board is described without asking the file system at all.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "preload/export.h"
#include "preload/shim_calls.h"
#include "preload/shim_copy.h"
#include "preload/shim_descriptor.h"

static_assert(sizeof(struct stat) == sizeof(struct stat64), "one layout on 64-bit machines");

namespace {

namespace shim = headrace::preload::shim;
using headrace::preload::BoardFile;
using headrace::preload::kIsLink;
using headrace::preload::RingHeader;

// What is open under a descriptor, or at an empty path behind it: -1 for what a path names.
int descriptor_of(int folder, const char* path, int flags) {
  return path != nullptr && path[0] == '\0' && (flags & AT_EMPTY_PATH) != 0 ? folder : -1;
}

// Whether the original has changed and stands in the place of its copy `fd` now: who looks at an
// open file waits for what others append.
bool follows(const shim::OpenCopy& copy, int fd) {
  if (fd < 0 || copy->immutable()) return false;
  const shim::Original original(copy, true);
  return original && original.changed() && original.take_place(fd);
}

// `look`, and what it has said of a copy becomes what it would have said of the original.
template <class Look>
int restored(int fd, struct stat* status, Look look) {
  const int result = look();
  if (result != 0) return result;
  const shim::OpenCopy copy(status->st_dev, status->st_ino);
  if (!copy) return result;
  if (follows(copy, fd)) return look();
  shim::describe(copy.file(), status);
  return result;
}

int stat_open(int fd, struct stat* status) {
  return restored(fd, status, [&] { return shim::calls().fstat(fd, status); });
}

// The file on the board that the path names, where looking is not needed.
const BoardFile* known(const shim::Held& plane, int folder, const char* path, bool follows) {
  if (!plane || !plane->immutable()) return nullptr;
  const shim::Named named = shim::name_of(plane->board, folder, path);
  if (named.file < 0 || !named.sure) return nullptr;
  const BoardFile& file = plane->board.file(named.file);
  if (!follows && (file.flags & kIsLink) != 0) return nullptr;
  if (plane->ring != nullptr) {
    static_cast<RingHeader*>(plane->ring)->stats.fetch_add(1, std::memory_order_relaxed);
  }
  return &file;
}

constexpr int kStatFlags = AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH | AT_NO_AUTOMOUNT;

int stat_at(int folder, const char* path, struct stat* status, int flags) {
  {
    const shim::Held plane;
    const BoardFile* file = (flags & ~kStatFlags) == 0 && status != nullptr
                                ? known(plane, folder, path, (flags & AT_SYMLINK_NOFOLLOW) == 0)
                                : nullptr;
    if (file != nullptr) {
      shim::describe(*file, status);
      return 0;
    }
  }
  return restored(descriptor_of(folder, path, flags), status,
                  [&] { return shim::calls().fstatat(folder, path, status, flags); });
}

void describe(const BoardFile& file, struct statx* status) {
  struct stat s;
  shim::describe(file, &s);
  const auto time = [](const timespec& t) {
    return statx_timestamp{t.tv_sec, static_cast<uint32_t>(t.tv_nsec), {}};
  };
  status->stx_mask = STATX_BASIC_STATS;
  status->stx_blksize = static_cast<uint32_t>(s.st_blksize);
  status->stx_attributes = 0;
  status->stx_attributes_mask = 0;
  status->stx_nlink = static_cast<uint32_t>(s.st_nlink);
  status->stx_uid = s.st_uid;
  status->stx_gid = s.st_gid;
  status->stx_mode = static_cast<uint16_t>(s.st_mode);
  status->stx_ino = s.st_ino;
  status->stx_size = static_cast<uint64_t>(s.st_size);
  status->stx_blocks = static_cast<uint64_t>(s.st_blocks);
  status->stx_atime = time(s.st_atim);
  status->stx_mtime = time(s.st_mtim);
  status->stx_ctime = time(s.st_ctim);
  status->stx_btime = {};
  status->stx_rdev_major = 0;
  status->stx_rdev_minor = 0;
  status->stx_dev_major = major(s.st_dev);
  status->stx_dev_minor = minor(s.st_dev);
}

// 0: allowed; -1: the kernel must say. Only for what the file's owner or everybody may do.
int allowed(const BoardFile& file, int mode) {
  if (mode == F_OK) return 0;
  if (mode != R_OK) return -1;
  if ((file.mode & 0444) == 0444) return 0;
  return (file.mode & 0400) != 0 && file.uid == getuid() && getuid() == geteuid() ? 0 : -1;
}

int access_at(int folder, const char* path, int mode, bool follows) {
  const shim::Held plane;
  const BoardFile* file = known(plane, folder, path, follows);
  return file == nullptr ? -1 : allowed(*file, mode);
}

bool is_known(int version) {
  if (version == 0 || version == 1) return true;
  errno = EINVAL;
  return false;
}

}  // namespace

#define HEADRACE_STAT(symbol, flags)                                    \
  HEADRACE_EXPORT(int, symbol, const char* path, struct stat* status) { \
    return stat_at(AT_FDCWD, path, status, flags);                      \
  }
#define HEADRACE_FSTAT(symbol) \
  HEADRACE_EXPORT(int, symbol, int fd, struct stat* status) { return stat_open(fd, status); }
#define HEADRACE_FSTATAT(symbol)                                                               \
  HEADRACE_EXPORT(int, symbol, int folder, const char* path, struct stat* status, int flags) { \
    return stat_at(folder, path, status, flags);                                               \
  }
// What programs that were built before glibc 2.33 call. There has been one version on 64 bits: 1,
// or the kernel's own, 0.
#define HEADRACE_XSTAT(symbol, flags)                                                \
  HEADRACE_EXPORT(int, symbol, int version, const char* path, struct stat* status) { \
    if (!is_known(version)) return -1;                                               \
    return stat_at(AT_FDCWD, path, status, flags);                                   \
  }
#define HEADRACE_FXSTAT(symbol)                                            \
  HEADRACE_EXPORT(int, symbol, int version, int fd, struct stat* status) { \
    if (!is_known(version)) return -1;                                     \
    return stat_open(fd, status);                                          \
  }
#define HEADRACE_FXSTATAT(symbol)                                                              \
  HEADRACE_EXPORT(int, symbol, int version, int folder, const char* path, struct stat* status, \
                  int flags) {                                                                 \
    if (!is_known(version)) return -1;                                                         \
    return stat_at(folder, path, status, flags);                                               \
  }
#define HEADRACE_EUIDACCESS(symbol)                                                               \
  HEADRACE_EXPORT(int, symbol, const char* path, int mode) {                                      \
    return access_at(AT_FDCWD, path, mode, true) == 0 ? 0 : shim::calls().euidaccess(path, mode); \
  }

HEADRACE_STAT(stat, 0)
HEADRACE_STAT(stat64, 0)
HEADRACE_STAT(lstat, AT_SYMLINK_NOFOLLOW)
HEADRACE_STAT(lstat64, AT_SYMLINK_NOFOLLOW)
HEADRACE_FSTAT(fstat)
HEADRACE_FSTAT(fstat64)
HEADRACE_FSTATAT(fstatat)
HEADRACE_FSTATAT(fstatat64)
HEADRACE_XSTAT(__xstat, 0)
HEADRACE_XSTAT(__xstat64, 0)
HEADRACE_XSTAT(__lxstat, AT_SYMLINK_NOFOLLOW)
HEADRACE_XSTAT(__lxstat64, AT_SYMLINK_NOFOLLOW)
HEADRACE_FXSTAT(__fxstat)
HEADRACE_FXSTAT(__fxstat64)
HEADRACE_FXSTATAT(__fxstatat)
HEADRACE_FXSTATAT(__fxstatat64)
HEADRACE_EUIDACCESS(euidaccess)
HEADRACE_EUIDACCESS(eaccess)

HEADRACE_EXPORT(int, statx, int folder, const char* path, int flags, unsigned mask,
                struct statx* status) {
  // The board knows no birth time: who asks for that alone wants no less.
  const bool usual = (mask & STATX_BASIC_STATS) != 0;
  if (status != nullptr && usual && (flags & ~(kStatFlags | AT_STATX_SYNC_TYPE)) == 0) {
    const shim::Held plane;
    if (const BoardFile* file = known(plane, folder, path, (flags & AT_SYMLINK_NOFOLLOW) == 0)) {
      memset(status, 0, sizeof *status);
      describe(*file, status);
      return 0;
    }
  }
  const auto call = shim::calls().statx;
  const int result = call(folder, path, flags, mask, status);
  if (result != 0) return result;
  const shim::OpenCopy copy(makedev(status->stx_dev_major, status->stx_dev_minor), status->stx_ino);
  if (!copy) return result;
  if (follows(copy, descriptor_of(folder, path, flags))) {
    return call(folder, path, flags, mask, status);
  }
  if ((mask & ~STATX_BASIC_STATS) != 0 && !(usual && copy->immutable())) {
    const shim::Original original(copy);
    if (original &&
        call(AT_FDCWD, original.path(), flags & AT_STATX_SYNC_TYPE, mask, status) == 0) {
      return 0;
    }
  }
  describe(copy.file(), status);
  return result;
}

HEADRACE_EXPORT(int, access, const char* path, int mode) {
  if (access_at(AT_FDCWD, path, mode, true) == 0) return 0;
  return shim::calls().access(path, mode);
}

HEADRACE_EXPORT(int, faccessat, int folder, const char* path, int mode, int flags) {
  const bool usual = (flags & ~(AT_EACCESS | AT_SYMLINK_NOFOLLOW)) == 0;
  if (usual && access_at(folder, path, mode, (flags & AT_SYMLINK_NOFOLLOW) == 0) == 0) return 0;
  return shim::calls().faccessat(folder, path, mode, flags);
}
