// The recorder: a library to be preloaded that notes which files a program opens, when, and how
// long it reads them. It changes nothing: each call is the next library's (the run's shim, or the C
// library). Nothing is allocated, no lock is taken, no descriptor is kept.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "opens/opens_layout.h"
#include "preload/export.h"

namespace {

using headrace::opens::kLogMagic;
using headrace::opens::kLogVersion;
using headrace::opens::kRecordMagic;
using headrace::opens::LogHeader;
using headrace::opens::OpenRecord;

constexpr int kDescriptorsMax = 1 << 16;  // above these, reads are not added up

LogHeader* g_log = nullptr;
uint64_t g_capacity = 0;
uint32_t g_process = 0;
std::atomic<OpenRecord*> g_open[kDescriptorsMax];

// -- the next library's functions
// ------------------------------------------------------------------

struct Next {
  int (*openat)(int, const char*, int, ...);
  FILE* (*fopen)(const char*, const char*);
  FILE* (*freopen)(const char*, const char*, FILE*);
  ssize_t (*read)(int, void*, size_t);
  ssize_t (*pread)(int, void*, size_t, off_t);
  ssize_t (*readv)(int, const iovec*, int);
  ssize_t (*preadv)(int, const iovec*, int, off_t);
  ssize_t (*preadv2)(int, const iovec*, int, off_t, int);
  size_t (*fread)(void*, size_t, size_t, FILE*);
  size_t (*fread_unlocked)(void*, size_t, size_t, FILE*);
  ssize_t (*sendfile)(int, int, off_t*, size_t);
  ssize_t (*copy_file_range)(int, off_t*, int, off_t*, size_t, unsigned);
  void* (*mmap)(void*, size_t, int, int, int, off_t);
  int (*close)(int);
  int (*fclose)(FILE*);
  int (*dup2)(int, int);
  int (*dup3)(int, int, int);
};

Next g_next;
std::atomic<bool> g_known{false};

template <class F>
void find(F* function, const char* name) {
  // A function pointer from an object pointer: what dlsym is for.
  *reinterpret_cast<void**>(function) = dlsym(RTLD_NEXT, name);
}

// Twice at the same time does no harm: the answers are the same.
void find_all() {
  find(&g_next.openat, "openat64");
  find(&g_next.fopen, "fopen64");
  find(&g_next.freopen, "freopen64");
  find(&g_next.read, "read");
  find(&g_next.pread, "pread64");
  find(&g_next.readv, "readv");
  find(&g_next.preadv, "preadv64");
  find(&g_next.preadv2, "preadv64v2");
  find(&g_next.fread, "fread");
  find(&g_next.fread_unlocked, "fread_unlocked");
  find(&g_next.sendfile, "sendfile64");
  find(&g_next.copy_file_range, "copy_file_range");
  find(&g_next.mmap, "mmap64");
  find(&g_next.close, "close");
  find(&g_next.fclose, "fclose");
  find(&g_next.dup2, "dup2");
  find(&g_next.dup3, "dup3");
  g_known.store(true, std::memory_order_release);
}

const Next& next() {
  if (!g_known.load(std::memory_order_acquire)) find_all();
  return g_next;
}

// -- the log
// -----------------------------------------------------------------------------------------

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

uint32_t thread() {
  // A forked child's first thread has its parent's memory and another number.
  static __thread uint32_t of_process __attribute__((tls_model("initial-exec")));
  static __thread uint32_t number __attribute__((tls_model("initial-exec")));
  if (of_process != g_process) {
    of_process = g_process;
    number = static_cast<uint32_t>(syscall(SYS_gettid));
  }
  return number;
}

bool starts_with(const char* path, const char* head) {
  return strncmp(path, head, strlen(head)) == 0;
}

// What `path` is relative to, and a slash; its bytes, 0: nobody can tell.
size_t folder_of(int folder, char* out, size_t out_bytes) {
  ssize_t bytes;
  if (folder == AT_FDCWD) {
    bytes = syscall(SYS_getcwd, out, out_bytes) - 1;  // with its null
  } else {
    char self[32];
    snprintf(self, sizeof self, "/proc/self/fd/%d", folder);
    bytes = syscall(SYS_readlinkat, AT_FDCWD, self, out, out_bytes);
  }
  if (bytes <= 0 || static_cast<size_t>(bytes) >= out_bytes) return 0;
  out[bytes] = '/';
  return static_cast<size_t>(bytes) + 1;
}

OpenRecord* put(const char* folder, size_t folder_bytes, const char* path, int flags,
                int64_t began_ns) {
  const int64_t open_ns = now_ns() - began_ns;
  const size_t path_bytes = strlen(path);
  const uint64_t bytes = (sizeof(OpenRecord) + folder_bytes + path_bytes + 7) & ~uint64_t{7};
  const uint64_t at = g_log->head.fetch_add(bytes, std::memory_order_relaxed);
  if (at > g_capacity || bytes > g_capacity - at) {
    g_log->dropped.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  auto* record =
      reinterpret_cast<OpenRecord*>(reinterpret_cast<char*>(g_log) + sizeof(LogHeader) + at);
  record->magic = kRecordMagic;
  record->process = g_process;
  record->thread = thread();
  record->flags = static_cast<uint32_t>(flags);
  record->path_nbytes = static_cast<uint32_t>(folder_bytes + path_bytes);
  record->began_ns = began_ns;
  record->open_ns = open_ns;
  memcpy(record->path, folder, folder_bytes);
  memcpy(record->path + folder_bytes, path, path_bytes);
  record->nbytes.store(static_cast<uint32_t>(bytes), std::memory_order_release);
  return record;
}

__attribute__((noinline)) OpenRecord* put_relative(int folder, const char* path, int flags,
                                                   int64_t began_ns) {
  char name[4096];
  const size_t bytes = folder_of(folder, name, sizeof name);
  return bytes == 0 ? nullptr : put(name, bytes, path, flags, began_ns);
}

// A stream in memory has no descriptor, and asking for it is an error to the library.
int descriptor_of(FILE* stream) {
  const int saved_errno = errno;
  const int fd = stream == nullptr ? -1 : fileno(stream);
  errno = saved_errno;
  return fd;
}

void forget(int fd) {
  if (fd < 0 || fd >= kDescriptorsMax) return;
  if (g_open[fd].load(std::memory_order_relaxed) != nullptr) {
    g_open[fd].store(nullptr, std::memory_order_relaxed);
  }
}

void opened(int fd, int folder, const char* path, int flags, int64_t began_ns) {
  const int saved_errno = errno;
  OpenRecord* record = nullptr;
  if ((flags & (O_DIRECTORY | O_PATH)) == 0) {
    if (path[0] != '/') {
      record = put_relative(folder, path, flags, began_ns);
    } else if (!starts_with(path, "/proc/") && !starts_with(path, "/sys/") &&
               !starts_with(path, "/dev/")) {
      record = put("", 0, path, flags, began_ns);
    }
  }
  if ((flags & O_ACCMODE) == O_WRONLY) record = nullptr;
  if (fd >= 0 && fd < kDescriptorsMax) g_open[fd].store(record, std::memory_order_relaxed);
  errno = saved_errno;
}

OpenRecord* record_of(int fd) {
  if (fd < 0 || fd >= kDescriptorsMax) return nullptr;
  return g_open[fd].load(std::memory_order_relaxed);
}

void was_read(OpenRecord* record, int64_t began_ns, int64_t bytes) {
  const int64_t ended_ns = now_ns();
  record->reads.fetch_add(1, std::memory_order_relaxed);
  record->read_ns.fetch_add(static_cast<uint64_t>(ended_ns - began_ns), std::memory_order_relaxed);
  record->last_ns.store(ended_ns, std::memory_order_relaxed);
  if (bytes > 0) {
    record->read_bytes.fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
  }
}

// Calls, and adds what it took to the record of the descriptor, if there is one. The clock is read
// by the vDSO: errno stays.
template <class F>
auto reading(int fd, size_t unit, F call) {
  OpenRecord* record = record_of(fd);
  if (record == nullptr) return call();
  const int64_t began_ns = now_ns();
  const auto found = call();
  was_read(record, began_ns, static_cast<int64_t>(found) * static_cast<int64_t>(unit));
  return found;
}

// -- finding the log
// ---------------------------------------------------------------------------------

void find_log() {
  const char* text = getenv("HEADRACE_OPENS");
  const char* colon = text == nullptr ? nullptr : strchr(text, ':');
  char path[64];
  if (colon == nullptr || !starts_with(text, "/proc/")) return;
  const auto bytes = static_cast<size_t>(colon - text);
  if (bytes >= sizeof path) return;
  memcpy(path, text, bytes);
  path[bytes] = '\0';
  const uint64_t inode = strtoull(colon + 1, nullptr, 10);
  const auto fd =
      static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC | O_NONBLOCK, 0));
  if (fd < 0) return;
  struct stat status;
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;  // so that nobody's SIGBUS is of our making
  if (syscall(SYS_fstat, fd, &status) == 0 && status.st_ino == inode &&
      (fcntl(fd, F_GET_SEALS) & kSeals) == kSeals &&
      static_cast<uint64_t>(status.st_size) >= sizeof(LogHeader)) {
    const auto nbytes = static_cast<uint64_t>(status.st_size);
    void* memory = next().mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    auto* log = static_cast<LogHeader*>(memory);
    if (memory != MAP_FAILED && log->magic == kLogMagic && log->version == kLogVersion &&
        log->capacity <= nbytes - sizeof(LogHeader)) {
      g_capacity = log->capacity;
      g_log = log;
    }
  }
  syscall(SYS_close, fd);
}

void after_fork() { g_process = static_cast<uint32_t>(getpid()); }

// With a high priority: other libraries' constructors may open files.
__attribute__((constructor(101))) void begin() {
  const int saved_errno = errno;
  next();
  after_fork();
  pthread_atfork(nullptr, nullptr, after_fork);
  find_log();
  errno = saved_errno;
}

// -- opens
// -------------------------------------------------------------------------------------------

int open_at(int folder, const char* path, int flags, mode_t mode) {
  const int64_t began_ns = g_log == nullptr ? 0 : now_ns();
  const int fd = next().openat(folder, path, flags, mode);
  if (fd >= 0 && g_log != nullptr) opened(fd, folder, path, flags, began_ns);
  return fd;
}

int flags_of(const char* mode) {
  if (strchr(mode, '+') != nullptr) return O_RDWR;
  return mode[0] == 'r' ? O_RDONLY : O_WRONLY;
}

template <class F>
FILE* stream_of(const char* path, const char* mode, F call) {
  const int64_t began_ns = g_log == nullptr ? 0 : now_ns();
  FILE* stream = call();
  if (stream != nullptr && g_log != nullptr && path != nullptr) {
    opened(descriptor_of(stream), AT_FDCWD, path, flags_of(mode), began_ns);
  }
  return stream;
}

FILE* open_stream(const char* path, const char* mode) {
  return stream_of(path, mode, [&] { return next().fopen(path, mode); });
}

FILE* reopen_stream(const char* path, const char* mode, FILE* stream) {
  forget(descriptor_of(stream));
  return stream_of(path, mode, [&] { return next().freopen(path, mode, stream); });
}

// A descriptor's copy is read as the same open.
void copied(int fd, int to) {
  if (g_log == nullptr || to < 0 || to >= kDescriptorsMax || fd == to) return;
  g_open[to].store(record_of(fd), std::memory_order_relaxed);
}

}  // namespace

// It calls what stands above.
#include "preload/open_exports.h"

// -- reads
// -------------------------------------------------------------------------------------------

#define HEADRACE_READ(symbol)                                           \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, void* out, size_t bytes) {   \
    return reading(fd, 1, [&] { return next().read(fd, out, bytes); }); \
  }
#define HEADRACE_PREAD(symbol)                                                  \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, void* out, size_t bytes, off_t at) { \
    return reading(fd, 1, [&] { return next().pread(fd, out, bytes, at); });    \
  }
#define HEADRACE_PREADV(symbol)                                                       \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const iovec* parts, int count, off_t at) { \
    return reading(fd, 1, [&] { return next().preadv(fd, parts, count, at); });       \
  }
#define HEADRACE_PREADV2(symbol)                                                                 \
  HEADRACE_EXPORT(ssize_t, symbol, int fd, const iovec* parts, int count, off_t at, int flags) { \
    return reading(fd, 1, [&] { return next().preadv2(fd, parts, count, at, flags); });          \
  }
#define HEADRACE_FREAD(symbol, call)                                                    \
  HEADRACE_EXPORT(size_t, symbol, void* out, size_t unit, size_t count, FILE* stream) { \
    return reading(descriptor_of(stream), unit,                                         \
                   [&] { return next().call(out, unit, count, stream); });              \
  }
#define HEADRACE_MMAP(symbol)                                                           \
  HEADRACE_EXPORT(void*, symbol, void* at, size_t bytes, int access, int flags, int fd, \
                  off_t from) {                                                         \
    void* memory = next().mmap(at, bytes, access, flags, fd, from);                     \
    if ((flags & MAP_ANONYMOUS) == 0 && memory != MAP_FAILED) {                         \
      if (OpenRecord* record = record_of(fd)) {                                         \
        record->mapped.fetch_add(1, std::memory_order_relaxed);                         \
      }                                                                                 \
    }                                                                                   \
    return memory;                                                                      \
  }
#define HEADRACE_SENDFILE(symbol)                                              \
  HEADRACE_EXPORT(ssize_t, symbol, int to, int fd, off_t* at, size_t bytes) {  \
    return reading(fd, 1, [&] { return next().sendfile(to, fd, at, bytes); }); \
  }

HEADRACE_READ(read)
HEADRACE_READ(__read)
HEADRACE_PREAD(pread)
HEADRACE_PREAD(pread64)
HEADRACE_PREAD(__pread64)
HEADRACE_PREADV(preadv)
HEADRACE_PREADV(preadv64)
HEADRACE_PREADV2(preadv2)
HEADRACE_PREADV2(preadv64v2)
HEADRACE_FREAD(fread, fread)
HEADRACE_FREAD(_IO_fread, fread)
HEADRACE_FREAD(fread_unlocked, fread_unlocked)
HEADRACE_MMAP(mmap)
HEADRACE_MMAP(mmap64)
HEADRACE_SENDFILE(sendfile)
HEADRACE_SENDFILE(sendfile64)

HEADRACE_EXPORT(ssize_t, readv, int fd, const iovec* parts, int count) {
  return reading(fd, 1, [&] { return next().readv(fd, parts, count); });
}

HEADRACE_EXPORT(ssize_t, copy_file_range, int fd, off_t* at, int to, off_t* to_at, size_t bytes,
                unsigned flags) {
  return reading(fd, 1, [&] { return next().copy_file_range(fd, at, to, to_at, bytes, flags); });
}

// What `read` becomes with _FORTIFY_SOURCE; the library's own check comes after ours.
HEADRACE_EXPORT(ssize_t, __read_chk, int fd, void* out, size_t bytes, size_t room) {
  if (bytes > room) abort();
  return reading(fd, 1, [&] { return next().read(fd, out, bytes); });
}

HEADRACE_EXPORT(ssize_t, __pread64_chk, int fd, void* out, size_t bytes, off_t at, size_t room) {
  if (bytes > room) abort();
  return reading(fd, 1, [&] { return next().pread(fd, out, bytes, at); });
}

// -- ends
// --------------------------------------------------------------------------------------------

#define HEADRACE_CLOSE(symbol)           \
  HEADRACE_EXPORT(int, symbol, int fd) { \
    forget(fd);                          \
    return next().close(fd);             \
  }

HEADRACE_CLOSE(close)
HEADRACE_CLOSE(__close)

HEADRACE_EXPORT(int, fclose, FILE* stream) {
  forget(descriptor_of(stream));
  return next().fclose(stream);
}

HEADRACE_EXPORT(int, dup2, int fd, int to) {
  const int found = next().dup2(fd, to);
  copied(fd, found);
  return found;
}

HEADRACE_EXPORT(int, dup3, int fd, int to, int flags) {
  const int found = next().dup3(fd, to, flags);
  copied(fd, found);
  return found;
}
