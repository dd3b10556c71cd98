#include "io/sample_writer.h"

#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/crc32c.h"
#include "core/error.h"
#include "io/batch_parts.h"

namespace headrace::io {
namespace {

constexpr size_t kPiecesMax = 256;  // below every system's IOV_MAX

// Writes all pieces, however often the kernel writes short.
void write_pieces(int fd, uint64_t offset, std::span<iovec> pieces) {
  while (!pieces.empty()) {
    const ssize_t done =
        pwritev(fd, pieces.data(), static_cast<int>(pieces.size()), static_cast<off_t>(offset));
    if (done < 0) {
      if (errno == EINTR) continue;
      const int code = errno;
      throw Error(ErrorKind::kVolume, std::string("writing failed: ") + strerror(code), {},
                  static_cast<int64_t>(offset), code);
    }
    offset += static_cast<uint64_t>(done);
    auto left = static_cast<size_t>(done);
    while (!pieces.empty() && left >= pieces.front().iov_len) {
      left -= pieces.front().iov_len;
      pieces = pieces.subspan(1);
    }
    if (left > 0) {
      pieces.front().iov_base = static_cast<char*>(pieces.front().iov_base) + left;
      pieces.front().iov_len -= left;
    }
  }
}

}  // namespace

std::vector<uint32_t> write_samples(int fd, uint64_t offset, const Batch& batch,
                                    std::span<const int64_t> positions) {
  std::vector<uint32_t> checksums;
  checksums.reserve(positions.size() * batch.parts);
  std::vector<iovec> pieces;
  uint64_t pending = 0;
  const auto flush = [&] {
    write_pieces(fd, offset, pieces);
    offset += pending;
    pending = 0;
    pieces.clear();
  };
  for_each_part(batch, positions, [&](std::byte* data, size_t length) {
    checksums.push_back(crc32c(0, data, length));
    if (length == 0) return;
    pieces.push_back({data, length});
    pending += length;
    if (pieces.size() == kPiecesMax) flush();
  });
  flush();
  return checksums;
}

}  // namespace headrace::io
