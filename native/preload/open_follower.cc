#include "preload/open_follower.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "core/error.h"

namespace headrace::preload {
namespace {

void* map(int fd, uint64_t* nbytes) {
  struct stat status;
  if (fstat(fd, &status) != 0 || (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0) return nullptr;
  *nbytes = static_cast<uint64_t>(status.st_size);
  void* memory = mmap(nullptr, *nbytes, PROT_READ, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

OpenFollower::OpenFollower(int board_fd, int ring_fd)
    : board_(map(board_fd, &board_nbytes_)), ring_(map(ring_fd, &ring_nbytes_)) {
  const auto* ring = static_cast<const RingHeader*>(ring_);
  const bool sound = board_ != nullptr && ring != nullptr && view_.check(board_, board_nbytes_) &&
                     ring_nbytes_ >= sizeof(RingHeader) && ring->magic == kRingMagic &&
                     ring->capacity >= 2 && ring->capacity <= kRingCapacityMax &&
                     (ring->capacity & (ring->capacity - 1)) == 0 &&
                     ring_nbytes(ring->capacity) <= ring_nbytes_;
  if (sound) {
    capacity_ = ring->capacity;
    return;
  }
  if (board_ != nullptr) munmap(board_, board_nbytes_);
  if (ring_ != nullptr) munmap(ring_, ring_nbytes_);
  throw Error(ErrorKind::kInvalidArgument, "descriptors " + std::to_string(board_fd) + " and " +
                                               std::to_string(ring_fd) + " are no board and ring");
}

OpenFollower::~OpenFollower() {
  munmap(board_, board_nbytes_);
  munmap(ring_, ring_nbytes_);
}

std::vector<std::string> OpenFollower::take() {
  std::vector<std::string> paths;
  const uint64_t head = static_cast<RingHeader*>(ring_)->head.load(std::memory_order_acquire);
  if (head - tail_ > capacity_) tail_ = head - capacity_;
  const RingSlot* slots = ring_slots(ring_);
  for (; tail_ != head; ++tail_) {
    const RingSlot& slot = slots[tail_ & (capacity_ - 1)];
    const uint64_t who = slot.who.load(std::memory_order_acquire);
    const uint64_t file = slot.file.load(std::memory_order_acquire);
    const auto expected = static_cast<uint32_t>(tail_ + 1);
    if (static_cast<uint32_t>(who >> 32) != expected) continue;
    if (static_cast<uint32_t>(file >> 32) != expected) continue;
    const auto what = static_cast<Opened>(who & 15);
    if (what != Opened::kOriginal && what != Opened::kCopy) continue;
    const auto number = static_cast<uint32_t>(file);
    if (number >= view_.header().files) continue;
    uint32_t bytes;
    const char* name = view_.name(number, &bytes);
    if (name != nullptr) paths.emplace_back(name, bytes);
  }
  return paths;
}

}  // namespace headrace::preload
