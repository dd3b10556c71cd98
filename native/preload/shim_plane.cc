#include "preload/shim_plane.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "preload/run_layout.h"
#include "preload/shim_calls.h"

namespace headrace::preload::shim {
namespace {

constexpr int kSealsNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
// Boards that are mapped at a time: the newest, and the ones before it.
constexpr uint32_t kPlanesMax = 4;

constinit Plane g_planes[kPlanesMax];
std::atomic<Plane*> g_current{nullptr};
std::atomic<uint32_t> g_epoch{0};  // that `g_current` is of
std::atomic_flag g_changing = ATOMIC_FLAG_INIT;
std::atomic<const RunPage*> g_page{nullptr};
SlowState* g_slow = nullptr;
uint32_t g_launcher = 0;
std::atomic<uint32_t> g_process{0};
std::atomic<bool> g_elsewhere{false};

// Maps the whole of a memfd that cannot shrink and has this inode; null: it is not that.
void* map_sealed(const char* path, uint64_t inode, bool writable, uint64_t least,
                 uint64_t* nbytes) {
  const int access = writable ? O_RDWR : O_RDONLY;
  const int fd = kernel_open(AT_FDCWD, path, access | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
  if (fd < 0) return nullptr;
  struct stat status;
  void* memory = nullptr;
  if (kernel_fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_ino == inode &&
      (fcntl(fd, F_GET_SEALS) & kSealsNeeded) == kSealsNeeded &&
      static_cast<uint64_t>(status.st_size) >= least) {
    *nbytes = static_cast<uint64_t>(status.st_size);
    memory =
        mmap(nullptr, *nbytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) memory = nullptr;
  }
  kernel_close(fd);
  return memory;
}

// What the page says, whole; false: it is being written.
struct Where {
  uint32_t epoch, process, board_fd, ring_fd;
  uint64_t board_inode, ring_inode;
};

bool read_page(const RunPage& page, Where* where) {
  where->epoch = page.epoch.load(std::memory_order_acquire);
  where->process = page.process.load(std::memory_order_acquire);
  where->board_fd = page.board_fd.load(std::memory_order_acquire);
  where->ring_fd = page.ring_fd.load(std::memory_order_acquire);
  where->board_inode = page.board_inode.load(std::memory_order_acquire);
  where->ring_inode = page.ring_inode.load(std::memory_order_acquire);
  return where->epoch % 2 == 0 && page.epoch.load(std::memory_order_relaxed) == where->epoch;
}

void unmap(Plane* plane) {
  if (plane->board_memory != nullptr) munmap(plane->board_memory, plane->board_nbytes);
  if (plane->ring != nullptr) munmap(plane->ring, plane->ring_nbytes);
  plane->board_memory = nullptr;
  plane->ring = nullptr;
}

// A place for another plane: unused, or the oldest that nobody is inside of.
Plane* free_plane() {
  static uint32_t oldest = 0;
  for (uint32_t i = 0; i < kPlanesMax; ++i) {
    Plane& plane = g_planes[oldest++ % kPlanesMax];
    if (plane.board_memory == nullptr) return &plane;
    uint32_t nobody = 0;
    if (plane.users.compare_exchange_strong(nobody, kNotMapped, std::memory_order_seq_cst)) {
      unmap(&plane);
      return &plane;
    }
  }
  return nullptr;
}

bool map_ring(Plane* plane, const Where& where) {
  char path[64];
  descriptor_path(path, g_launcher, where.ring_fd);
  plane->ring = map_sealed(path, where.ring_inode, true, sizeof(RingHeader), &plane->ring_nbytes);
  if (plane->ring == nullptr) return false;
  const auto* header = static_cast<const RingHeader*>(plane->ring);
  plane->ring_capacity = header->capacity;
  const uint64_t capacity = plane->ring_capacity;
  if (header->magic == kRingMagic && header->version == kRingVersion && capacity >= 2 &&
      capacity <= kRingCapacityMax && (capacity & (capacity - 1)) == 0 &&
      ring_nbytes(capacity) <= plane->ring_nbytes) {
    return true;
  }
  munmap(plane->ring, plane->ring_nbytes);
  plane->ring = nullptr;
  return false;
}

Plane* attach(const Where& where) {
  if (where.process == 0) return nullptr;
  for (Plane& plane : g_planes) {  // the daemon is back, or was not gone
    if (plane.users.load(std::memory_order_acquire) < kNotMapped &&
        plane.board_inode == where.board_inode && plane.ring_inode == where.ring_inode &&
        plane.process == where.process) {
      return &plane;
    }
  }
  Plane* plane = free_plane();
  if (plane == nullptr) {
    errno = EBUSY;
    return nullptr;
  }
  char path[64];
  descriptor_path(path, g_launcher, where.board_fd);
  plane->board_memory =
      map_sealed(path, where.board_inode, false, sizeof(BoardHeader), &plane->board_nbytes);
  if (plane->board_memory == nullptr) return nullptr;
  plane->board_inode = where.board_inode;
  plane->ring_inode = where.ring_inode;
  plane->process = where.process;
  if (!plane->board.check(plane->board_memory, plane->board_nbytes)) {
    unmap(plane);
    return nullptr;
  }
  map_ring(plane, where);  // without it nobody hears of us; files are served all the same
  plane->users.fetch_sub(kNotMapped, std::memory_order_release);
  return plane;
}

// Another epoch: look for its plane.
void change(const RunPage& page) {
  if (g_changing.test_and_set(std::memory_order_acquire)) return;  // another thread does
  const int saved_errno = errno;
  Where where;
  if (read_page(page, &where) && where.epoch != g_epoch.load(std::memory_order_relaxed)) {
    g_current.store(nullptr, std::memory_order_seq_cst);
    errno = 0;
    Plane* plane = attach(where);
    g_current.store(plane, std::memory_order_seq_cst);
    // Out of descriptors, memory or planes: the next call tries again.
    const bool again = plane == nullptr &&
                       (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == EBUSY);
    if (!again) g_epoch.store(where.epoch, std::memory_order_release);
    if (plane != nullptr) plane->report(-1, Opened::kAttached);
  }
  g_changing.clear(std::memory_order_release);
  errno = saved_errno;
}

// Takes up the run page's newest epoch. False: this process belongs to no run.
bool is_current() {
  const RunPage* page = g_page.load(std::memory_order_acquire);
  if (page == nullptr) return false;
  const uint32_t epoch = page->epoch.load(std::memory_order_acquire);
  if (epoch != g_epoch.load(std::memory_order_acquire)) change(*page);
  return true;
}

// "/proc/LAUNCHER/fd/N:INODE": the inode; the path goes to `path`. 0: it is not that.
uint64_t parse_run(const char* text, char* path, size_t path_bytes) {
  const char* colon = strchr(text, ':');
  if (colon == nullptr || strncmp(text, "/proc/", 6) != 0) return 0;
  const auto bytes = static_cast<size_t>(colon - text);
  if (bytes >= path_bytes) return 0;
  memcpy(path, text, bytes);
  path[bytes] = '\0';
  return strtoull(colon + 1, nullptr, 10);
}

// Whether this process has the root folder and the mounts that the launcher has. In a container or
// a `chroot` a path of the board may lead to another file, and only a look at it tells.
bool sees_the_same() {
  for (const char* what : {"/root", "/ns/mnt"}) {
    char theirs[64] = "/proc/";
    char ours[32] = "/proc/self";
    strcpy(decimal(theirs + strlen(theirs), g_launcher), what);
    strcat(ours, what);
    struct stat a, b;
    if (kernel_fstatat(AT_FDCWD, theirs, &a, 0) != 0 ||
        kernel_fstatat(AT_FDCWD, ours, &b, 0) != 0 || a.st_dev != b.st_dev ||
        a.st_ino != b.st_ino) {
      return false;
    }
  }
  return true;
}

void find_run_page() {
  const char* run = getenv("HEADRACE_RUN");
  char path[64];
  const uint64_t inode = run == nullptr ? 0 : parse_run(run, path, sizeof path);
  if (inode == 0) return;
  g_launcher = static_cast<uint32_t>(strtoul(path + 6, nullptr, 10));
  uint64_t nbytes;
  const auto* page =
      static_cast<const RunPage*>(map_sealed(path, inode, false, sizeof(RunPage), &nbytes));
  if (page == nullptr || page->magic != kRunMagic || page->version != kRunVersion) return;
  if (page->slow_fd != ~uint32_t{0}) {
    char slow_path[64];
    descriptor_path(slow_path, g_launcher, page->slow_fd);
    auto* slow = static_cast<SlowState*>(
        map_sealed(slow_path, page->slow_inode, true, sizeof(SlowState), &nbytes));
    if (slow != nullptr && slow->magic == kSlowMagic) g_slow = slow;
  }
  g_elsewhere.store(!sees_the_same(), std::memory_order_relaxed);
  g_page.store(page, std::memory_order_release);
}

// Whether the copy with this identity is the file's on a board that nobody keeps up. A memfd's is
// never used again, that of a file on a local disk may be: its name must lead there, which is made
// of what the original was. Of an entry that was being written at the end nothing is known.
bool is_still(const BoardView& board, int64_t number, uint64_t device, uint64_t inode) {
  const CopyPlace place = board.place(number);
  if (place.copy != Copy::kTier) return place.generation % 2 == 0;
  const int saved_errno = errno;
  char path[512];
  struct stat status;
  const bool still = board.tier_path(number, place.where, path, sizeof path) &&
                     kernel_fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                     status.st_dev == device && status.st_ino == inode;
  errno = saved_errno;
  return still;
}

void after_fork() {
  g_process.store(static_cast<uint32_t>(getpid()), std::memory_order_relaxed);
  g_changing.clear(std::memory_order_release);  // whoever changed it is not here
}

// With a high priority: other libraries' constructors may open files.
__attribute__((constructor(101))) void begin() {
  const int saved_errno = errno;
  calls();
  g_process.store(static_cast<uint32_t>(getpid()), std::memory_order_relaxed);
  pthread_atfork(nullptr, nullptr, after_fork);
  find_run_page();
  errno = saved_errno;
}

}  // namespace

bool Plane::enter() {
  if (users.load(std::memory_order_relaxed) >= kNotMapped) return false;
  if (users.fetch_add(1, std::memory_order_seq_cst) < kNotMapped) return true;
  leave();
  return false;
}

Held::Held() : plane_(nullptr) {
  if (!is_current()) return;
  Plane* plane = g_current.load(std::memory_order_acquire);
  if (plane == nullptr || !plane->enter()) return;
  if (g_current.load(std::memory_order_seq_cst) == plane && plane->board.open()) {
    plane_ = plane;
  } else {
    plane->leave();
  }
}

OpenCopy::OpenCopy(uint64_t device, uint64_t inode) : Held(nullptr) {
  if (!is_current()) return;
  for (Plane& plane : g_planes) {
    if (!plane.enter()) continue;
    const BoardView& board = plane.board;
    number_ = board.has_device(device) ? board.find_copy(device, inode) : -1;
    if (number_ >= 0 && (&plane == g_current.load(std::memory_order_relaxed) ||
                         is_still(board, number_, device, inode))) {
      plane_ = &plane;
      return;
    }
    plane.leave();
  }
}

bool OpenCopy::possible() {
  if (!is_current()) return false;
  bool possible = false;
  for (Plane& plane : g_planes) {
    if (possible || !plane.enter()) continue;
    possible = plane.board.has_copies();
    plane.leave();
  }
  return possible;
}

void Plane::report(int64_t file, Opened what) const {
  if (ring == nullptr) return;
  ring_report(ring, ring_capacity, file, g_process.load(std::memory_order_relaxed), what);
}

bool Plane::immutable() const {
  return board.immutable() && !g_elsewhere.load(std::memory_order_relaxed);
}

bool simulating() { return g_slow != nullptr; }

void look_elsewhere() { g_elsewhere.store(true, std::memory_order_relaxed); }

const char kShimName[] = "libheadrace_preload";

void report_blind() {
  const Held plane;
  if (plane) plane->report(-1, Opened::kBlind);
}

void simulate_whole_file(uint64_t bytes) {
  if (g_slow == nullptr) return;
  const int saved_errno = errno;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t now_ns = now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  int64_t due_ns = slow_whole_file(*g_slow, now_ns, bytes);
  // Whatever stands in that memory, nobody waits for ever.
  constexpr int64_t kWaitMaxNs = 3600 * int64_t{1'000'000'000};
  if (due_ns > now_ns + kWaitMaxNs) due_ns = now_ns + kWaitMaxNs;
  const timespec due{due_ns / 1'000'000'000, due_ns % 1'000'000'000};
  while (due_ns > now_ns &&
         clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr) == EINTR) {
  }
  errno = saved_errno;
}

}  // namespace headrace::preload::shim
