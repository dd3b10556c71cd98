#include "core/mapping.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "core/error.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HEADRACE_ASAN 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define HEADRACE_ASAN 1
#endif
#if HEADRACE_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace headrace {
namespace {

// Slots rather than a growing table: a signal handler may only touch what is always valid.
constexpr int kMappingsMax = 4096;

struct Slot {
  std::atomic<uintptr_t> begin{0};  // 0: free
  std::atomic<uintptr_t> end{0};
  std::atomic<uint64_t> damaged{0};
};
std::array<Slot, kMappingsMax> g_slots;
std::atomic<int> g_slots_used{0};  // slots at or above this were never used
std::mutex g_mutex;                // guards taking and giving back of slots
struct sigaction g_previous;       // where foreign faults go

const long kPageBytes = sysconf(_SC_PAGESIZE);

// Files are mapped where AddressSanitizer watches nothing. Built with it, a mapping has a page that
// nobody may touch behind it, and what its last page holds beyond the file is poisoned: whoever
// reads past the end of a hostile file is caught in tests and by the fuzzers.
#if HEADRACE_ASAN
size_t whole_pages(size_t size) {
  const auto page = static_cast<size_t>(kPageBytes);
  return (size + page - 1) / page * page;
}
void* map_file(int fd, size_t size) {
  const size_t reserved = whole_pages(size) + static_cast<size_t>(kPageBytes);
  void* data = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return data;
  if (mmap(data, size, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    munmap(data, reserved);
    errno = error;
    return MAP_FAILED;
  }
  __asan_poison_memory_region(static_cast<char*>(data) + size, reserved - size);
  return data;
}
void unmap_file(const std::byte* data, size_t size) {
  const size_t reserved = whole_pages(size) + static_cast<size_t>(kPageBytes);
  __asan_unpoison_memory_region(data, reserved);
  munmap(const_cast<std::byte*>(data), reserved);
}
#else
void* map_file(int fd, size_t size) { return mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0); }
void unmap_file(const std::byte* data, size_t size) { munmap(const_cast<std::byte*>(data), size); }
#endif

bool replace_page(uintptr_t address) {
  const int used = g_slots_used.load(std::memory_order_acquire);
  for (int i = 0; i < used; ++i) {
    Slot& slot = g_slots[i];
    const uintptr_t begin = slot.begin.load(std::memory_order_acquire);
    if (begin == 0 || address < begin || address >= slot.end.load(std::memory_order_acquire)) {
      continue;
    }
    // Counted first: whoever reads zeros from the new page must find the damage afterwards.
    slot.damaged.fetch_add(1, std::memory_order_acq_rel);
    void* page = reinterpret_cast<void*>(address & ~static_cast<uintptr_t>(kPageBytes - 1));
    // The bare system call: it takes no lock of ours, of libc's or of a sanitizer's.
    const long placed = syscall(SYS_mmap, page, kPageBytes, PROT_READ,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (reinterpret_cast<void*>(placed) != page) return false;
    return true;
  }
  return false;
}

// The thread that is passing a foreign fault on. A handler in front of ours may have ours as *its*
// previous one (Python's faulthandler restores it and raises again): without this the two would
// call each other until the stack ends.
std::atomic<long> g_passing_thread{0};

void pass_on(int number, siginfo_t* info, void* context) {
  const long thread = syscall(SYS_gettid);
  const bool came_back = g_passing_thread.load() == thread;
  if (!came_back && (g_previous.sa_flags & SA_SIGINFO) && g_previous.sa_sigaction != nullptr) {
    g_passing_thread.store(thread);
    g_previous.sa_sigaction(number, info, context);
    g_passing_thread.store(0);
  } else if (!came_back && g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_passing_thread.store(thread);
    g_previous.sa_handler(number);
    g_passing_thread.store(0);
  } else if (info->si_code > 0) {
    signal(number, SIG_DFL);  // the faulting instruction runs again and ends the process
  } else if (came_back || g_previous.sa_handler == SIG_DFL) {
    signal(number, SIG_DFL);
    raise(number);  // it was sent, not met: nothing would raise it again
  }
}

void on_sigbus(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  if (info->si_code <= 0 || !replace_page(reinterpret_cast<uintptr_t>(info->si_addr))) {
    pass_on(number, info, context);
  }
  errno = saved_errno;
}

// A child that is forked while another thread maps a file must find the lock free.
[[maybe_unused]] const int g_at_fork =
    pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); }, [] { g_mutex.unlock(); });

int take_slot(uintptr_t begin, size_t size) {
  std::lock_guard lock(g_mutex);
  for (int i = 0; i < kMappingsMax; ++i) {
    Slot& slot = g_slots[i];
    if (slot.begin.load(std::memory_order_relaxed) != 0) continue;
    slot.damaged.store(0, std::memory_order_relaxed);
    slot.end.store(begin + size, std::memory_order_relaxed);
    slot.begin.store(begin, std::memory_order_release);
    if (i >= g_slots_used.load(std::memory_order_relaxed)) {
      g_slots_used.store(i + 1, std::memory_order_release);
    }
    return i;
  }
  return -1;
}

}  // namespace

void guard_mappings() {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) &&
      now.sa_sigaction == on_sigbus) {
    return;
  }
  std::lock_guard lock(g_mutex);
  sigaction(SIGBUS, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus) return;
  g_previous = now;
  struct sigaction action;
  std::memset(&action, 0, sizeof action);
  action.sa_sigaction = on_sigbus;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

std::unique_ptr<Mapping> Mapping::of_file(int fd, size_t size, const std::string& path) {
  if (size == 0) return std::unique_ptr<Mapping>(new Mapping(nullptr, 0, -1));
  void* data = map_file(fd, size);
  if (data == MAP_FAILED) {
    const int error = errno;
    throw Error(ErrorKind::kVolume,
                path + ": cannot map " + std::to_string(size) + " bytes: " + strerror(error), path,
                -1, error);
  }
  const int slot = take_slot(reinterpret_cast<uintptr_t>(data), size);
  if (slot < 0) {
    unmap_file(static_cast<const std::byte*>(data), size);
    throw Error(ErrorKind::kVolume,
                path + ": more than " + std::to_string(kMappingsMax) + " files are mapped", path,
                -1, EMFILE);
  }
  guard_mappings();
  return std::unique_ptr<Mapping>(new Mapping(static_cast<const std::byte*>(data), size, slot));
}

Mapping::~Mapping() {
  if (slot_ < 0) return;
  {
    // Before the addresses are free: faults in what is mapped there next are not ours.
    std::lock_guard lock(g_mutex);
    g_slots[slot_].begin.store(0, std::memory_order_release);
  }
  unmap_file(data_, size_);
}

uint64_t Mapping::damaged() const {
  return slot_ < 0 ? 0 : g_slots[slot_].damaged.load(std::memory_order_acquire);
}

}  // namespace headrace
