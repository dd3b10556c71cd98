#include "io/assemble.h"

#include <algorithm>
#include <string>

#include "core/copy.h"
#include "core/error.h"

namespace headrace::io {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr size_t kAhead = 4;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, what);
}

bool in_order(std::span<const int64_t> positions) {
  for (size_t k = 0; k < positions.size(); ++k) {
    if (positions[k] != static_cast<int64_t>(k)) return false;
  }
  return true;
}

void check(std::span<const int64_t> indices, std::span<const Part> parts) {
  if (parts.empty()) refuse("a batch is assembled of no parts");
  std::vector<bool> filled(indices.size());
  size_t count = 0;
  for (const Part& part : parts) {
    if (part.batch == nullptr) refuse("a part has no batch");
    if (part.positions.size() != part.batch->samples) {
      refuse("a part has " + std::to_string(part.batch->samples) + " samples and " +
             std::to_string(part.positions.size()) + " positions");
    }
    if (part.batch->parts != parts[0].batch->parts) refuse("parts differ in slots per sample");
    for (const int64_t at : part.positions) {
      if (at < 0 || static_cast<size_t>(at) >= filled.size() || filled[static_cast<size_t>(at)]) {
        refuse("position " + std::to_string(at) + " is outside the batch or taken twice");
      }
      filled[static_cast<size_t>(at)] = true;
      ++count;
    }
  }
  if (count != indices.size()) refuse("the parts do not fill the batch");
}

void add(BatchStats* sum, const BatchStats& more) {
  sum->cached_reads += more.cached_reads;
  sum->direct_reads += more.direct_reads;
  sum->buffered_reads += more.buffered_reads;
  sum->opened_files += more.opened_files;
  sum->bytes_read += more.bytes_read;
}

}  // namespace

void copy_slots(Arena& arena, std::span<const Place> places, Batch* batch) {
  batch->offsets.reserve(places.size());
  batch->lengths.reserve(places.size());
  uint64_t bytes = 0;
  for (const Place& place : places) {
    batch->offsets.push_back(static_cast<int64_t>(bytes));
    batch->lengths.push_back(place.length);
    bytes =
        (bytes + static_cast<uint64_t>(place.length) + kAlignment - 1) / kAlignment * kAlignment;
  }
  batch->bytes = bytes;
  batch->buffer = arena.acquire(bytes);
  std::byte* to = batch->buffer->data;
  for (size_t s = 0; s < places.size(); ++s) {
    if (s + kAhead < places.size()) {
      const std::byte* next = places[s + kAhead].data;
      for (int line = 0; line < 16; ++line) __builtin_prefetch(next + 64 * line);
    }
    if (places[s].length == 0) continue;
    copy_for_later(to + batch->offsets[s], places[s].data, static_cast<size_t>(places[s].length));
  }
  copies_done();
}

std::shared_ptr<Batch> assemble(Arena& arena, std::span<const int64_t> indices,
                                std::span<const Part> parts) {
  check(indices, parts);
  if (parts.size() == 1 && in_order(parts[0].positions)) {
    auto same = std::make_shared<Batch>(*parts[0].batch);
    same->indices.assign(indices.begin(), indices.end());
    return same;
  }
  auto batch = std::make_shared<Batch>();
  const uint64_t slots = batch->parts = parts[0].batch->parts;
  batch->samples = indices.size();
  batch->indices.assign(indices.begin(), indices.end());
  batch->labels.resize(indices.size());
  std::vector<Place> places(indices.size() * slots);
  for (const Part& part : parts) {
    const Batch& from = *part.batch;
    for (size_t k = 0; k < part.positions.size(); ++k) {
      const auto to = static_cast<uint64_t>(part.positions[k]);
      batch->labels[to] = from.labels[k];
      for (uint64_t p = 0; p < slots; ++p) {
        places[to * slots + p] = {from.buffer->data + from.offsets[k * slots + p],
                                  from.lengths[k * slots + p]};
      }
    }
    for (Failure failure : from.failures) {
      const auto to = static_cast<uint64_t>(part.positions[failure.slot / slots]);
      failure.slot = to * slots + failure.slot % slots;
      batch->failures.push_back(failure);
    }
    add(&batch->stats, from.stats);
    batch->way.add(from.way);
  }
  copy_slots(arena, places, batch.get());
  return batch;
}

}  // namespace headrace::io
