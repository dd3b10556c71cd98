// Opening, looking at, and closing files: done as the program says, and logged.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "preload/export.h"
#include "preload/shim_calls.h"
#include "record/record_calls.h"
#include "record/record_files.h"
#include "record/record_log.h"

namespace {

namespace shim = headrace::preload::shim;
using namespace headrace::record;

int open_at(int folder, const char* path, int flags, mode_t mode) {
  const auto original = shim::calls().openat;
  const bool logged = recording() && (flags & (O_PATH | O_DIRECTORY)) == 0;
  const int64_t begin = logged ? now_ns() : 0;
  const int fd = original != nullptr ? original(folder, path, flags, mode)
                                     : shim::kernel_open(folder, path, flags, mode);
  if (logged && fd >= 0) {
    const bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
    opened(fd, path, begin, (writes ? kForWriting : 0) | ((flags & O_DIRECT) != 0 ? kDirect : 0));
  }
  return fd;
}

void opened_stream(FILE* stream, const char* path, const char* mode, int64_t begin) {
  if (stream == nullptr || path == nullptr || mode == nullptr) return;
  const bool writes = mode[0] != 'r' || strchr(mode, '+') != nullptr;
  opened(fileno(stream), path, begin, kStream | (writes ? kForWriting : 0));
}

FILE* open_stream(const char* path, const char* mode) {
  const int64_t begin = recording() ? now_ns() : 0;
  FILE* stream = shim::calls().fopen(path, mode);
  if (recording()) opened_stream(stream, path, mode, begin);
  return stream;
}

FILE* reopen_stream(const char* path, const char* mode, FILE* stream) {
  const int64_t begin = recording() ? now_ns() : 0;
  if (recording() && stream != nullptr) closing(fileno(stream));
  FILE* reopened = shim::calls().freopen(path, mode, stream);
  if (recording()) opened_stream(reopened, path, mode, begin);
  return reopened;
}

int looked(const char* path, int64_t begin, int result) {
  if (begin == 0 || path == nullptr || path[0] == '\0' || !is_own_process()) return result;
  add({.kind = Kind::kStat,
       .begin_ns = begin,
       .end_ns = now_ns(),
       .nbytes = result == 0 ? 0 : -errno,
       .text = path});
  return result;
}

int64_t begun() { return recording() ? now_ns() : 0; }

}  // namespace

// It calls what stands above.
#include "preload/open_exports.h"

#define HEADRACE_STAT(symbol, flags)                                                  \
  HEADRACE_EXPORT(int, symbol, const char* path, struct stat* status) {               \
    const int64_t begin = begun();                                                    \
    return looked(path, begin, shim::calls().fstatat(AT_FDCWD, path, status, flags)); \
  }
#define HEADRACE_FSTATAT(symbol)                                                               \
  HEADRACE_EXPORT(int, symbol, int folder, const char* path, struct stat* status, int flags) { \
    const int64_t begin = begun();                                                             \
    return looked(path, begin, shim::calls().fstatat(folder, path, status, flags));            \
  }

HEADRACE_STAT(stat, 0)
HEADRACE_STAT(stat64, 0)
HEADRACE_STAT(lstat, AT_SYMLINK_NOFOLLOW)
HEADRACE_STAT(lstat64, AT_SYMLINK_NOFOLLOW)
HEADRACE_FSTATAT(fstatat)
HEADRACE_FSTATAT(fstatat64)

HEADRACE_EXPORT(int, statx, int folder, const char* path, int flags, unsigned mask,
                struct statx* status) {
  const int64_t begin = begun();
  return looked(path, begin, shim::calls().statx(folder, path, flags, mask, status));
}

HEADRACE_EXPORT(int, close, int fd) {
  if (recording()) closing(fd);
  return originals().close(fd);
}

HEADRACE_EXPORT(int, fclose, FILE* stream) {
  if (recording() && stream != nullptr) closing(fileno(stream));
  return originals().fclose(stream);
}

HEADRACE_EXPORT(int, close_range, unsigned first, unsigned last, int flags) {
  if (originals().close_range == nullptr) {
    errno = ENOSYS;
    return -1;
  }
  // CLOSE_RANGE_CLOEXEC (4) closes nothing yet.
  if (recording() && (flags & 4) == 0) closing_range(first, last);
  return originals().close_range(first, last, flags);
}

HEADRACE_EXPORT(void, closefrom, int first) {
  if (recording() && first >= 0) closing_range(static_cast<unsigned>(first), ~0U);
  if (originals().closefrom != nullptr) originals().closefrom(first);
}

HEADRACE_EXPORT(int, dup2, int fd, int other) {
  if (recording() && fd != other) closing(other);
  return originals().dup2(fd, other);
}

HEADRACE_EXPORT(int, dup3, int fd, int other, int flags) {
  if (recording() && fd != other) closing(other);
  return originals().dup3(fd, other, flags);
}
