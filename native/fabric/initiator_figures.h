// What an initiator has done so far: counted by its loops, read by anybody.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace::fabric {

struct InitiatorFigures {
  uint64_t reads = 0;     // finished well
  uint64_t commands = 0;  // sent
  uint64_t bytes = 0;     // that reads brought
  uint64_t retried = 0;   // commands sent again, for whatever reason
  uint64_t digest_errors = 0;
  uint64_t timeouts = 0;
  uint64_t lost_queues = 0;
  uint64_t failed = 0;  // reads
};

struct InitiatorCounters {
  std::atomic<uint64_t> reads = 0, commands = 0, bytes = 0, retried = 0, digest_errors = 0,
                        timeouts = 0, lost_queues = 0, failed = 0;

  InitiatorFigures figures() const {
    return {reads, commands, bytes, retried, digest_errors, timeouts, lost_queues, failed};
  }
};

}  // namespace headrace::fabric
