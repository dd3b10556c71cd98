// Residency: whether bytes of a file lie in the page cache, without reading what does not.
//
// Asks `cachestat` (Linux 6.5), else tries one byte at both ends with RWF_NOWAIT. The answer is for
// the moment only, and `false` where nobody can tell.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace headrace::io {

// `length`: more than 0.
bool resident(int fd, uint64_t offset, uint64_t length);

struct LookedAt {
  uint32_t resident = 0;  // files whose bytes are all there; empty ones count
  double seconds = 0;
};

// Looks at whole files, up to the first that is not there, or until `seconds_max` are over. One
// that cannot be opened, or is no regular file, is not there.
LookedAt look_at_files(std::span<const std::string> paths, double seconds_max);

}  // namespace headrace::io
