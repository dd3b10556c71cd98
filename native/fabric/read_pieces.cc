#include "fabric/read_pieces.h"

#include <algorithm>
#include <utility>

namespace headrace::fabric {

ReadBatch::ReadBatch(std::shared_ptr<io::RemoteRequests> requests, int64_t deadline_ns)
    : requests_(std::move(requests)),
      deadline_ns_(deadline_ns),
      reads_(requests_->requests().size()) {}

void ReadBatch::expect(size_t number, uint64_t bytes, uint32_t commands) {
  reads_[number].bytes = bytes;
  reads_[number].commands_left.store(commands, std::memory_order_relaxed);
}

bool ReadBatch::ended(size_t number, int error, io::RemoteResult* result) {
  Read& read = reads_[number];
  if (error != 0) read.error.store(error, std::memory_order_relaxed);
  if (read.commands_left.fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
  *result = {number, read.bytes, read.error.load(std::memory_order_relaxed)};
  return true;
}

size_t cut(const NamespaceGeometry& volume, uint32_t command_bytes,
           const std::shared_ptr<ReadBatch>& batch, size_t number, std::vector<Piece>* pieces) {
  const io::RemoteRequest& request = batch->request(number);
  const uint32_t block = volume.block_bytes;
  const uint64_t whole = volume.blocks * block;
  const uint64_t first = std::min(volume.first_byte, whole);
  const uint64_t capacity = std::min(volume.bytes, whole - first);
  const uint64_t offset = std::min(request.offset, capacity);
  const uint64_t length = std::min(request.length, capacity - offset);
  const uint32_t most = std::max(1u, command_bytes / block);  // blocks
  const uint64_t end = first + offset + length;
  std::byte* dest = request.dest;
  size_t count = 0;
  for (uint64_t at = first + offset; at < end; ++count) {
    const uint64_t slba = at / block;
    const uint64_t last = std::min((end + block - 1) / block, slba + most);
    const uint64_t until = std::min(end, last * block);
    const auto blocks = static_cast<uint32_t>(last - slba);
    pieces->push_back({batch,
                       static_cast<uint32_t>(number),
                       volume.nsid,
                       slba,
                       blocks,
                       blocks * block,
                       {at - slba * block, {dest, until - at}},
                       0});
    dest += until - at;
    at = until;
  }
  batch->expect(number, length, static_cast<uint32_t>(count));
  return count;
}

}  // namespace headrace::fabric
