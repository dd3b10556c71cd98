// The original behind an open descriptor of its copy.
#pragma once

#include <sys/stat.h>

#include "preload/shim_path.h"
#include "preload/shim_plane.h"

namespace headrace::preload::shim {

// Looked for when it is made; errno is not touched. None (false): another file stands at the
// original's path by now: then the copy is what the program opened.
class Original {
 public:
  // `again`: a look at an open file, which may have been looked at a moment ago.
  explicit Original(const OpenCopy& copy, bool again = false);
  explicit operator bool() const { return there_; }
  const char* path() const { return path_; }
  // Whether it was written to, or something was set on it, since it was copied.
  bool changed() const;
  // Puts it in the place of its copy `fd`: under the same number, at the same offset. False: it
  // cannot be opened any more, and all is as before.
  bool take_place(int fd) const;

 private:
  const OpenCopy& copy_;
  bool there_ = false;
  struct stat now_;
  char path_[kShimPathBytesMax + 1];
};

}  // namespace headrace::preload::shim
