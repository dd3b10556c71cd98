// What a path means, without asking the file system: an absolute path without empty, `.` and `..`
// parts. The board knows files by such paths.
#pragma once

#include <cstdint>

#include "preload/board_view.h"

namespace headrace::preload::shim {

// Longer ones are opened as if the shim were not there: it stands on other programs' stacks, and
// those of signal handlers are small.
inline constexpr uint64_t kShimPathBytesMax = 1000;

struct Named {
  int64_t file = -1;        // on the board
  bool below_root = false;  // in the program's words
  // The path leads there whatever links there are: `..` was not taken from the name of a folder
  // that may be a link.
  bool sure = false;
};

// `folder`: as for openat.
Named name_of(const BoardView& board, int folder, const char* path);

}  // namespace headrace::preload::shim
