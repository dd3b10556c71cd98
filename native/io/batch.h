// Batch: the bytes of some samples in one buffer, and where each of them lies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/arena.h"

namespace headrace::io {

enum class FailureKind : int {
  kChecksum,  // the bytes differ from the directory's checksum
  kShort,     // the volume ended before the sample did
  kChanged,   // a foreign file has another size or mtime, or vanished
  kSystem,    // the operating system refused: see `system_errno`
};

struct Failure {
  uint64_t slot;  // position in the batch: sample * parts + part
  FailureKind kind;
  int system_errno;
  uint32_t crc_found;
  uint32_t crc_expected;
  uint32_t volume;
  uint64_t offset;
  uint64_t length;
};

struct BatchStats {
  uint64_t cached_reads = 0;  // gathered from the page cache
  uint64_t direct_reads = 0;  // requests with O_DIRECT
  uint64_t buffered_reads = 0;
  uint64_t remote_reads = 0;
  uint64_t opened_files = 0;
  uint64_t bytes_read = 0;  // asked from the system, alignment and gaps included
};

// Where bytes came from: the order of TIERS in plane/stage.py.
inline constexpr size_t kTiers = 5;
inline constexpr size_t kTierPageCache = 1;
inline constexpr size_t kTierSource = 4;

// How a batch came: when it reached each point of its way, in nanoseconds of the steady clock (0:
// that is not known), and from where.
struct BatchWay {
  int64_t submitted_ns = 0;
  int64_t taken_ns = 0;    // a worker began with it
  int64_t planned_ns = 0;  // its samples were found and their volumes open
  int64_t begun_ns = 0;    // there was room for its bytes: its reads began
  int64_t ready_ns = 0;    // its last byte was there and checked. Who waits for it is woken later
  // Sums over its reads: how long they took, files opened included, and of that opening them.
  int64_t read_ns = 0;
  int64_t open_ns = 0;
  uint64_t reads = 0;
  uint64_t depth = 0;  // reads under way when each of them began, itself included
  // The same of reads that began while hardly any other was under way: what an idle storage takes.
  int64_t quiet_ns = 0;
  uint64_t quiet_reads = 0;
  int64_t held_ns = 0;  // held back by a limit on rates before it was submitted
  // Bytes of samples by where they came from.
  std::array<uint64_t, kTiers> tier_bytes{};

  // Of a batch that is made of several, or of a share of one.
  void add(const BatchWay& more, double share = 1);
};

// Bytes of a part that are read instead of all of it. What is not read whole has no checksum.
struct Range {
  uint64_t start = 0;
  uint64_t size = 0;
};

// Slot s of sample i and selected part p is i * parts + p. Bytes of slot s are
// buffer[offsets[s] .. offsets[s] + lengths[s]); slots may lie in any order and with gaps, because
// direct reads are not copied. A missing part has length 0.
struct Batch : std::enable_shared_from_this<Batch> {
  BufferPtr buffer;
  uint64_t bytes = 0;  // used bytes of the buffer
  uint64_t samples = 0;
  uint64_t parts = 1;
  std::vector<int64_t> indices;
  std::vector<int64_t> offsets;
  std::vector<int64_t> lengths;
  std::vector<int64_t> labels;
  std::vector<Failure> failures;
  BatchStats stats;
  BatchWay way;
};

}  // namespace headrace::io
