#include "core/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>
#include <utility>

#include "core/error.h"

namespace headrace {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Eight size classes per power of two: at most 12.5 % is wasted, and batches whose sizes differ a
// little find each other's buffers.
size_t size_class(size_t bytes) {
  const size_t least = std::max<size_t>(bytes, 4096);
  const size_t step = std::max<size_t>(std::bit_floor(least) / 8, 4096);
  return (least + step - 1) / step * step;
}

}  // namespace

std::shared_ptr<Arena> Arena::make(size_t retained_bytes_max) {
  return std::shared_ptr<Arena>(new Arena(retained_bytes_max));
}

Arena::Arena(size_t retained_bytes_max)
    : retained_bytes_max_(retained_bytes_max), owner_pid_(getpid()) {}

Arena::~Arena() {
  for (const Buffer& buffer : free_) munmap(buffer.data, buffer.capacity);
}

BufferPtr Arena::acquire(size_t bytes) {
  const size_t capacity = size_class(bytes);
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
      for (size_t i = 0; i < free_.size();) {
        if (free_[i].capacity >= bytes / 2 && free_[i].capacity < bytes) {
          retire_locked(i, &surplus);
        } else {
          ++i;
        }
      }
      buffer.id = next_id_++;
      mapped_bytes_ += capacity;
    }
  }
  for (const Buffer& b : surplus) munmap(b.data, b.capacity);
  if (buffer.data == nullptr) {
    void* data =
        mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      if (!foreign) {
        std::lock_guard lock(mutex_);
        mapped_bytes_ -= capacity;
      }
      throw Error(ErrorKind::kVolume,
                  "cannot allocate a batch buffer of " + std::to_string(capacity) +
                      " bytes; use a smaller batch or raise the job's memory limit",
                  {}, -1, ENOMEM);
    }
    if (capacity >= kHugePageBytes) madvise(data, capacity, MADV_HUGEPAGE);
    buffer.data = static_cast<std::byte*>(data);
    buffer.capacity = capacity;
  }
  return BufferPtr(new Buffer(buffer), [arena = shared_from_this()](const Buffer* b) {
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
  for (auto& [listener, inbox] : inboxes_) inbox.push_back(buffer.id);
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
    free_.push_back(buffer);
    free_bytes_ += buffer.capacity;
    // The oldest go first: they have the sizes that nobody asked for lately.
    while (free_bytes_ > retained_bytes_max_) retire_locked(0, &surplus);
  }
  for (const Buffer& b : surplus) munmap(b.data, b.capacity);
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
    retained_bytes_max_ = bytes;
    while (free_bytes_ > retained_bytes_max_) retire_locked(0, &surplus);
  }
  for (const Buffer& b : surplus) munmap(b.data, b.capacity);
}

size_t Arena::mapped_bytes() const {
  std::lock_guard lock(mutex_);
  return mapped_bytes_;
}

}  // namespace headrace
