// The original behind an open descriptor of its copy.
#pragma once

#include <sys/stat.h>

#include "preload/shim_path.h"
#include "preload/shim_plane.h"

namespace headrace::preload::shim {

// Looked for when it is made; errno is not touched. None (false): the descriptor is of no copy, or
// another file stands at the original's path by now: then the copy is what the program opened.
class Original {
 public:
  Original(const Plane& plane, int fd);
  explicit operator bool() const { return file_ != nullptr; }
  const char* path() const { return path_; }
  // Whether it was written to, or something was set on it, since it was copied.
  bool changed() const;
  // Puts it in the copy's place: under the same number, at the same offset. False: it cannot be
  // opened any more, and all is as before.
  bool take_place() const;

 private:
  const int fd_;
  const BoardFile* file_ = nullptr;
  struct stat now_;
  char path_[kShimPathBytesMax + 1];
};

// For `fstat` of a file's copy: whether the original was changed and stands in its place now.
// Whoever has read on and looks again waits for what others append. Those who have just opened the
// file are not asked: it was compared then.
bool follow(const Plane& plane, const BoardFile& file, int fd);

}  // namespace headrace::preload::shim
