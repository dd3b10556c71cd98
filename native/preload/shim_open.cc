// The open family, under all of its names.
#include <errno.h>
#include <fcntl.h>
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

}  // namespace

// Last, for it calls what stands above.
#include "preload/open_exports.h"
