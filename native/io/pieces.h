// Pieces: parts of batches that were read, copied together into a new batch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/arena.h"
#include "io/batch.h"

namespace headrace::io {

// Samples [start, stop) of a batch.
struct Piece {
  std::shared_ptr<const Batch> batch;
  uint64_t start;
  uint64_t stop;
};

// Copies the pieces, in order, into one batch with `parts` parts per sample. Throws
// Error(kInvalidArgument) for a piece outside its batch or with other parts.
std::shared_ptr<Batch> gather_pieces(Arena& arena, uint64_t parts, std::span<const Piece> pieces);

}  // namespace headrace::io
