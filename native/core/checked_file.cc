#include "core/checked_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "core/crc32c.h"
#include "core/error.h"

namespace headrace {

CheckedFile::CheckedFile(std::unique_ptr<Mapping> mapping, std::string path)
    : mapping_(std::move(mapping)), path_(std::move(path)) {}

void CheckedFile::set_checksums(uint64_t payload_offset, uint64_t checksums_offset,
                                uint32_t block_bytes) {
  payload_offset_ = payload_offset;
  checksums_offset_ = checksums_offset;
  block_log2_ = static_cast<unsigned>(std::countr_zero(block_bytes));
  blocks_ = (size() - payload_offset + block_bytes - 1) >> block_log2_;
  checked_ = std::make_unique<std::atomic<bool>[]>(blocks_);
}

bool CheckedFile::block_is_good(uint64_t block) const {
  const uint64_t start = payload_offset_ + (block << block_log2_);
  const uint64_t length = std::min<uint64_t>(uint64_t{1} << block_log2_, size() - start);
  uint32_t expected;
  std::memcpy(&expected, data() + checksums_offset_ + 4 * block, sizeof expected);
  return crc32c(0, data() + start, length) == expected;
}

void CheckedFile::check(uint64_t block) const {
  if (!block_is_good(block)) {
    assert_whole();
    const uint64_t start = payload_offset_ + (block << block_log2_);
    throw Error(ErrorKind::kCorruptStore,
                path_ + ": the block at offset " + std::to_string(start) +
                    " does not match its checksum. The file was damaged after it was written. "
                    "Run `headrace verify` on the store, and restore or pack it again.",
                path_, static_cast<int64_t>(start));
  }
  checked_[block].store(true, std::memory_order_release);
}

void CheckedFile::assert_whole() const {
  if (mapping_->damaged() == 0) return;
  throw Error(ErrorKind::kCorruptStore,
              path_ + ": pages vanished while the file was open (expected " +
                  std::to_string(size()) +
                  " bytes). Somebody truncated it; restore it and open the store again.",
              path_);
}

std::vector<uint64_t> CheckedFile::damaged_blocks() const {
  std::vector<uint64_t> offsets;
  for (uint64_t block = 0; block < blocks_; ++block) {
    if (!block_is_good(block)) offsets.push_back(payload_offset_ + (block << block_log2_));
  }
  return offsets;
}

}  // namespace headrace
