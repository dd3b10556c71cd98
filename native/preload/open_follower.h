// OpenFollower: a second reader of a ring, beside the daemon: the paths that programs open, in
// their order. Takes nothing away from anybody.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "preload/board_view.h"
#include "preload/ring_layout.h"

namespace headrace::preload {

class OpenFollower {
 public:
  // Throws Error(kInvalidArgument) if the descriptors are no board and ring. They may be closed
  // then.
  OpenFollower(int board_fd, int ring_fd);
  ~OpenFollower();
  OpenFollower(const OpenFollower&) = delete;
  OpenFollower& operator=(const OpenFollower&) = delete;

  // Paths of files on the board that were opened for reading since the last call.
  std::vector<std::string> take();

 private:
  uint64_t board_nbytes_ = 0;  // before what sets them
  uint64_t ring_nbytes_ = 0;
  void* board_ = nullptr;
  void* ring_ = nullptr;
  uint64_t capacity_ = 0;
  uint64_t tail_ = 0;
  BoardView view_;
};

}  // namespace headrace::preload
