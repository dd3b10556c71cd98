#include "core/arena.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <new>
#include <string>
#include <utility>

#include "core/error.h"

namespace headrace {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which glibc's headers lack

// Eight size classes per power of two: at most 12.5 % is wasted, and batches whose sizes differ a
// little find each other's buffers.
size_t size_class(size_t bytes) {
  const size_t least = std::max<size_t>(bytes, 4096);
  const size_t step = std::max<size_t>(std::bit_floor(least) / 8, 4096);
  return (least + step - 1) / step * step;
}

std::atomic<uint64_t> next_id{1};

std::mutex retired_mutex;
std::vector<uint64_t> retired_shared;

[[noreturn]] void refuse(size_t capacity, int error, const char* advice) {
  throw Error(ErrorKind::kVolume,
              "cannot allocate a batch buffer of " + std::to_string(capacity) + " bytes; " + advice,
              {}, -1, error);
}

std::byte* map_private(size_t capacity) {
  void* data = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    refuse(capacity, ENOMEM, "use a smaller batch or raise the job's memory limit");
  }
  return static_cast<std::byte*>(data);
}

// Bytes that can be had without swapping; a guess on the safe side where the system does not say.
size_t available_bytes() {
  FILE* file = std::fopen("/proc/meminfo", "re");
  unsigned long long kibibytes = 0;
  bool found = false;
  char line[128];
  while (file != nullptr && !found && std::fgets(line, sizeof line, file) != nullptr) {
    found = std::sscanf(line, "MemAvailable: %llu", &kibibytes) == 1;
  }
  if (file != nullptr) std::fclose(file);
  return found ? kibibytes * 1024 : size_t{1} << 30;
}

// A tmpfs that nobody sees and whose files have huge pages: only who may mount gets one, else -1.
int huge_folder() {
  static const int folder = [] {
    // Without glibc's functions, which are younger (2.36) than the wheel's.
    const int fs = static_cast<int>(syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC));
    if (fs < 0) return -1;
    const auto set = [&](const char* key, const char* value) {
      return syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value, 0) == 0;
    };
    int mount = -1;
    if (set("huge", "within_size") && set("size", "0") &&
        syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) == 0) {
      constexpr unsigned kAttributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
      mount = static_cast<int>(syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, kAttributes));
    }
    ::close(fs);
    return mount;
  }();
  return folder;
}

// Allocates a file of `capacity` bytes and maps it; returns 0, or an errno value with `data` unset.
// Only a mapping can ask for huge pages: with `advise` it is allocated through the mapping (Linux
// 5.14), which takes a fault for each page where there are none, and so is not done for others.
int allocate(int fd, size_t capacity, bool advise, void** data) {
  const auto bytes = static_cast<off_t>(capacity);
  int error = advise ? 0 : posix_fallocate(fd, 0, bytes);
  if (advise && ftruncate(fd, bytes) != 0) error = errno;
  if (error != 0) return error;
  const int flags = advise ? MAP_SHARED : MAP_SHARED | MAP_POPULATE;
  void* mapped = mmap(nullptr, capacity, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (mapped == MAP_FAILED) return errno;
  if (advise) {
    madvise(mapped, capacity, MADV_HUGEPAGE);
    if (madvise(mapped, capacity, kPopulateWrite) != 0) error = errno;
    if (error == EINVAL) error = posix_fallocate(fd, 0, bytes);
  }
  if (error != 0) {
    munmap(mapped, capacity);
  } else {
    *data = mapped;
  }
  return error;
}

// Shared memory in huge pages, which a disk fills at once: 512 small ones take it a quarter to a
// third longer (a virtual disk, O_DIRECT, registered with the ring). False where we get no such
// folder. Its files cannot be sealed: others get a descriptor that can only read.
bool map_huge(size_t capacity, void** data, int* fd_out) {
  if (huge_folder() < 0) return false;
  const int fd = openat(huge_folder(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0400);
  if (fd < 0) return false;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  *fd_out = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool mapped = *fd_out >= 0 && allocate(fd, capacity, false, data) == 0;
  ::close(fd);
  if (!mapped && *fd_out >= 0) ::close(*fd_out);
  return mapped;
}

// Memory that others may map but never write. It is allocated at once: a page that cannot be had
// later would end the process with SIGBUS. What is more than half of all that is left is refused
// first, because the kernel would kill somebody rather than say no.
std::byte* map_shared(size_t capacity, bool huge, int* fd_out) {
  if (capacity > available_bytes() / 2) refuse(capacity, ENOMEM, "memory is short");
  huge = huge && capacity >= kHugePageBytes;
  void* data = MAP_FAILED;
  if (huge && map_huge(capacity, &data, fd_out)) return static_cast<std::byte*>(data);
  const int fd = memfd_create("headrace", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) refuse(capacity, errno, "too many files are open, or memory is short");
  int error = allocate(fd, capacity, huge, &data);
  // Ours is the last mapping that may write (Linux 5.1); nobody changes the size any more.
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  if (error == 0 && fcntl(fd, F_ADD_SEALS, kSeals) != 0) error = errno;
  if (error != 0) {
    if (data != MAP_FAILED) munmap(data, capacity);
    ::close(fd);
    refuse(capacity, error, "shared memory needs Linux 5.1, and room within the job's limits");
  }
  *fd_out = fd;
  return static_cast<std::byte*>(data);
}

void unmap(const Buffer& buffer) {
  if (buffer.lost) {
    // What the kernel copies there from now on meets nothing; what a device writes goes to pages
    // that nobody sees.
    mmap(buffer.data, buffer.capacity, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  } else {
    munmap(buffer.data, buffer.capacity);
  }
  if (buffer.fd < 0) return;
  ::close(buffer.fd);
  std::lock_guard lock(retired_mutex);
  try {
    retired_shared.push_back(buffer.id);
  } catch (const std::bad_alloc&) {  // whoever mapped it keeps it mapped
  }
}

}  // namespace

std::shared_ptr<Arena> Arena::make(size_t retained_bytes_max, Memory memory) {
  return std::shared_ptr<Arena>(new Arena(retained_bytes_max, memory));
}

Arena::Arena(size_t retained_bytes_max, Memory memory)
    : retained_bytes_max_(retained_bytes_max), memory_(memory), owner_pid_(getpid()) {}

Arena::~Arena() {
  for (const Buffer& buffer : free_) unmap(buffer);
}

std::vector<uint64_t> Arena::take_retired_shared() {
  std::lock_guard lock(retired_mutex);
  return std::exchange(retired_shared, {});
}

BufferPtr Arena::acquire(size_t bytes) {
  const size_t capacity = size_class(bytes);
  auto owned = std::make_unique<Buffer>();
  Buffer buffer;
  std::vector<Buffer> surplus;
  // A forked child gets memory of its own, with no identity: see `release`.
  const bool foreign = getpid() != owner_pid_;
  if (!foreign) {
    std::lock_guard lock(mutex_);
    // The smallest free buffer that fits, unless it would waste more than half of itself.
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->capacity < bytes || it->capacity > 2 * capacity) continue;
      if (best == free_.end() || it->capacity < best->capacity) best = it;
    }
    if (best != free_.end()) {
      buffer = *best;
      free_bytes_ -= best->capacity;
      free_.erase(best);
    } else {
      // Batches grew a little: free buffers that have become too small make room for one that fits,
      // so that what is mapped follows what is in use. Buffers of other sizes have other users.
      surplus.reserve(free_.size());
      for (size_t i = 0; retained_bytes_max_ != kRetainAll && i < free_.size();) {
        if (free_[i].capacity >= bytes / 2 && free_[i].capacity < bytes) {
          retire_locked(i, &surplus);
        } else {
          ++i;
        }
      }
      buffer.id = next_id++;
      mapped_bytes_ += capacity;
    }
  }
  for (const Buffer& b : surplus) unmap(b);
  if (buffer.data == nullptr) {
    try {
      const bool shared = memory_ != Memory::kPrivate && !foreign;
      buffer.data = shared ? map_shared(capacity, memory_ == Memory::kShared, &buffer.fd)
                           : map_private(capacity);
    } catch (...) {
      if (!foreign) {
        std::lock_guard lock(mutex_);
        mapped_bytes_ -= capacity;
      }
      throw;
    }
    if (capacity >= kHugePageBytes && buffer.fd < 0) {
      madvise(buffer.data, capacity, MADV_HUGEPAGE);
    }
    buffer.capacity = capacity;
  }
  *owned = buffer;
  return BufferPtr(owned.release(), [arena = shared_from_this()](const Buffer* b) {
    arena->release(*b);
    delete b;
  });
}

// Takes the i-th free buffer off the books; the caller unmaps what is in `surplus` without the
// lock.
void Arena::retire_locked(size_t i, std::vector<Buffer>* surplus) {
  const Buffer buffer = free_[i];
  free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
  free_bytes_ -= buffer.capacity;
  mapped_bytes_ -= buffer.capacity;
  for (auto& [listener, inbox] : inboxes_) {
    try {
      inbox.push_back(buffer.id);
    } catch (const std::bad_alloc&) {
      // Its engine keeps the pages pinned, under an id that nobody asks for.
    }
  }
  surplus->push_back(buffer);
}

void Arena::release(const Buffer& buffer) {
  // In a forked child the lock may be held by a thread that does not exist there.
  if (getpid() != owner_pid_) {
    munmap(buffer.data, buffer.capacity);
    return;
  }
  std::vector<Buffer> surplus;
  {
    std::lock_guard lock(mutex_);
    try {
      surplus.reserve(free_.size() + 1);
      free_.push_back(buffer);
    } catch (const std::bad_alloc&) {  // no room to remember it: given back at once
      mapped_bytes_ -= buffer.capacity;
      unmap(buffer);
      return;
    }
    free_bytes_ += buffer.capacity;
    if (buffer.abandoned || buffer.lost) retire_locked(free_.size() - 1, &surplus);
    // The oldest go first: they have the sizes that nobody asked for lately.
    while (free_bytes_ > retained_bytes_max_) retire_locked(0, &surplus);
  }
  for (const Buffer& b : surplus) unmap(b);
}

int Arena::listen() {
  std::lock_guard lock(mutex_);
  inboxes_[next_listener_];
  return next_listener_++;
}

void Arena::stop_listening(int listener) {
  std::lock_guard lock(mutex_);
  inboxes_.erase(listener);
}

std::vector<uint64_t> Arena::take_unmapped(int listener) {
  std::lock_guard lock(mutex_);
  return std::exchange(inboxes_[listener], {});
}

void Arena::retain_at_most(size_t bytes) {
  std::vector<Buffer> surplus;
  {
    std::lock_guard lock(mutex_);
    surplus.reserve(free_.size());
    retained_bytes_max_ = bytes;
    while (free_bytes_ > retained_bytes_max_) retire_locked(0, &surplus);
  }
  for (const Buffer& b : surplus) unmap(b);
}

size_t Arena::mapped_bytes() const {
  std::lock_guard lock(mutex_);
  return mapped_bytes_;
}

}  // namespace headrace
