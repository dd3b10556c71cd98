#include "preload/slow_memory.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace headrace::preload {

SlowMemory::SlowMemory(const SlowMemoryFigures& figures)
    : memory_("headrace-slow", sizeof(SlowState), SharedMemory::Others::kMayWrite) {
  auto& state = *reinterpret_cast<SlowState*>(memory_.data());
  const auto fill = [](const char* what, std::span<const int64_t> from, int64_t* to) {
    if (from.size() != kQuantiles || std::ranges::any_of(from, [](int64_t ns) { return ns < 0; })) {
      throw Error(ErrorKind::kInvalidArgument, std::string(what) + ": expected " +
                                                   std::to_string(kQuantiles) +
                                                   " times, none of them negative");
    }
    std::ranges::copy(from, to);
  };
  fill("open_ns", figures.open_ns, state.open_ns);
  fill("read_ns", figures.read_ns, state.read_ns);
  state.servers = std::min(figures.servers, kServersMax);
  state.link_bytes_per_s = figures.link_bytes_per_s;
  state.stream_bytes_per_s = figures.stream_bytes_per_s;
  state.seed = figures.seed;
  state.magic = kSlowMagic;
}

}  // namespace headrace::preload
