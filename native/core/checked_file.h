// CheckedFile: a mapped file whose pages are verified against a table of checksums when they are
// first touched, so that opening costs the same for any size and no damaged byte is ever used.
//
// Thread-safe. Verifying a page twice by two threads at once is harmless.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/mapping.h"

namespace headrace {

class CheckedFile {
 public:
  CheckedFile(std::unique_ptr<Mapping> mapping, std::string path);

  const std::byte* data() const { return mapping_->data(); }
  uint64_t size() const { return mapping_->size(); }
  const std::string& path() const { return path_; }

  // From now on the bytes from `payload_offset` are checked: block i has the checksum at
  // `checksums_offset + 4 * i`. REQUIRES: the table lies inside the file and covers the payload.
  void set_checksums(uint64_t payload_offset, uint64_t checksums_offset, uint32_t block_bytes);

  // Returns the bytes at `offset` after making sure that all blocks they touch are undamaged.
  // REQUIRES: the range lies inside the payload. Throws Error(kCorruptStore).
  const std::byte* at(uint64_t offset, uint64_t length) const {
    if (length != 0) {
      const uint64_t first = (offset - payload_offset_) >> block_log2_;
      const uint64_t last = (offset - payload_offset_ + length - 1) >> block_log2_;
      for (uint64_t block = first; block <= last; ++block) {
        if (!checked_[block].load(std::memory_order_acquire)) check(block);
      }
    }
    return mapping_->data() + offset;
  }

  // Throws if pages of the file were lost while it was mapped. Call it after reading through `at`.
  void assert_whole() const;

  // Offsets of all damaged blocks.
  std::vector<uint64_t> damaged_blocks() const;

 private:
  bool block_is_good(uint64_t block) const;
  void check(uint64_t block) const;

  std::unique_ptr<Mapping> mapping_;
  std::string path_;
  uint64_t payload_offset_ = 0;
  uint64_t checksums_offset_ = 0;
  unsigned block_log2_ = 16;
  uint64_t blocks_ = 0;
  std::unique_ptr<std::atomic<bool>[]> checked_;
};

}  // namespace headrace
