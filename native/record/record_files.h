// What this process's descriptors are, as far as it is worth logging what is done with them.
#pragma once

#include <cstdint>

namespace headrace::record {

enum class Mark : uint8_t {
  kUnknown = 0,
  kFile = 1,  // regular, and its open was logged
  kPipe = 2,
  kSocket = 3,
  kOther = 4,
};

// Logs the open of `fd` under the path that the program said, if it is a regular file.
void opened(int fd, const char* path, int64_t begin_ns, uint8_t flags);
// One that was never seen opened is looked at now; a file that has been open already is logged so.
Mark mark_of(int fd);
// The descriptor may mean something else from now on. Logs the end of what it meant.
void closing(int fd);
void closing_range(unsigned first, unsigned last);
// In a child: nothing is known, so that what it inherited is logged there when it is used.
void forget_all();

}  // namespace headrace::record
