#include "io/file_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "core/crc32.h"
#include "core/crc32c.h"

namespace headrace::io {
namespace {

constexpr std::byte kLargestCode{0xfd};

// TFRecord stores checksums rotated and shifted, so that a checksum of checksums is one, too.
uint32_t masked(uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8; }

// As headrace.store.output_file names it: no reader takes it for data.
std::string temporary_of(const std::string& path) {
  const size_t name = path.rfind('/') + 1;  // npos + 1 is 0
  return path.substr(0, name) + "." + path.substr(name) + ".part";
}

bool refuses_direct(int code) { return code == EINVAL || code == EOPNOTSUPP; }

}  // namespace

void FileWriter::Free::operator()(std::byte* memory) const { std::free(memory); }

FileWriter::FileWriter(std::shared_ptr<const Noise> noise, bool direct)
    : noise_(std::move(noise)), direct_wanted_(direct) {
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlock, kBufferBytes)));
  if (buffer_ == nullptr) throw std::bad_alloc();
}

int FileWriter::write(const FileLayout& layout, uint64_t key, const std::string& path) {
  const std::string temporary = temporary_of(path);
  held_ = 0;
  drained_ = position_ = 0;
  summing_ = false;
  checksum_ = layout.checksum();
  sum_ = 0;
  int code = open_file(temporary, direct_wanted_ && layout.nbytes() >= kDirectBytesMin);
  if (code != 0) return code;
  code = make(layout, key);
  if (code == 0) code = finish(layout);
  if (close(fd_) != 0 && code == 0) code = errno;  // network file systems tell of a full disk here
  if (code == 0 && rename(temporary.c_str(), path.c_str()) != 0) code = errno;
  if (code != 0) unlink(temporary.c_str());
  return code;
}

int FileWriter::open_file(const std::string& temporary, bool direct) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
  direct_ = direct;
  fd_ = open(temporary.c_str(), kFlags | (direct ? O_DIRECT : 0), 0666);
  if (fd_ < 0 && direct && refuses_direct(errno)) {
    direct_ = false;
    fd_ = open(temporary.c_str(), kFlags, 0666);
  }
  return fd_ < 0 ? errno : 0;
}

int FileWriter::make(const FileLayout& layout, uint64_t key) {
  for (const FileLayout::Run& run : layout.runs()) {
    for (uint64_t i = 0; i < run.times; ++i) {
      for (const FileLayout::Piece& piece : run.pieces) {
        if (const int code = take(piece, key); code != 0) return code;
      }
    }
  }
  return 0;
}

int FileWriter::take(const FileLayout::Piece& piece, uint64_t key) {
  switch (piece.kind) {
    case FileLayout::Kind::kText:
      return text(std::as_bytes(std::span(piece.text)));
    case FileLayout::Kind::kNoise:
    case FileLayout::Kind::kCodes:
      return noise(key, piece.nbytes, piece.kind == FileLayout::Kind::kCodes);
    case FileLayout::Kind::kBegin:
      summing_ = true;
      sum_ = 0;
      return 0;
    case FileLayout::Kind::kEnd: {
      summing_ = false;
      if (checksum_ != FileLayout::Checksum::kRecord) return 0;
      const uint32_t value = masked(sum_);
      return text(std::as_bytes(std::span(&value, 1)));
    }
  }
  return EINVAL;
}

int FileWriter::text(std::span<const std::byte> data) {
  while (!data.empty()) {
    const size_t piece = std::min(data.size(), kBufferBytes - held_);
    std::memcpy(buffer_.get() + held_, data.data(), piece);
    if (const int code = made(piece); code != 0) return code;
    data = data.subspan(piece);
  }
  return 0;
}

int FileWriter::noise(uint64_t key, uint64_t nbytes, bool codes) {
  while (nbytes > 0) {
    const size_t piece = std::min({nbytes, uint64_t{kPieceBytes}, uint64_t{kBufferBytes - held_}});
    const std::span<std::byte> out(buffer_.get() + held_, piece);
    noise_->fill(key, position_, out);
    if (codes) {
      for (std::byte& code : out) code = std::min(code, kLargestCode);
    }
    position_ += piece;
    nbytes -= piece;
    if (const int code = made(piece); code != 0) return code;
  }
  return 0;
}

// Counts what was just put behind what the buffer holds.
int FileWriter::made(size_t nbytes) {
  const std::byte* data = buffer_.get() + held_;
  if (summing_) {
    sum_ = checksum_ == FileLayout::Checksum::kZip ? crc32(sum_, data, nbytes)
                                                   : crc32c(sum_, data, nbytes);
  }
  held_ += nbytes;
  return held_ == kBufferBytes ? drain() : 0;
}

int FileWriter::drain() {
  const size_t nbytes = held_;
  held_ = 0;
  drained_ += nbytes;
  return write_out(0, nbytes);
}

int FileWriter::write_out(size_t from, size_t to) {
  while (from < to) {
    const ssize_t n = ::write(fd_, buffer_.get() + from, to - from);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && !(direct_ && refuses_direct(errno))) return errno;
    if (n > 0) from += static_cast<size_t>(n);
    // Refused, or cut short near a full disk: the rest is written through the page cache.
    if (direct_ && (n < 0 || from % kBlock != 0)) {
      if (const int code = stop_direct(); code != 0) return code;
    }
  }
  return 0;
}

int FileWriter::stop_direct() {
  direct_ = false;
  const int flags = fcntl(fd_, F_GETFL);
  return flags < 0 || fcntl(fd_, F_SETFL, flags & ~O_DIRECT) < 0 ? errno : 0;
}

int FileWriter::finish(const FileLayout& layout) {
  const uint64_t begin = drained_;
  bool late = false;
  for (const uint64_t at : layout.patches()) {
    // Little-endian, as all of a zip.
    if (at >= begin) std::memcpy(buffer_.get() + (at - begin), &sum_, sizeof sum_);
    late = late || at < begin;
  }
  // The tail goes through the page cache: padded and cut it would be read again to be cut.
  const size_t whole = direct_ ? held_ / kBlock * kBlock : held_;
  int code = write_out(0, whole);
  if (code == 0 && direct_ && whole != held_) code = stop_direct();
  if (code == 0) code = write_out(whole, held_);
  if (code != 0) return code;
  return late ? patch(layout, begin) : 0;
}

// What the disk has already: `begin` bytes.
int FileWriter::patch(const FileLayout& layout, uint64_t begin) {
  if (direct_) {
    if (const int code = stop_direct(); code != 0) return code;
  }
  for (const uint64_t at : layout.patches()) {
    if (at >= begin) continue;
    const ssize_t n = pwrite(fd_, &sum_, sizeof sum_, static_cast<off_t>(at));
    if (n != sizeof sum_) return n < 0 ? errno : EIO;
  }
  return 0;
}

}  // namespace headrace::io
