// The open log: what the programs of one run opened, as it lies in shared memory. Made by whoever
// starts the run; programs find it by HEADRACE_OPENS in their environment:
// "/proc/OWNER/fd/N:INODE".
//
// Many writers, read after the run. A writer takes its place with one addition to `head` and fills
// it; what doesn't fit is counted in `dropped`. While the descriptor lives, its reads are added to
// the record of its open. Read by headrace/posix/opens.py; little-endian, records on 8 bytes.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace::opens {

inline constexpr uint64_t kLogMagic = 0x31676c6f'6e706f68;  // "hopnolg1"
inline constexpr uint32_t kLogVersion = 1;
inline constexpr uint32_t kRecordMagic = 0x4e45504f;  // "OPEN"

struct LogHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t capacity;           // bytes behind the header
  std::atomic<uint64_t> head;  // bytes taken, more than `capacity` when some were dropped
  std::atomic<uint64_t> dropped;
  uint64_t unused[3];
};
static_assert(sizeof(LogHeader) == 64);

struct OpenRecord {
  uint32_t magic;
  std::atomic<uint32_t> nbytes;  // of the whole record, path and padding included; 0: unfinished
  uint32_t process;
  uint32_t thread;
  uint32_t flags;  // of open
  uint32_t path_nbytes;
  int64_t began_ns;  // CLOCK_MONOTONIC
  int64_t open_ns;   // how long the open took
  std::atomic<uint64_t> reads;
  std::atomic<uint64_t> read_bytes;
  std::atomic<uint64_t> read_ns;  // of all reads, by whatever thread
  std::atomic<int64_t> last_ns;   // when the last read ended; 0: there was none
  std::atomic<uint64_t> mapped;   // times it was mapped: such reads are not seen
  char path[];                    // absolute, not normalised, no null at the end
};
static_assert(sizeof(OpenRecord) == 80);

}  // namespace headrace::opens
