// The open family, under all of its names.
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "preload/shim_calls.h"
#include "preload/shim_copy.h"

namespace {

namespace shim = headrace::preload::shim;

int open_original(int folder, const char* path, int flags, mode_t mode) {
  const auto original = shim::calls().openat;
  if (original != nullptr) return original(folder, path, flags, mode);
  return shim::kernel_open(folder, path, flags, mode);
}

int open_at(int folder, const char* path, int flags, mode_t mode) {
  const shim::Held plane;
  if (!plane) return open_original(folder, path, flags, mode);
  const shim::Named named = shim::name_of(plane->board, folder, path);
  if (shim::is_plain_read(flags)) {
    const int copy = shim::open_copy(*plane, named, folder, path, flags);
    if (copy >= 0) return copy;
  }
  const int fd = open_original(folder, path, flags, mode);
  if (fd >= 0) shim::opened_original(*plane, named, fd, flags);
  return fd;
}

// What `fopen` does with a mode, as flags; -1: something that only the library knows.
int flags_of(const char* mode) {
  if (mode == nullptr || strstr(mode, ",ccs=") != nullptr) return -1;
  int flags = mode[0] == 'r' ? O_RDONLY : O_WRONLY;
  if (mode[0] != 'r' && mode[0] != 'w' && mode[0] != 'a') return -1;
  for (const char* c = mode + 1; *c != '\0'; ++c) {
    if (*c == '+') flags = (flags & ~O_ACCMODE) | O_RDWR;
    if (*c == 'e') flags |= O_CLOEXEC;
  }
  return flags;
}

FILE* open_stream(const char* path, const char* mode) {
  const shim::Held plane;
  const int flags = plane ? flags_of(mode) : -1;
  if (flags < 0) return shim::calls().fopen(path, mode);
  const shim::Named named = shim::name_of(plane->board, AT_FDCWD, path);
  if (shim::is_plain_read(flags)) {
    const int copy = shim::open_copy(*plane, named, AT_FDCWD, path, flags);
    if (copy >= 0) {
      FILE* stream = shim::calls().fdopen(copy, mode);
      if (stream != nullptr) return stream;
      shim::kernel_close(copy);
    }
  }
  FILE* stream = shim::calls().fopen(path, mode);
  if (stream != nullptr) shim::opened_original(*plane, named, fileno(stream), flags);
  return stream;
}

FILE* reopen_stream(const char* path, const char* mode, FILE* stream) {
  const auto original = shim::calls().freopen;
  const shim::Held plane;
  const int flags = plane && path != nullptr ? flags_of(mode) : -1;
  if (flags < 0) return original(path, mode, stream);
  const shim::Named named = shim::name_of(plane->board, AT_FDCWD, path);
  if (shim::is_plain_read(flags)) {
    const int copy = shim::open_copy(*plane, named, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (copy >= 0) {
      // Opened once more by the library itself; a stream that it could not reopen is gone.
      char self[32];
      snprintf(self, sizeof self, "/proc/self/fd/%d", copy);
      FILE* reopened = original(self, mode, stream);
      shim::kernel_close(copy);
      return reopened;
    }
  }
  FILE* reopened = original(path, mode, stream);
  if (reopened != nullptr) shim::opened_original(*plane, named, fileno(reopened), flags);
  return reopened;
}

bool takes_mode(int flags) { return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE; }

}  // namespace

#define HEADRACE_MODE(flags)                                 \
  mode_t mode = 0;                                           \
  if (takes_mode(flags)) {                                   \
    va_list arguments;                                       \
    va_start(arguments, flags);                              \
    mode = static_cast<mode_t>(va_arg(arguments, unsigned)); \
    va_end(arguments);                                       \
  }

#define HEADRACE_OPEN(symbol)                                      \
  HEADRACE_EXPORT(int, symbol, const char* path, int flags, ...) { \
    HEADRACE_MODE(flags)                                           \
    return open_at(AT_FDCWD, path, flags, mode);                   \
  }
#define HEADRACE_OPENAT(symbol)                                                \
  HEADRACE_EXPORT(int, symbol, int folder, const char* path, int flags, ...) { \
    HEADRACE_MODE(flags)                                                       \
    return open_at(folder, path, flags, mode);                                 \
  }
// What _FORTIFY_SOURCE makes of opens without a mode.
#define HEADRACE_OPEN_2(symbol)                               \
  HEADRACE_EXPORT(int, symbol, const char* path, int flags) { \
    return open_at(AT_FDCWD, path, flags, 0);                 \
  }
#define HEADRACE_OPENAT_2(symbol)                                         \
  HEADRACE_EXPORT(int, symbol, int folder, const char* path, int flags) { \
    return open_at(folder, path, flags, 0);                               \
  }
#define HEADRACE_CREAT(symbol)                                          \
  HEADRACE_EXPORT(int, symbol, const char* path, mode_t mode) {         \
    return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); \
  }
#define HEADRACE_FOPEN(symbol)                                         \
  HEADRACE_EXPORT(FILE*, symbol, const char* path, const char* mode) { \
    return open_stream(path, mode);                                    \
  }
#define HEADRACE_FREOPEN(symbol)                                                     \
  HEADRACE_EXPORT(FILE*, symbol, const char* path, const char* mode, FILE* stream) { \
    return reopen_stream(path, mode, stream);                                        \
  }

HEADRACE_OPEN(open)
HEADRACE_OPEN(open64)
HEADRACE_OPEN(__open)
HEADRACE_OPEN(__open64)
HEADRACE_OPENAT(openat)
HEADRACE_OPENAT(openat64)
HEADRACE_OPEN_2(__open_2)
HEADRACE_OPEN_2(__open64_2)
HEADRACE_OPENAT_2(__openat_2)
HEADRACE_OPENAT_2(__openat64_2)
HEADRACE_CREAT(creat)
HEADRACE_CREAT(creat64)
HEADRACE_FOPEN(fopen)
HEADRACE_FOPEN(fopen64)
HEADRACE_FOPEN(_IO_fopen)
HEADRACE_FREOPEN(freopen)
HEADRACE_FREOPEN(freopen64)
