#include "preload/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "core/error.h"

namespace headrace::preload {
namespace {

[[noreturn]] void fail(const char* what, uint64_t nbytes, int fd) {
  const int error = errno;
  if (fd >= 0) close(fd);
  throw Error(ErrorKind::kVolume,
              std::string(what) + ": no shared memory of " + std::to_string(nbytes) +
                  " bytes: " + strerror(error),
              {}, -1, error);
}

}  // namespace

SharedMemory::SharedMemory(const char* what, uint64_t nbytes, Others others) : nbytes_(nbytes) {
  fd_ = memfd_create(what, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  struct stat status;
  if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(nbytes)) != 0 || fstat(fd_, &status) != 0) {
    fail(what, nbytes, fd_);
  }
  inode_ = status.st_ino;
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) fail(what, nbytes, fd_);
  data_ = static_cast<std::byte*>(data);
  // Last: the mapping above stays writable, later ones are not.
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (others == Others::kReadOnly) seals |= F_SEAL_FUTURE_WRITE;
  if (fcntl(fd_, F_ADD_SEALS, seals) != 0) {
    const int error = errno;
    munmap(data_, nbytes_);
    errno = error;
    fail(what, nbytes, fd_);
  }
}

SharedMemory::~SharedMemory() {
  munmap(data_, nbytes_);
  close(fd_);
}

}  // namespace headrace::preload
