// RunPageWriter: the launcher's side of a run page.
#pragma once

#include <cstdint>

#include "preload/run_layout.h"
#include "preload/shared_memory.h"

namespace headrace::preload {

class RunPageWriter {
 public:
  // `slow_fd`: shared memory of a simulated storage, -1: none.
  RunPageWriter(int slow_fd, uint64_t slow_inode);

  // From now on programs use this board and this ring, descriptors of the launcher; copies in
  // memory are descriptors of `process`.
  void publish(uint32_t process, int board_fd, uint64_t board_inode, int ring_fd,
               uint64_t ring_inode);
  // From now on programs open the originals.
  void clear() { publish(0, 0, 0, 0, 0); }

  uint32_t epoch() const { return page().epoch.load(std::memory_order_relaxed); }
  int fd() const { return memory_.fd(); }
  uint64_t inode() const { return memory_.inode(); }

 private:
  RunPage& page() const { return *reinterpret_cast<RunPage*>(memory_.data()); }
  SharedMemory memory_;
};

}  // namespace headrace::preload
