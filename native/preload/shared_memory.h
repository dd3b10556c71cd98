// Shared memory without a name: a memfd of a fixed size, mapped here for writing. Nobody can make
// it smaller (so nobody who maps it can be ended by SIGBUS); whether others may write it is the
// owner's choice.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace::preload {

class SharedMemory {
 public:
  enum class Others { kReadOnly, kMayWrite };

  // Throws Error(kVolume) when the system gives none. `what` names it in messages and /proc.
  SharedMemory(const char* what, uint64_t nbytes, Others others);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }
  uint64_t inode() const { return inode_; }

 private:
  uint64_t nbytes_;
  int fd_ = -1;
  std::byte* data_ = nullptr;
  uint64_t inode_ = 0;
};

}  // namespace headrace::preload
