#include "preload/shim_calls.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace headrace::preload::shim {
namespace {

Calls g_calls;
std::atomic<bool> g_known{false};

template <class F>
void find(F* function, const char* name) {
  // A function pointer from an object pointer: what dlsym is for.
  *reinterpret_cast<void**>(function) = dlsym(RTLD_NEXT, name);
}

// Twice at the same time does no harm: the answers are the same.
void find_all() {
  find(&g_calls.open, "open64");
  find(&g_calls.openat, "openat64");
  find(&g_calls.fopen, "fopen64");
  find(&g_calls.freopen, "freopen64");
  find(&g_calls.fdopen, "fdopen");
  find(&g_calls.fstat, "fstat64");
  find(&g_calls.fstatat, "fstatat64");
  find(&g_calls.statx, "statx");
  find(&g_calls.access, "access");
  find(&g_calls.faccessat, "faccessat");
  find(&g_calls.euidaccess, "euidaccess");
  find(&g_calls.execve, "execve");
  find(&g_calls.execvpe, "execvpe");
  find(&g_calls.fexecve, "fexecve");
  find(&g_calls.posix_spawn, "posix_spawn");
  find(&g_calls.posix_spawnp, "posix_spawnp");
  find(&g_calls.read, "read");
  find(&g_calls.pread, "pread64");
  find(&g_calls.lseek, "lseek64");
  find(&g_calls.flock, "flock");
  find(&g_calls.fcntl, "fcntl64");
  if (g_calls.fcntl == nullptr) find(&g_calls.fcntl, "fcntl");  // before glibc 2.28
  find(&g_calls.lockf, "lockf64");
  find(&g_calls.ioctl, "ioctl");
  find(&g_calls.copy_file_range, "copy_file_range");
  find(&g_calls.fsync, "fsync");
  find(&g_calls.fdatasync, "fdatasync");
  find(&g_calls.syncfs, "syncfs");
  find(&g_calls.fgetxattr, "fgetxattr");
  find(&g_calls.flistxattr, "flistxattr");
  find(&g_calls.fsetxattr, "fsetxattr");
  find(&g_calls.fremovexattr, "fremovexattr");
  find(&g_calls.fchmod, "fchmod");
  find(&g_calls.fchown, "fchown");
  find(&g_calls.futimens, "futimens");
  find(&g_calls.futimes, "futimes");
  find(&g_calls.fstatfs, "fstatfs");
  find(&g_calls.fstatvfs, "fstatvfs");
  find(&g_calls.chroot, "chroot");
  // Before glibc 2.33 programs had their own, which called __fxstat.
  if (g_calls.fstat == nullptr) g_calls.fstat = kernel_fstat;
  if (g_calls.fstatat == nullptr) {
    g_calls.fstatat = [](int folder, const char* path, struct stat* status, int flags) {
      return kernel_fstatat(folder, path, status, flags);
    };
  }
  g_known.store(true, std::memory_order_release);
}

}  // namespace

const Calls& calls() {
  if (!g_known.load(std::memory_order_acquire)) find_all();
  return g_calls;
}

int kernel_open(int folder, const char* path, int flags, mode_t mode) {
  return static_cast<int>(syscall(SYS_openat, folder, path, flags, mode));
}

int kernel_close(int fd) { return static_cast<int>(syscall(SYS_close, fd)); }

int kernel_fstat(int fd, struct stat* status) {
  return static_cast<int>(syscall(SYS_fstat, fd, status));
}

int kernel_fstatat(int folder, const char* path, struct stat* status, int flags) {
  return static_cast<int>(syscall(SYS_newfstatat, folder, path, status, flags));
}

char* decimal(char* out, uint64_t value) {
  char digits[20];
  int count = 0;
  do {
    digits[count++] = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value != 0);
  while (count > 0) *out++ = digits[--count];
  return out;
}

void descriptor_path(char* out, uint32_t process, uint32_t fd) {
  memcpy(out, "/proc/", 6);
  out = decimal(out + 6, process);
  memcpy(out, "/fd/", 4);
  out = decimal(out + 4, fd);
  *out = '\0';
}

}  // namespace headrace::preload::shim
