// The open ring as it lies in shared memory: what programs opened below the roots, told to the
// daemon without waiting for it.
//
// Many processes write, one reads. A writer claims a place by adding to `head`, and fills it with
// two words that each carry the place's number: the reader takes a place only when both are there,
// so a writer that is stopped, killed or overtaken in between costs one report, never a wrong or a
// stuck one. When the reader is slow the oldest reports are overwritten. The totals are exact.
//
// Whoever may write the ring may write anything: the reader bounds all it takes from here.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace headrace::preload {

inline constexpr uint64_t kRingMagic = 0x31676e69'72647268;  // "hrdring1"
inline constexpr uint32_t kRingVersion = 1;
inline constexpr uint64_t kRingCapacityMax = uint64_t{1} << 24;

enum class Opened : uint32_t {
  kOriginal = 0,  // for reading; it has no copy
  kCopy = 1,
  kWriting = 2,   // or truncated
  kUnknown = 3,   // below a root, and not on the board
  kRefused = 4,   // it has a copy, which is not of the file as it is now, or cannot be opened
  kAttached = 5,  // no file: a process has found the board
  kBlind = 6,     // no file: a program was started that nothing can be seen of
};
inline constexpr uint32_t kOpenedKinds = 7;

struct RingSlot {
  // (place + 1) mod 2^32 in the upper halves.
  std::atomic<uint64_t> file;  // lower half: the file's number; ~0: none
  std::atomic<uint64_t> who;   // lower half: process id << 4 | Opened
};

struct RingHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t unused;
  uint64_t capacity;  // a power of two
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint32_t> asleep;  // a futex: the reader waits
  alignas(64) std::atomic<uint64_t> totals[kOpenedKinds];
  std::atomic<uint64_t> copy_bytes;      // of files whose copies were opened
  std::atomic<uint64_t> original_bytes;  // of files on the board that were opened themselves
  std::atomic<uint64_t> tier_copies;     // of the totals of kCopy: on a tier
  std::atomic<uint64_t> stats;           // answered from the board
};

inline RingSlot* ring_slots(void* ring) {
  return reinterpret_cast<RingSlot*>(static_cast<char*>(ring) + sizeof(RingHeader));
}
// Behind the slots: a bit for each file that was opened for writing, by its number modulo so many.
// Copies of it, and of those that share its bit, are not opened any more: the daemon hears of it
// too late for a program that reads what it is about to write.
inline constexpr uint64_t kWrittenBits = uint64_t{1} << 16;

inline uint64_t ring_nbytes(uint64_t capacity) {
  return sizeof(RingHeader) + capacity * sizeof(RingSlot) + kWrittenBits / 8;
}
inline std::atomic<uint64_t>& ring_written(void* ring, uint64_t capacity, int64_t file) {
  const uint64_t word = static_cast<uint64_t>(file) % kWrittenBits / 64;
  return reinterpret_cast<std::atomic<uint64_t>*>(ring_slots(ring) + capacity)[word];
}
inline void ring_note_written(void* ring, uint64_t capacity, int64_t file) {
  ring_written(ring, capacity, file).fetch_or(uint64_t{1} << (file % 64));
}
inline bool ring_is_written(void* ring, uint64_t capacity, int64_t file) {
  return (ring_written(ring, capacity, file).load() >> (file % 64) & 1) != 0;
}

// Copies that are opened do not need the reader at once: it is woken for each 16th.
inline constexpr uint64_t kWakeEvery = 16;

// Adds a report. `capacity` as it was checked when the ring was mapped. Preserves errno.
inline void ring_report(void* memory, uint64_t capacity, int64_t file, uint32_t process,
                        Opened what) {
  auto* ring = static_cast<RingHeader*>(memory);
  ring->totals[static_cast<uint32_t>(what)].fetch_add(1, std::memory_order_relaxed);
  const uint64_t place = ring->head.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t tag = (place + 1) << 32;
  RingSlot& slot = ring_slots(memory)[place & (capacity - 1)];
  slot.file.store(tag | static_cast<uint32_t>(file), std::memory_order_release);
  slot.who.store(tag | static_cast<uint32_t>(process << 4 | static_cast<uint32_t>(what)),
                 std::memory_order_release);
  if (what == Opened::kCopy && place % kWakeEvery != 0) return;
  // Ordered with the reader's `asleep = 1; look at head`: one of the two sees the other.
  if (ring->asleep.load(std::memory_order_seq_cst) != 0 &&
      ring->asleep.exchange(0, std::memory_order_seq_cst) != 0) {
    const int saved_errno = errno;
    syscall(SYS_futex, &ring->asleep, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    errno = saved_errno;
  }
}

}  // namespace headrace::preload
