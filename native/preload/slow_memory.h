// SlowMemory: the launcher's side of a simulated storage: its figures in memory that the programs
// of one run share.
#pragma once

#include <cstdint>
#include <span>

#include "preload/shared_memory.h"
#include "preload/slow_state.h"

namespace headrace::preload {

struct SlowMemoryFigures {
  std::span<const int64_t> open_ns, read_ns;  // kQuantiles each
  uint32_t servers;
  uint64_t link_bytes_per_s, stream_bytes_per_s, seed;
};

class SlowMemory {
 public:
  // Throws Error(kInvalidArgument) for tables of another size, and for negative times.
  explicit SlowMemory(const SlowMemoryFigures& figures);
  int fd() const { return memory_.fd(); }
  uint64_t inode() const { return memory_.inode(); }

 private:
  SharedMemory memory_;
};

}  // namespace headrace::preload
