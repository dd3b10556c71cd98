// Reads, writes and waits: done as the program says, and logged where they are of files, pipes or
// sockets.
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/uio.h>
#include <unistd.h>

#include "preload/export.h"
#include "preload/shim_calls.h"
#include "record/record_calls.h"
#include "record/record_files.h"
#include "record/record_log.h"

namespace {

using namespace headrace::record;

// Waits that are shorter are none.
constexpr int64_t kWaitNs = 5'000;

// One call on a descriptor: looked at before, logged behind.
class Logged {
 public:
  Logged(int fd, Kind of_file, Kind of_pipe, int64_t offset) : fd_(fd), offset_(offset) {
    if (!recording()) return;
    const Mark mark = mark_of(fd);
    if (mark == Mark::kUnknown || mark == Mark::kOther) return;
    kind_ = mark == Mark::kFile ? of_file : of_pipe;
    flags_ = mark == Mark::kSocket ? kSocket : 0;
    if (kind_ != Kind::kNone) begin_ns_ = now_ns();
  }
  ssize_t operator()(ssize_t result) const {
    if (begin_ns_ != 0) {
      add({.kind = kind_,
           .fd = fd_,
           .begin_ns = begin_ns_,
           .end_ns = now_ns(),
           .offset = offset_,
           .nbytes = result >= 0 ? result : -errno,
           .flags = flags_});
    }
    return result;
  }

 private:
  int fd_;
  int64_t offset_;
  Kind kind_ = Kind::kNone;
  uint8_t flags_ = 0;
  int64_t begin_ns_ = 0;
};

struct Read : Logged {
  explicit Read(int fd, int64_t offset = -1) : Logged(fd, Kind::kRead, Kind::kPipeRead, offset) {}
};
struct Write : Logged {
  explicit Write(int fd, int64_t offset = -1)
      : Logged(fd, Kind::kWrite, Kind::kPipeWrite, offset) {}
};

size_t read_stream(size_t (*original)(void*, size_t, size_t, FILE*), void* to, size_t size,
                   size_t count, FILE* stream) {
  const int saved_errno = errno;
  const int fd = recording() && stream != nullptr ? fileno(stream) : -1;
  // Where the stream stands is not where its descriptor does. No system call for a file that is
  // read.
  const Mark mark = fd < 0 ? Mark::kOther : mark_of(fd);
  const int64_t offset = mark == Mark::kFile ? ftello64(stream) : -1;
  errno = saved_errno;
  const Read logged(mark == Mark::kFile ? fd : -1, offset);
  const size_t got = original(to, size, count, stream);
  logged(static_cast<ssize_t>(got * size));
  return got;
}

size_t write_stream(size_t (*original)(const void*, size_t, size_t, FILE*), const void* from,
                    size_t size, size_t count, FILE* stream) {
  const int saved_errno = errno;
  const int fd = recording() && stream != nullptr ? fileno(stream) : -1;
  const Mark mark = fd < 0 ? Mark::kOther : mark_of(fd);
  errno = saved_errno;
  const Write logged(mark == Mark::kFile ? fd : -1);
  const size_t put = original(from, size, count, stream);
  logged(static_cast<ssize_t>(put * size));
  return put;
}

int waited(int64_t begin, int result) {
  if (begin == 0) return result;
  const int64_t end = now_ns();
  if (end - begin >= kWaitNs && is_own_process()) {
    add({.kind = Kind::kWait, .begin_ns = begin, .end_ns = end, .nbytes = result});
  }
  return result;
}

off_t seek(int fd, off_t offset, int whence) {
  const off_t found = originals().lseek(fd, offset, whence);
  // To ask where one stands moves nothing.
  if (found >= 0 && recording() && !(whence == SEEK_CUR && offset == 0) &&
      mark_of(fd) == Mark::kFile) {
    const int64_t now = now_ns();
    add({.kind = Kind::kSeek, .fd = fd, .begin_ns = now, .end_ns = now, .offset = found});
  }
  return found;
}

void* map(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  void* memory = originals().mmap(at, bytes, protection, flags, fd, offset);
  if (memory != MAP_FAILED && fd >= 0 && (flags & MAP_ANONYMOUS) == 0 && recording() &&
      (protection & PROT_READ) != 0 && mark_of(fd) == Mark::kFile) {
    const int64_t now = now_ns();
    add({.kind = Kind::kMap,
         .fd = fd,
         .begin_ns = now,
         .end_ns = now,
         .offset = offset,
         .nbytes = static_cast<int64_t>(bytes)});
  }
  return memory;
}

}  // namespace

HEADRACE_EXPORT(ssize_t, read, int fd, void* to, size_t bytes) {
  const Read logged(fd);
  return logged(originals().read(fd, to, bytes));
}
HEADRACE_EXPORT(ssize_t, __read_chk, int fd, void* to, size_t bytes, size_t) {
  const Read logged(fd);
  return logged(originals().read(fd, to, bytes));
}
HEADRACE_EXPORT(ssize_t, readv, int fd, const iovec* to, int count) {
  const Read logged(fd);
  return logged(originals().readv(fd, to, count));
}
HEADRACE_EXPORT(ssize_t, write, int fd, const void* from, size_t bytes) {
  const Write logged(fd);
  return logged(originals().write(fd, from, bytes));
}
HEADRACE_EXPORT(ssize_t, writev, int fd, const iovec* from, int count) {
  const Write logged(fd);
  return logged(originals().writev(fd, from, count));
}

#define HEADRACE_PREAD(symbol)                                                     \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, void* to, size_t bytes, off_t offset) { \
    const Read logged(fd, offset);                                                 \
    return logged(originals().pread(fd, to, bytes, offset));                       \
  }
#define HEADRACE_PREAD_CHK(symbol)                                                         \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, void* to, size_t bytes, off_t offset, size_t) { \
    const Read logged(fd, offset);                                                         \
    return logged(originals().pread(fd, to, bytes, offset));                               \
  }
#define HEADRACE_PREADV(symbol)                                                        \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const iovec* to, int count, off_t offset) { \
    const Read logged(fd, offset);                                                     \
    return logged(originals().preadv(fd, to, count, offset));                          \
  }
#define HEADRACE_PREADV2(symbol)                                                                  \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const iovec* to, int count, off_t offset, int flags) { \
    const Read logged(fd, offset);                                                                \
    return logged(originals().preadv2(fd, to, count, offset, flags));                             \
  }
#define HEADRACE_PWRITE(symbol)                                                            \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const void* from, size_t bytes, off_t offset) { \
    const Write logged(fd, offset);                                                        \
    return logged(originals().pwrite(fd, from, bytes, offset));                            \
  }
#define HEADRACE_PWRITEV(symbol)                                                         \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const iovec* from, int count, off_t offset) { \
    const Write logged(fd, offset);                                                      \
    return logged(originals().pwritev(fd, from, count, offset));                         \
  }
#define HEADRACE_PWRITEV2(symbol)                                                      \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const iovec* from, int count, off_t offset, \
                  int flags) {                                                         \
    const Write logged(fd, offset);                                                    \
    return logged(originals().pwritev2(fd, from, count, offset, flags));               \
  }

HEADRACE_PREAD(pread)
HEADRACE_PREAD(pread64)
HEADRACE_PREAD_CHK(__pread_chk)
HEADRACE_PREAD_CHK(__pread64_chk)
HEADRACE_PREADV(preadv)
HEADRACE_PREADV(preadv64)
HEADRACE_PREADV2(preadv2)
HEADRACE_PREADV2(preadv64v2)
HEADRACE_PWRITE(pwrite)
HEADRACE_PWRITE(pwrite64)
HEADRACE_PWRITEV(pwritev)
HEADRACE_PWRITEV(pwritev64)
HEADRACE_PWRITEV2(pwritev2)
HEADRACE_PWRITEV2(pwritev64v2)

HEADRACE_EXPORT(off_t, lseek, int fd, off_t offset, int whence) { return seek(fd, offset, whence); }
HEADRACE_EXPORT(off_t, lseek64, int fd, off_t offset, int whence) {
  return seek(fd, offset, whence);
}
HEADRACE_EXPORT(void*, mmap, void* at, size_t bytes, int protection, int flags, int fd,
                off_t offset) {
  return map(at, bytes, protection, flags, fd, offset);
}
HEADRACE_EXPORT(void*, mmap64, void* at, size_t bytes, int protection, int flags, int fd,
                off_t offset) {
  return map(at, bytes, protection, flags, fd, offset);
}

HEADRACE_EXPORT(int, fsync, int fd) {
  const Logged logged(fd, Kind::kSync, Kind::kNone, -1);
  return static_cast<int>(logged(originals().fsync(fd)));
}
HEADRACE_EXPORT(int, fdatasync, int fd) {
  const Logged logged(fd, Kind::kSync, Kind::kNone, -1);
  return static_cast<int>(logged(originals().fdatasync(fd)));
}

HEADRACE_EXPORT(int, poll, pollfd* fds, nfds_t count, int timeout) {
  const int64_t begin = recording() ? now_ns() : 0;
  return waited(begin, originals().poll(fds, count, timeout));
}
HEADRACE_EXPORT(int, __poll_chk, pollfd* fds, nfds_t count, int timeout, size_t) {
  const int64_t begin = recording() ? now_ns() : 0;
  return waited(begin, originals().poll(fds, count, timeout));
}
HEADRACE_EXPORT(int, select, int count, fd_set* reads, fd_set* writes, fd_set* others,
                timeval* timeout) {
  const int64_t begin = recording() ? now_ns() : 0;
  return waited(begin, originals().select(count, reads, writes, others, timeout));
}

HEADRACE_EXPORT(size_t, fread, void* to, size_t size, size_t count, FILE* stream) {
  return read_stream(originals().fread, to, size, count, stream);
}
HEADRACE_EXPORT(size_t, __fread_chk, void* to, size_t, size_t size, size_t count, FILE* stream) {
  return read_stream(originals().fread, to, size, count, stream);
}
HEADRACE_EXPORT(size_t, fread_unlocked, void* to, size_t size, size_t count, FILE* stream) {
  return read_stream(originals().fread_unlocked, to, size, count, stream);
}
HEADRACE_EXPORT(size_t, __fread_unlocked_chk, void* to, size_t, size_t size, size_t count,
                FILE* stream) {
  return read_stream(originals().fread_unlocked, to, size, count, stream);
}
HEADRACE_EXPORT(size_t, fwrite, const void* from, size_t size, size_t count, FILE* stream) {
  return write_stream(originals().fwrite, from, size, count, stream);
}
HEADRACE_EXPORT(size_t, fwrite_unlocked, const void* from, size_t size, size_t count,
                FILE* stream) {
  return write_stream(originals().fwrite_unlocked, from, size, count, stream);
}
