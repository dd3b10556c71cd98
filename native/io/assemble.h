// Assemble: one batch out of samples that several tiers have read, in the order that was asked for.
//
// A batch that comes whole from one tier keeps its memory; only its indices change. Otherwise every
// sample is copied once into a new buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/arena.h"
#include "io/batch.h"

namespace headrace::io {

// Sample `k` of `batch` becomes sample `positions[k]` of the whole.
struct Part {
  std::shared_ptr<const Batch> batch;
  std::vector<int64_t> positions;
};

// Throws Error(kInvalidArgument) unless the parts fill every position exactly once and have equally
// many slots per sample. Failures and statistics of all parts are kept.
std::shared_ptr<Batch> assemble(Arena& arena, std::span<const int64_t> indices,
                                std::span<const Part> parts);

// Where the bytes of one slot are now.
struct Place {
  const std::byte* data;
  int64_t length;
};

// Copies the slots back to back, at cache lines, and fills in buffer, offsets and lengths.
void copy_slots(Arena& arena, std::span<const Place> places, Batch* batch);

}  // namespace headrace::io
