// FileLayout: what a generated file consists of, piece by piece, without its bytes.
//
// A format's files are constant text around noise: headers, the sample's bytes, trailers. Where a
// checksum is part of the format, the pieces between `kBegin` and `kEnd` are what it covers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headrace::io {

class FileLayout {
 public:
  enum class Kind : int {
    kText,   // `text`
    kNoise,  // `nbytes` of noise
    kCodes,  // the same with every byte at most 0xfd: codes of a JPEG whose tables allow them all
    kBegin,  // the checksum begins
    kEnd,    // it ends; kRecord's is written here
  };

  enum class Checksum : int {
    kNone,
    kZip,     // CRC-32; there is one, which is written over the file at `patches`
    kRecord,  // masked CRC-32C of TFRecord; one of each kEnd
  };

  struct Piece {
    Kind kind;
    uint64_t nbytes;
    std::string text;
  };

  struct Run {
    uint64_t times;
    std::vector<Piece> pieces;
  };

  // Throws Error(kInvalidArgument) for a layout that makes no sense.
  FileLayout(std::vector<Run> runs, Checksum checksum, std::vector<uint64_t> patches);

  const std::vector<Run>& runs() const { return runs_; }
  Checksum checksum() const { return checksum_; }
  const std::vector<uint64_t>& patches() const { return patches_; }

  // Of the finished file.
  uint64_t nbytes() const { return nbytes_; }

 private:
  std::vector<Run> runs_;
  Checksum checksum_;
  std::vector<uint64_t> patches_;
  uint64_t nbytes_ = 0;
};

}  // namespace headrace::io
