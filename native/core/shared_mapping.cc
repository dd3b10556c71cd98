#include "core/shared_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.h"

namespace headrace {
namespace {

constexpr uint64_t kBlockBytes = 512;  // of st_blocks

[[noreturn]] void refuse(const std::string& found) {
  throw Error(ErrorKind::kInvalidArgument,
              "shared memory " + found + "; expected a sealed memfd, all of it allocated");
}

void check(int fd, size_t size) {
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) refuse("is no memfd");
  constexpr int kWriters = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE;  // either also forbids holes
  if ((seals & F_SEAL_SHRINK) == 0 || (seals & kWriters) == 0) {
    refuse("has seals " + std::to_string(seals));
  }
  struct stat status;
  if (fstat(fd, &status) != 0) refuse(std::string("cannot be looked at: ") + strerror(errno));
  const auto found = static_cast<uint64_t>(status.st_size);
  const uint64_t allocated = static_cast<uint64_t>(status.st_blocks) * kBlockBytes;
  if (size == 0 || found < size || allocated < found) {
    refuse("has " + std::to_string(found) + " bytes, " + std::to_string(allocated) +
           " of them allocated, and " + std::to_string(size) + " were promised");
  }
}

}  // namespace

std::shared_ptr<const SharedMapping> SharedMapping::of(int fd, size_t size) {
  check(fd, size);
  void* data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    const int error = errno;
    throw Error(ErrorKind::kVolume,
                "cannot map " + std::to_string(size) + " shared bytes: " + strerror(error), {}, -1,
                error);
  }
  madvise(data, size, MADV_DONTFORK);
  return std::shared_ptr<const SharedMapping>(
      new SharedMapping(static_cast<const std::byte*>(data), size));
}

SharedMapping::SharedMapping(const std::byte* data, size_t size)
    : data_(data), size_(size), owner_pid_(getpid()) {}

SharedMapping::~SharedMapping() {
  // In a forked child something else may lie at this address by now.
  if (getpid() == owner_pid_) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace headrace
