#include "preload/open_ring.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "core/error.h"

namespace headrace::preload {
namespace {

// How long a report that was begun is waited for: its writer is a handful of instructions away from
// the end, stopped, or dead.
constexpr long kUnfinishedNs = 2'000'000;
constexpr double kWaitMaxS = 3600;

uint64_t checked(uint64_t capacity) {
  if (capacity >= 2 && capacity <= kRingCapacityMax && (capacity & (capacity - 1)) == 0) {
    return capacity;
  }
  throw Error(ErrorKind::kInvalidArgument, "capacity is " + std::to_string(capacity) +
                                               ", expected a power of two up to " +
                                               std::to_string(kRingCapacityMax));
}

RingTotals totals_of(const RingHeader& ring) {
  RingTotals totals{};
  for (uint32_t i = 0; i < kOpenedKinds; ++i) {
    totals.opened[i] = ring.totals[i].load(std::memory_order_relaxed);
  }
  totals.copy_bytes = ring.copy_bytes.load(std::memory_order_relaxed);
  totals.original_bytes = ring.original_bytes.load(std::memory_order_relaxed);
  totals.tier_copies = ring.tier_copies.load(std::memory_order_relaxed);
  totals.stats = ring.stats.load(std::memory_order_relaxed);
  return totals;
}

}  // namespace

OpenRing::OpenRing(uint64_t capacity)
    : capacity_(checked(capacity)),
      memory_("headrace-opens", ring_nbytes(capacity), SharedMemory::Others::kMayWrite) {
  RingHeader& ring = header();
  ring.version = kRingVersion;
  ring.capacity = capacity_;
  ring.magic = kRingMagic;
}

// False: nothing came.
bool OpenRing::waits_for_more(double timeout_s) {
  RingHeader& ring = header();
  if (!(timeout_s > 0)) return false;
  ring.asleep.store(1, std::memory_order_seq_cst);
  if (ring.head.load(std::memory_order_seq_cst) == tail_) {
    const double bounded = std::min(timeout_s, kWaitMaxS);
    const timespec wait{static_cast<time_t>(bounded),
                        static_cast<long>(std::fmod(bounded, 1.0) * 1e9)};
    syscall(SYS_futex, &ring.asleep, FUTEX_WAIT, 1, &wait, nullptr, 0);
  }
  ring.asleep.store(0, std::memory_order_relaxed);
  return ring.head.load(std::memory_order_acquire) != tail_;
}

// Takes what is there, up to one round of the ring. False: the next report is begun, not finished.
// Those that were begun before place `given_up` are not waited for.
bool OpenRing::collect(std::vector<OpenReport>* reports, uint64_t given_up) {
  const uint64_t head = header().head.load(std::memory_order_acquire);
  // Backwards, or further than anyone can have written: somebody has written nonsense. Go on there.
  const uint64_t ahead = head - tail_;
  if (ahead > capacity_) {
    const uint64_t skipped = head - capacity_ - tail_;
    if (ahead < (uint64_t{1} << 62)) lost_.fetch_add(skipped, std::memory_order_relaxed);
    tail_ = head - capacity_;
  }
  const RingSlot* slots = ring_slots(memory_.data());
  for (; tail_ != head; ++tail_) {
    const RingSlot& slot = slots[tail_ & (capacity_ - 1)];
    const uint64_t who = slot.who.load(std::memory_order_acquire);
    const uint64_t file = slot.file.load(std::memory_order_acquire);
    const auto expected = static_cast<uint32_t>(tail_ + 1);
    const auto tag = static_cast<uint32_t>(who >> 32);
    if (tag != expected || static_cast<uint32_t>(file >> 32) != expected) {
      const bool begun = static_cast<int32_t>(tag - expected) < 0;
      if (begun && static_cast<int64_t>(given_up - tail_) <= 0) return false;
      lost_.fetch_add(1, std::memory_order_relaxed);  // never finished, or overwritten
      continue;
    }
    const uint32_t what = who & 15;
    if (what >= kOpenedKinds) continue;  // nobody of ours
    const auto number = static_cast<uint32_t>(file);
    reports->push_back({number == ~uint32_t{0} ? -1 : static_cast<int64_t>(number),
                        static_cast<int64_t>(static_cast<uint32_t>(who) >> 4), what,
                        static_cast<int64_t>(tail_)});
  }
  return true;
}

std::vector<OpenReport> OpenRing::take(double timeout_s) {
  std::vector<OpenReport> reports;
  bool finished = collect(&reports, tail_);
  if (finished && reports.empty() && waits_for_more(timeout_s)) {
    finished = collect(&reports, tail_);
  }
  if (finished || !reports.empty()) return reports;  // the rest may be finished next time
  const uint64_t begun = header().head.load(std::memory_order_acquire);
  const timespec pause{0, kUnfinishedNs};
  nanosleep(&pause, nullptr);
  collect(&reports, begun);
  return reports;
}

RingTotals OpenRing::totals() const { return totals_of(header()); }

RingTotals read_totals(int fd) {
  struct stat status;
  void* memory = MAP_FAILED;
  if (fstat(fd, &status) == 0 && status.st_size >= static_cast<off_t>(sizeof(RingHeader)) &&
      (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK) != 0) {
    memory = mmap(nullptr, sizeof(RingHeader), PROT_READ, MAP_SHARED, fd, 0);
  }
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::kInvalidArgument,
                "descriptor " + std::to_string(fd) + " is no ring of opens");
  }
  const auto* header = static_cast<const RingHeader*>(memory);
  const bool sound = header->magic == kRingMagic && header->version == kRingVersion;
  const RingTotals totals = totals_of(*header);
  munmap(memory, sizeof(RingHeader));
  if (!sound) {
    throw Error(ErrorKind::kInvalidArgument,
                "descriptor " + std::to_string(fd) + " is no ring of opens");
  }
  return totals;
}

}  // namespace headrace::preload
