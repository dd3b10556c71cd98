#include "io/volume.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "io/residency.h"

namespace headrace::io {
namespace {

constexpr unsigned kStatxDioalign = 0x2000;  // Linux 6.1, newer than the C library's headers

constexpr uint64_t kPageBytes = 4096;

uint32_t direct_alignment(int fd) {
  struct statx status;
  std::memset(&status, 0, sizeof status);
  if (statx(fd, "", AT_EMPTY_PATH, kStatxDioalign, &status) == 0 &&
      (status.stx_mask & kStatxDioalign) != 0) {
    uint32_t memory, offset;  // stx_dio_mem_align, stx_dio_offset_align
    const auto* raw = reinterpret_cast<const char*>(&status);
    std::memcpy(&memory, raw + 0x98, 4);
    std::memcpy(&offset, raw + 0x9c, 4);
    if (memory == 0 || offset == 0) return 0;  // no direct I/O on this file
    return std::bit_ceil(std::max(memory, offset));
  }
  return 4096;  // older kernels do not say; every block device accepts a page
}

}  // namespace

Volume::Volume(VolumeKind kind, std::string path, uint64_t bytes, int64_t mtime_ns)
    : kind_(kind), path_(std::move(path)), bytes_(bytes), mtime_ns_(mtime_ns) {}

Volume::~Volume() {
  if (fd_.load() >= 0) close(fd_.load());
  if (direct_fd_.load() >= 0) close(direct_fd_.load());
}

void Volume::open_locked() {
  if (kind_ == VolumeKind::kRemote) {
    throw Error(ErrorKind::kVolume, "volume " + path_ + " is remote: it has no descriptor.", path_,
                -1, ENOTSUP);
  }
  const int flags = O_RDONLY | O_CLOEXEC | (kind_ == VolumeKind::kTree ? O_DIRECTORY : O_NONBLOCK);
  const int fd = open(path_.c_str(), flags);
  if (fd < 0) {
    const int error = errno;
    throw Error(ErrorKind::kVolume,
                "volume " + path_ + ": " + strerror(error) +
                    (error == ENOENT   ? ". It was moved or deleted; put it back or pack again."
                     : error == EMFILE ? ". Raise the open-file limit (ulimit -n)."
                                       : "."),
                path_, -1, error);
  }
  struct stat status;
  fstat(fd, &status);
  if (kind_ == VolumeKind::kFile) {
    const auto found = static_cast<uint64_t>(status.st_size);
    const int64_t mtime = status.st_mtim.tv_sec * int64_t{1'000'000'000} + status.st_mtim.tv_nsec;
    if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
      close(fd);
      throw Error(ErrorKind::kCorruptStore, "volume " + path_ + " is not a regular file.", path_);
    }
    if (S_ISREG(status.st_mode) && found != bytes_) {
      close(fd);
      throw Error(mtime_ns_ >= 0 ? ErrorKind::kSourceChanged : ErrorKind::kCorruptStore,
                  "volume " + path_ + " has " + std::to_string(found) + " bytes, expected " +
                      std::to_string(bytes_) +
                      (mtime_ns_ >= 0 ? ". It changed after it was indexed; index it again."
                                      : ". Run `headrace verify` on the store."),
                  path_, static_cast<int64_t>(std::min(found, bytes_)));
    }
    if (mtime_ns_ >= 0 && mtime != mtime_ns_) {
      close(fd);
      throw Error(ErrorKind::kSourceChanged,
                  "volume " + path_ + " was modified after it was indexed (mtime " +
                      std::to_string(mtime) + " ns, expected " + std::to_string(mtime_ns_) +
                      "). Index it again.",
                  path_);
    }
  }
  fd_.store(fd, std::memory_order_release);
}

int Volume::fd() {
  int fd = fd_.load(std::memory_order_acquire);
  if (fd >= 0) return fd;
  std::lock_guard lock(mutex_);
  if (fd_.load(std::memory_order_relaxed) < 0) open_locked();
  return fd_.load(std::memory_order_relaxed);
}

void Volume::open_direct_locked() {
  const int fd = kind_ == VolumeKind::kFile
                     ? open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT | O_NONBLOCK)
                     : -1;
  if (fd >= 0) {
    // The path may name another file by now: both descriptors must be of the one that was checked.
    struct stat direct, buffered;
    const uint32_t alignment = direct_alignment(fd);
    const bool same = fstat(fd, &direct) == 0 && fstat(fd_.load(), &buffered) == 0 &&
                      direct.st_ino == buffered.st_ino && direct.st_dev == buffered.st_dev;
    if (alignment != 0 && alignment <= kPageBytes && same) {
      alignment_ = alignment;
      direct_fd_.store(fd, std::memory_order_release);
      return;
    }
    close(fd);
  }
  direct_fd_.store(-1, std::memory_order_release);
}

int Volume::direct_fd() {
  int fd = direct_fd_.load(std::memory_order_acquire);
  if (fd != -2) return fd;
  this->fd();
  std::lock_guard lock(mutex_);
  if (direct_fd_.load(std::memory_order_relaxed) == -2) open_direct_locked();
  return direct_fd_.load(std::memory_order_relaxed);
}

const Mapping* Volume::mapping() {
  const Mapping* seen = mapping_seen_.load(std::memory_order_acquire);
  if (seen != nullptr) return seen->damaged() == 0 ? seen : nullptr;
  if (kind_ != VolumeKind::kFile || mapping_failed_.load(std::memory_order_acquire)) return nullptr;
  const int fd = this->fd();
  std::lock_guard lock(mutex_);
  if (mapping_ == nullptr && !mapping_failed_.load()) {
    try {
      if (bytes_ == 0) throw Error(ErrorKind::kVolume, "no mapping");
      mapping_ = Mapping::of_file(fd, bytes_, path_);
      // Random access: a stray fault must not pull in the device's whole read-ahead window.
      madvise(const_cast<std::byte*>(mapping_->data()), mapping_->size(), MADV_RANDOM);
      mapping_seen_.store(mapping_.get(), std::memory_order_release);
    } catch (const Error&) {
      mapping_failed_.store(true, std::memory_order_release);
    }
  }
  return mapping_seen_.load(std::memory_order_acquire);
}

bool Volume::resident(uint64_t offset, uint64_t length) {
  if (kind_ != VolumeKind::kFile) return false;
  if (length == 0) return true;
  return io::resident(fd(), offset, length);
}

}  // namespace headrace::io
