// The io_uring engine with its inner choices in the caller's hand: for tests and measurements.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "io/engine.h"

namespace headrace::io {

enum class RingOp { kOpen, kRead };

struct RingOptions {
  // READ_FIXED into buffers that `know_buffer` named.
  bool registered_buffers = true;
  // An enter waits for 1 in so many of the reads in flight. Waiting for an eighth instead of one
  // costs no reads/s (0.99 to 1.06 at 110 kB and 2.2 kB) and saves up to a tenth of the CPU at 110
  // kB, up to 15% at 2.2 kB; a quarter lost a tenth of the reads/s at 110 kB.
  unsigned wait_share = 8;
  // Sees each completion before the engine does and returns the result to use instead: bytes, a
  // descriptor, or -errno. Tests inject faults with it.
  std::function<int(RingOp, int)> on_completion = nullptr;
  // Asked before each io_uring_enter: 0 lets it happen, -errno is what it answers instead.
  std::function<int()> on_enter = nullptr;
  // A ring that takes no calls any more may still bring what is in flight. It is waited for while
  // something comes at least this often.
  std::chrono::milliseconds lost_after{5000};
};

std::unique_ptr<Engine> make_uring_engine(const EngineOptions& options, const RingOptions& ring,
                                          std::string* reason);

}  // namespace headrace::io
