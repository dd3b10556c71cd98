// Batch: the bytes of some samples in one buffer, and where each of them lies.
#pragma once

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
  // When its last byte was there and checked, of the steady clock. Who waits for it is woken later.
  int64_t ready_ns = 0;
};

}  // namespace headrace::io
