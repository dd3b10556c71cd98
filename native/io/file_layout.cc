#include "io/file_layout.h"

#include <utility>

#include "core/error.h"

namespace headrace::io {
namespace {

constexpr uint64_t kBytesMax = uint64_t{1} << 62;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, "layout: " + what);
}

uint64_t size_of(const FileLayout::Piece& piece, FileLayout::Checksum checksum) {
  switch (piece.kind) {
    case FileLayout::Kind::kText:
      return piece.text.size();
    case FileLayout::Kind::kNoise:
    case FileLayout::Kind::kCodes:
      return piece.nbytes;
    case FileLayout::Kind::kBegin:
      return 0;
    case FileLayout::Kind::kEnd:
      return checksum == FileLayout::Checksum::kRecord ? 4 : 0;
  }
  refuse("a piece of no known kind");
}

}  // namespace

FileLayout::FileLayout(std::vector<Run> runs, Checksum checksum, std::vector<uint64_t> patches)
    : runs_(std::move(runs)), checksum_(checksum), patches_(std::move(patches)) {
  bool begun = false;
  uint64_t sums = 0;
  for (const Run& run : runs_) {
    uint64_t once = 0;
    for (const Piece& piece : run.pieces) {
      if (piece.nbytes > kBytesMax) refuse("a piece is too large");
      once += size_of(piece, checksum);
      if (once > kBytesMax) refuse("a run is too large");
      if (piece.kind == Kind::kBegin) {
        if (begun || checksum == Checksum::kNone) refuse("a checksum begins that cannot");
        begun = true;
      } else if (piece.kind == Kind::kEnd) {
        if (!begun) refuse("a checksum ends that has not begun");
        begun = false;
        sums += run.times;
      }
    }
    if (begun) refuse("a checksum does not end where its run does");
    if (once != 0 && run.times > (kBytesMax - nbytes_) / once) refuse("it is too large");
    nbytes_ += once * run.times;
  }
  if (checksum == Checksum::kZip && sums != 1) refuse("expected one checksum");
  if (checksum != Checksum::kZip && !patches_.empty()) refuse("patches without their checksum");
  for (const uint64_t at : patches_) {
    if (nbytes_ < 4 || at > nbytes_ - 4) refuse("a patch behind the end");
  }
}

}  // namespace headrace::io
