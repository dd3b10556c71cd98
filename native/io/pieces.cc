#include "io/pieces.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "io/planner.h"

namespace headrace::io {
namespace {

// A window's samples are copied out in random order: the first lines of a later one are asked for.
constexpr uint64_t kGatherAhead = 4;

}  // namespace

std::shared_ptr<Batch> gather_pieces(Arena& arena, uint64_t parts, std::span<const Piece> pieces) {
  auto batch = std::make_shared<Batch>();
  batch->parts = parts;
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.batch == nullptr) throw Error(ErrorKind::kInvalidArgument, "a piece has no batch");
    const Batch& from = *piece.batch;
    if (piece.start > piece.stop || piece.stop > from.samples || from.parts != batch->parts) {
      throw Error(ErrorKind::kInvalidArgument, "a piece lies outside its batch");
    }
    for (uint64_t s = piece.start * batch->parts; s < piece.stop * batch->parts; ++s) {
      batch->offsets.push_back(static_cast<int64_t>(bytes));
      batch->lengths.push_back(from.lengths[s]);
      bytes = align_up(bytes + static_cast<uint64_t>(from.lengths[s]), kGatherAlignment);
    }
  }
  batch->bytes = bytes;
  batch->buffer = arena.acquire(bytes);
  std::byte* to = batch->buffer->data;
  uint64_t slot = 0;
  for (const Piece& piece : pieces) {
    const Batch& from = *piece.batch;
    const auto taken = static_cast<double>(piece.stop - piece.start);
    batch->way.add(from.way, taken / static_cast<double>(std::max<uint64_t>(1, from.samples)));
    const uint64_t first = piece.start * batch->parts;
    const uint64_t last = piece.stop * batch->parts;
    for (uint64_t s = first; s < last; ++s, ++slot) {
      if (s + kGatherAhead < last) {
        const std::byte* next = from.buffer->data + from.offsets[s + kGatherAhead];
        for (int line = 0; line < 16; ++line) __builtin_prefetch(next + 64 * line);
      }
      std::memcpy(to + batch->offsets[slot], from.buffer->data + from.offsets[s],
                  static_cast<size_t>(from.lengths[s]));
    }
    batch->indices.insert(batch->indices.end(), from.indices.begin() + piece.start,
                          from.indices.begin() + piece.stop);
    batch->labels.insert(batch->labels.end(), from.labels.begin() + piece.start,
                         from.labels.begin() + piece.stop);
    for (Failure failure : from.failures) {
      if (failure.slot < first || failure.slot >= last) continue;
      failure.slot = failure.slot - first + slot - (last - first);
      batch->failures.push_back(failure);
    }
  }
  batch->samples = batch->indices.size();
  return batch;
}

}  // namespace headrace::io
