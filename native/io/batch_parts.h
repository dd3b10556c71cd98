// The bytes of some samples of a batch, part by part, in order: what writers of samples walk over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/error.h"
#include "io/batch.h"

namespace headrace::io {

// Calls `visit(data, length)` for each part of the samples at `positions`. Throws
// Error(kInvalidArgument) for a position that the batch does not have.
template <typename Visit>
void for_each_part(const Batch& batch, std::span<const int64_t> positions, Visit&& visit) {
  for (const int64_t position : positions) {
    if (position < 0 || static_cast<uint64_t>(position) >= batch.samples) {
      throw Error(ErrorKind::kInvalidArgument,
                  "the batch has no sample " + std::to_string(position));
    }
    for (uint64_t p = 0; p < batch.parts; ++p) {
      const uint64_t slot = static_cast<uint64_t>(position) * batch.parts + p;
      visit(batch.buffer->data + batch.offsets[slot], static_cast<size_t>(batch.lengths[slot]));
    }
  }
}

}  // namespace headrace::io
