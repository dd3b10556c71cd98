#include "io/direct_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/crc32c.h"
#include "core/error.h"
#include "io/batch_parts.h"

namespace headrace::io {
namespace {

[[noreturn]] void fail(const char* what, int code, const std::string& path, uint64_t offset) {
  throw Error(ErrorKind::kVolume, std::string(what) + ": " + strerror(code), path,
              static_cast<int64_t>(offset), code);
}

}  // namespace

void DirectWriter::Free::operator()(std::byte* memory) const { std::free(memory); }

DirectWriter::DirectWriter(const std::string& path, uint64_t offset) : end_(offset) {
  if (offset % kBlock != 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "offset is " + std::to_string(offset) + ", expected a multiple of 4096");
  }
  fd_ = open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
  direct_ = fd_ >= 0;
  if (fd_ < 0) fd_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd_ < 0) fail("opening failed", errno, path, offset);
  staging_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlock, kStagingBytes)));
  if (staging_ == nullptr) {
    close(fd_);
    fail("no memory for writing", ENOMEM, path, offset);
  }
}

DirectWriter::~DirectWriter() { close(fd_); }

void DirectWriter::write(uint64_t offset, size_t bytes) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t n =
        pwrite(fd_, staging_.get() + done, bytes - done, static_cast<off_t>(offset + done));
    if (n >= 0) {
      done += static_cast<size_t>(n);
      continue;
    }
    if (errno == EINTR) continue;
    const int code = errno;
    // Also what a direct write says that a limit has cut short.
    if (code != EINVAL || !direct_) fail("writing failed", code, {}, offset + done);
    direct_ = false;
    const int flags = fcntl(fd_, F_GETFL);
    if (flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) < 0) {
      fail("writing failed", code, {}, offset + done);
    }
  }
}

std::vector<uint32_t> DirectWriter::append(const Batch& batch, std::span<const int64_t> positions) {
  std::vector<uint32_t> checksums;
  checksums.reserve(positions.size() * batch.parts);
  uint64_t at = end_ - end_ % kBlock;  // where the buffer begins in the file
  size_t filled = end_ % kBlock;
  std::memcpy(staging_.get(), last_.data(), filled);
  for_each_part(batch, positions, [&](const std::byte* data, size_t left) {
    uint32_t crc = 0;
    while (left > 0) {
      const size_t piece = std::min(left, kStagingBytes - filled);
      crc = crc32c_copy(crc, staging_.get() + filled, data, piece);
      data += piece;
      left -= piece;
      filled += piece;
      if (filled == kStagingBytes) {
        write(at, filled);
        at += filled;
        filled = 0;
      }
    }
    checksums.push_back(crc);
  });
  const size_t whole = filled / kBlock * kBlock;
  const size_t rest = filled - whole;
  if (rest > 0) std::memset(staging_.get() + filled, 0, kBlock - rest);
  if (filled > 0) write(at, whole + (rest > 0 ? kBlock : 0));
  std::memcpy(last_.data(), staging_.get() + whole, rest);
  end_ = at + filled;
  return checksums;
}

}  // namespace headrace::io
