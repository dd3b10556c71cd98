// What a recorded process leaves in its file: a header, and slots of fixed size, one for each call.
//
// The file is mapped and shared, so what was logged is there however the process ends. Slots are
// claimed by adding to `used` and filled in any order; one that a killed thread had claimed stays
// zero, and readers pass it over. Text (a path) follows its slot in slots of its own.
// All numbers are little-endian. src/headrace/insight/record/log.py reads it.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace::record {

inline constexpr uint64_t kLogMagic = 0x31676f6c'72647268;  // "hrdrlog1"
inline constexpr uint32_t kLogVersion = 1;
inline constexpr uint64_t kHeaderBytes = 64 << 10;  // a page, whatever its size
inline constexpr uint64_t kWindowBytes = 256 << 10;
inline constexpr uint32_t kCommandBytes = 1024;

struct LogHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t process;
  uint32_t parent;
  uint32_t command_bytes;
  int64_t began_ns;  // of the monotonic clock
  int64_t unix_ns;   // the same moment, since 1970
  uint64_t slots_max;
  int64_t clock_ns;  // what asking for the time costs
  alignas(64) std::atomic<uint64_t> used;
  std::atomic<uint64_t> lost;      // not kept: the log was full, or the disk
  std::atomic<uint64_t> spent_ns;  // by logging, estimated from samples
  std::atomic<uint64_t> blind;     // programs that were started and cannot be seen
  alignas(64) char command[kCommandBytes];
};
static_assert(sizeof(LogHeader) <= kHeaderBytes);

enum class Kind : uint8_t {
  kNone = 0,
  kText = 1,
  kOpen = 2,   // nbytes: the file's size; text: its path
  kRead = 3,   // offset -1: where the descriptor stands
  kWrite = 4,  // likewise
  kSeek = 5,   // offset: where it stands now
  kClose = 6,
  kMap = 7,
  kSync = 8,
  kStat = 9,  // text: the path; nbytes: 0, or -errno
  kPipeRead = 10,
  kPipeWrite = 11,
  kWait = 12,  // in poll or select
};

// Flags of kOpen.
inline constexpr uint8_t kForWriting = 1;
inline constexpr uint8_t kAdopted = 2;  // it was open already when it was first seen
inline constexpr uint8_t kStream = 4;
inline constexpr uint8_t kDirect = 8;
// Of kPipeRead and kPipeWrite.
inline constexpr uint8_t kSocket = 16;

struct Slot {
  std::atomic<uint8_t> kind;  // last of all
  uint8_t flags;
  uint16_t text_bytes;  // behind this slot
  uint32_t thread;
  int64_t begin_ns;
  int64_t offset;
  int64_t nbytes;  // or -errno
  float seconds;
  int32_t fd;
};
inline constexpr uint64_t kSlotBytes = 40;
static_assert(sizeof(Slot) == kSlotBytes);

inline constexpr uint64_t kTextBytes = kSlotBytes - 8;  // of one slot, behind its first 8 bytes
inline constexpr uint64_t kWindowSlots = kWindowBytes / kSlotBytes;

}  // namespace headrace::record
