// Appends samples of batches to a file past the page cache.
//
// A buffered write takes fresh pages and leaves them to be written back later: several times the
// processor time of the copy, and memory that the training program wants. Here samples are gathered
// in one aligned buffer of our own, which the device reads. Where the file system has no direct
// writes, or refuses one, the rest is written through the page cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/batch.h"

namespace headrace::io {

class DirectWriter {
 public:
  // Goes on at `offset`, a multiple of 4,096, in an existing file. Throws Error(kVolume).
  DirectWriter(const std::string& path, uint64_t offset);
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;
  DirectWriter& operator=(const DirectWriter&) = delete;

  // Writes the slots of samples `positions` behind those before, padded with zeros to a whole
  // block, and returns the crc32c of each slot. Throws Error(kVolume) with the system's errno;
  // nothing counts as appended then, and what was before stays.
  std::vector<uint32_t> append(const Batch& batch, std::span<const int64_t> positions);

  // Whether writes still go past the page cache.
  bool direct() const { return direct_; }

 private:
  static constexpr size_t kBlock = 4096;
  static constexpr size_t kStagingBytes = 4 << 20;

  void write(uint64_t offset, size_t bytes);

  struct Free {
    void operator()(std::byte* memory) const;
  };

  int fd_ = -1;
  bool direct_ = false;
  uint64_t end_;                          // of the samples, in the file
  std::array<std::byte, kBlock> last_{};  // the block that they end in
  std::unique_ptr<std::byte, Free> staging_;
};

}  // namespace headrace::io
