// Appends samples of a batch to a file, straight from the batch's memory.
//
// One call writes many samples with few system calls and no copy of ours, and takes their checksums
// while the bytes are at hand.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "io/batch.h"

namespace headrace::io {

// Writes the slots of samples `positions` back to back at `offset`. Returns the crc32c of each
// slot. Throws Error(kVolume) with the system's errno; what lies beyond `offset` is then undefined.
std::vector<uint32_t> write_samples(int fd, uint64_t offset, const Batch& batch,
                                    std::span<const int64_t> positions);

}  // namespace headrace::io
