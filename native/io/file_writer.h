// FileWriter: writes generated files from their layouts, each there whole or not at all.
//
// Bytes are made in one aligned buffer, which the device reads: nothing is copied. A file that is
// not tiny is written past the page cache; it has a temporary name until it is done. One thread's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/noise.h"
#include "io/file_layout.h"

namespace headrace::io {

class FileWriter {
 public:
  // `direct`: whether files that are not tiny are written with O_DIRECT where that is possible.
  // Throws std::bad_alloc.
  FileWriter(std::shared_ptr<const Noise> noise, bool direct);

  // Writes the file `key`, whose content follows from the key, and renames it to `path`. Returns 0,
  // or the system's errno: nothing of the file is left then.
  [[nodiscard]] int write(const FileLayout& layout, uint64_t key, const std::string& path);

 private:
  static constexpr size_t kBlock = 4096;
  static constexpr size_t kBufferBytes = 4 << 20;  // beyond it a disk's bandwidth does not grow
  // Below it a direct write waits longer for the disk than the page cache costs.
  static constexpr uint64_t kDirectBytesMin = 64 << 10;
  // Made and summed at a time: both find it in the L1 or L2 cache.
  static constexpr size_t kPieceBytes = 64 << 10;

  int open_file(const std::string& temporary, bool direct);
  int make(const FileLayout& layout, uint64_t key);
  int take(const FileLayout::Piece& piece, uint64_t key);
  int text(std::span<const std::byte> data);
  int noise(uint64_t key, uint64_t nbytes, bool codes);
  int made(size_t nbytes);
  int drain();
  int write_out(size_t from, size_t to);
  int finish(const FileLayout& layout);
  int patch(const FileLayout& layout, uint64_t begin);
  int stop_direct();

  struct Free {
    void operator()(std::byte* memory) const;
  };

  std::shared_ptr<const Noise> noise_;
  const bool direct_wanted_;
  std::unique_ptr<std::byte, Free> buffer_;
  size_t held_ = 0;

  // Of the file that is being written.
  int fd_ = -1;
  bool direct_ = false;
  uint64_t drained_ = 0;   // bytes that left the buffer
  uint64_t position_ = 0;  // in the file's noise
  bool summing_ = false;
  FileLayout::Checksum checksum_ = FileLayout::Checksum::kNone;
  uint32_t sum_ = 0;
};

}  // namespace headrace::io
