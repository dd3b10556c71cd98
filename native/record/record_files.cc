#include "record/record_files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "preload/shim_calls.h"
#include "record/record_log.h"

namespace headrace::record {
namespace {

constexpr int kDescriptorsMax = 1 << 16;  // higher ones are not followed
std::atomic<uint8_t> g_marks[kDescriptorsMax];

bool is_followed(int fd) { return fd >= 0 && fd < kDescriptorsMax; }

void set(int fd, Mark mark) {
  g_marks[fd].store(static_cast<uint8_t>(mark), std::memory_order_release);
}

Mark kind_of(int fd, int64_t* size) {
  struct stat status;
  if (preload::shim::kernel_fstat(fd, &status) != 0) return Mark::kUnknown;
  if (S_ISREG(status.st_mode)) {
    *size = status.st_size;
    return Mark::kFile;
  }
  if (S_ISFIFO(status.st_mode)) return Mark::kPipe;
  return S_ISSOCK(status.st_mode) ? Mark::kSocket : Mark::kOther;
}

// The name that the kernel knows a descriptor's file by; false: it does not tell.
bool name_of(int fd, char (&path)[4096]) {
  char link[64];
  preload::shim::descriptor_path(link, static_cast<uint32_t>(getpid()), static_cast<uint32_t>(fd));
  const long bytes = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  if (bytes <= 0) return false;
  path[bytes] = '\0';
  return true;
}

void adopt(int fd, int64_t size) {
  char path[4096];
  if (!name_of(fd, path)) return;
  const int64_t now = now_ns();
  const int64_t at = syscall(SYS_lseek, fd, 0, SEEK_CUR);
  add({.kind = Kind::kOpen,
       .fd = fd,
       .begin_ns = now,
       .end_ns = now,
       .offset = at,
       .nbytes = size,
       .flags = kAdopted,
       .text = path});
}

}  // namespace

void opened(int fd, const char* path, int64_t begin_ns, uint8_t flags) {
  if (!is_followed(fd) || !is_own_process()) return;
  const int64_t end_ns = now_ns();
  const int saved_errno = errno;
  int64_t size = 0;
  const Mark mark = kind_of(fd, &size);
  set(fd, mark);
  char found[4096];
  if (mark == Mark::kFile && path[0] != '/') path = name_of(fd, found) ? found : path;
  if (mark == Mark::kFile) {
    add({.kind = Kind::kOpen,
         .fd = fd,
         .begin_ns = begin_ns,
         .end_ns = end_ns,
         .offset = 0,
         .nbytes = size,
         .flags = flags,
         .text = path});
  }
  errno = saved_errno;
}

Mark mark_of(int fd) {
  if (!is_followed(fd)) return Mark::kOther;
  const auto mark = static_cast<Mark>(g_marks[fd].load(std::memory_order_acquire));
  if (mark != Mark::kUnknown) return mark;
  const int saved_errno = errno;
  int64_t size = 0;
  const Mark found = is_own_process() ? kind_of(fd, &size) : Mark::kOther;
  if (found == Mark::kFile) adopt(fd, size);
  if (is_own_process()) set(fd, found);
  errno = saved_errno;
  return found;
}

void closing(int fd) {
  if (!is_followed(fd)) return;
  const auto mark = static_cast<Mark>(g_marks[fd].load(std::memory_order_acquire));
  if (mark == Mark::kUnknown || !is_own_process()) return;
  // Before the descriptor is free: its next owner's slots come behind this one.
  set(fd, Mark::kUnknown);
  if (mark != Mark::kFile) return;
  const int64_t now = now_ns();
  add({.kind = Kind::kClose, .fd = fd, .begin_ns = now, .end_ns = now});
}

void closing_range(unsigned first, unsigned last) {
  if (first >= kDescriptorsMax) return;
  const unsigned end = last < kDescriptorsMax ? last : kDescriptorsMax - 1;
  for (unsigned fd = first; fd <= end; ++fd) closing(static_cast<int>(fd));
}

void forget_all() {
  for (auto& mark : g_marks) mark.store(0, std::memory_order_relaxed);
}

}  // namespace headrace::record
