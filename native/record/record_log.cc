#include "record/record_log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <new>

#include "preload/shim_calls.h"
#include "record/record_files.h"

namespace headrace::record {
namespace {

using preload::shim::kernel_close;
using preload::shim::kernel_open;

constexpr uint32_t kWindowsMax = 4096;
constexpr uint64_t kSlotsDefault = 16 << 20;
constexpr int kYields = 200;
constexpr uint64_t kTextMax = 4096;
constexpr uint64_t kSampled = 64;  // one call in so many is timed, for what logging costs

enum State : uint32_t { kIdle, kOpening, kOpen, kFailed };

char g_folder[512];
char g_path[600];
uint64_t g_slots_max = kSlotsDefault;
std::atomic<bool> g_recording{false};
std::atomic<uint32_t> g_state{kIdle};
std::atomic<int> g_process{0};
LogHeader* g_header = nullptr;
std::atomic<Slot*> g_windows[kWindowsMax];
std::atomic<uint8_t> g_mapping[kWindowsMax];  // somebody is at it, or it cannot be had

thread_local uint32_t t_thread __attribute__((tls_model("initial-exec"))) = 0;

uint32_t thread_id() {
  if (t_thread == 0) t_thread = static_cast<uint32_t>(syscall(SYS_gettid));
  return t_thread;
}

// Bytes of the file that are really there: writing to a hole of a full disk would be SIGBUS, and
// beyond the process's own limit SIGXFSZ.
bool reserve(int fd, uint64_t offset, uint64_t bytes) {
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < offset + bytes) return false;
  if (syscall(SYS_fallocate, fd, 0, offset, bytes) == 0) return true;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return false;
  static const char kZeros[4096] = {};
  for (uint64_t at = 0; at < bytes; at += sizeof kZeros) {
    if (syscall(SYS_pwrite64, fd, kZeros, sizeof kZeros, offset + at) != sizeof kZeros)
      return false;
  }
  return true;
}

void* map(int fd, uint64_t offset, uint64_t bytes) {
  void* memory = reinterpret_cast<void*>(
      syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset));
  return memory == MAP_FAILED ? nullptr : memory;
}

void* reserve_and_map(uint64_t offset, uint64_t bytes, int flags) {
  const int fd = kernel_open(AT_FDCWD, g_path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
  if (fd < 0) return nullptr;
  void* memory = reserve(fd, offset, bytes) ? map(fd, offset, bytes) : nullptr;
  kernel_close(fd);
  return memory;
}

void read_command(LogHeader* header) {
  const int fd = kernel_open(AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return;
  const long bytes = syscall(SYS_read, fd, header->command, kCommandBytes);
  if (bytes > 0) header->command_bytes = static_cast<uint32_t>(bytes);
  kernel_close(fd);
}

int64_t clock_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

int64_t clock_cost_ns() {
  constexpr int kTimes = 32;
  const int64_t begin = now_ns();
  for (int i = 0; i < kTimes; ++i) now_ns();
  return (now_ns() - begin) / (kTimes + 1);
}

LogHeader* make_log() {
  char* at = g_path;
  const size_t folder_bytes = strlen(g_folder);
  memcpy(at, g_folder, folder_bytes);
  at += folder_bytes;
  memcpy(at, "/log-", 5);
  at = preload::shim::decimal(at + 5, static_cast<uint64_t>(getpid()));
  *at++ = '-';
  at = preload::shim::decimal(at, static_cast<uint64_t>(now_ns()));
  *at = '\0';
  void* memory = reserve_and_map(0, kHeaderBytes, O_CREAT | O_EXCL);
  if (memory == nullptr) return nullptr;
  auto* header = new (memory) LogHeader{};
  header->version = kLogVersion;
  header->process = static_cast<uint32_t>(getpid());
  header->parent = static_cast<uint32_t>(getppid());
  header->began_ns = now_ns();
  header->unix_ns = clock_of(CLOCK_REALTIME);
  header->slots_max = g_slots_max;
  header->clock_ns = clock_cost_ns();
  read_command(header);
  header->magic = kLogMagic;
  return header;
}

// The process's log, made when it is first needed; null: there is none, now or for good.
LogHeader* log_header() {
  uint32_t state = g_state.load(std::memory_order_acquire);
  if (state == kOpen) return g_header;
  if (state != kIdle || !g_state.compare_exchange_strong(state, kOpening)) return nullptr;
  g_header = make_log();
  g_state.store(g_header == nullptr ? kFailed : kOpen, std::memory_order_release);
  return g_header;
}

Slot* map_window(uint64_t window) {
  void* memory = reserve_and_map(kHeaderBytes + window * kWindowBytes, kWindowBytes, 0);
  auto* slots = static_cast<Slot*>(memory);
  g_windows[window].store(slots, std::memory_order_release);
  return slots;
}

// A window's slots; null: it cannot be had, or somebody else is just making it, for too long.
Slot* window_slots(uint64_t window) {
  Slot* slots = g_windows[window].load(std::memory_order_acquire);
  if (slots != nullptr) return slots;
  uint8_t nobody = 0;
  if (g_mapping[window].compare_exchange_strong(nobody, 1)) return map_window(window);
  for (int i = 0; i < kYields && slots == nullptr; ++i) {
    sched_yield();
    slots = g_windows[window].load(std::memory_order_acquire);
  }
  return slots;
}

Slot* slot_at(uint64_t index) {
  const uint64_t window = index / kWindowSlots;
  if (window >= kWindowsMax) return nullptr;
  Slot* slots = window_slots(window);
  // Early, so that hardly ever another thread has to wait for it.
  if (index % kWindowSlots == kWindowSlots / 2 && window + 1 < kWindowsMax) {
    window_slots(window + 1);
  }
  return slots == nullptr ? nullptr : slots + index % kWindowSlots;
}

void write_text(uint64_t index, const char* text, uint64_t bytes) {
  for (; bytes > 0; ++index) {
    const uint64_t part = bytes < kTextBytes ? bytes : kTextBytes;
    Slot* slot = slot_at(index);
    if (slot == nullptr) return;
    memcpy(reinterpret_cast<char*>(slot) + 8, text, part);
    slot->text_bytes = static_cast<uint16_t>(part);
    slot->kind.store(static_cast<uint8_t>(Kind::kText), std::memory_order_release);
    text += part;
    bytes -= part;
  }
}

void write_slot(LogHeader* header, const Call& call) {
  const uint64_t text_bytes = call.text == nullptr ? 0 : strnlen(call.text, kTextMax);
  const uint64_t more = (text_bytes + kTextBytes - 1) / kTextBytes;
  const uint64_t index = header->used.fetch_add(1 + more, std::memory_order_relaxed);
  Slot* slot = index + more < header->slots_max ? slot_at(index) : nullptr;
  if (slot == nullptr) {
    header->lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  write_text(index + 1, call.text, text_bytes);
  slot->flags = call.flags;
  slot->text_bytes = static_cast<uint16_t>(text_bytes);
  slot->thread = thread_id();
  slot->begin_ns = call.begin_ns;
  slot->offset = call.offset;
  slot->nbytes = call.nbytes;
  slot->seconds = static_cast<float>(call.end_ns - call.begin_ns) * 1e-9F;
  slot->fd = call.fd;
  slot->kind.store(static_cast<uint8_t>(call.kind), std::memory_order_release);
  if (index % kSampled == 0) {
    const auto spent = static_cast<uint64_t>(now_ns() - call.end_ns);
    header->spent_ns.fetch_add(spent * kSampled, std::memory_order_relaxed);
  }
}

// The child has its parent's memory, and no part in its log.
void after_fork() {
  g_process.store(static_cast<int>(getpid()), std::memory_order_relaxed);
  t_thread = 0;
  LogHeader* header = g_header;
  g_header = nullptr;
  g_state.store(g_recording.load() ? kIdle : kFailed, std::memory_order_release);
  if (header != nullptr) munmap(header, kHeaderBytes);
  for (uint32_t i = 0; i < kWindowsMax; ++i) {
    g_mapping[i].store(0, std::memory_order_relaxed);
    Slot* slots = g_windows[i].exchange(nullptr, std::memory_order_relaxed);
    if (slots != nullptr) munmap(slots, kWindowBytes);
  }
  forget_all();
}

// With a high priority: other libraries' constructors may open files.
__attribute__((constructor(101))) void begin() {
  const int saved_errno = errno;
  preload::shim::calls();
  g_process.store(static_cast<int>(getpid()), std::memory_order_relaxed);
  const char* folder = getenv("HEADRACE_RECORD");
  const char* slots = getenv("HEADRACE_RECORD_SLOTS");
  if (slots != nullptr) g_slots_max = strtoull(slots, nullptr, 10);
  if (folder != nullptr && folder[0] == '/' && strlen(folder) < sizeof g_folder) {
    memcpy(g_folder, folder, strlen(folder) + 1);
    pthread_atfork(nullptr, nullptr, after_fork);
    g_recording.store(true, std::memory_order_release);
  }
  errno = saved_errno;
}

}  // namespace

bool recording() { return g_recording.load(std::memory_order_acquire); }

bool is_own_process() { return getpid() == g_process.load(std::memory_order_relaxed); }

int64_t now_ns() { return clock_of(CLOCK_MONOTONIC); }

void add(const Call& call) {
  const int saved_errno = errno;
  LogHeader* header = log_header();
  if (header != nullptr) write_slot(header, call);
  errno = saved_errno;
}

void add_blind() {
  const int saved_errno = errno;
  LogHeader* header = recording() && is_own_process() ? log_header() : g_header;
  if (header != nullptr) header->blind.fetch_add(1, std::memory_order_relaxed);
  errno = saved_errno;
}

}  // namespace headrace::record

namespace headrace::preload::shim {

const char kShimName[] = "libheadrace_record";
void report_blind() { record::add_blind(); }

}  // namespace headrace::preload::shim
