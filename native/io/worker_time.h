// WorkerTime: where the time of a reader's workers goes. Sums of intervals between changes; the
// reader's lock guards it.
#pragma once

#include <algorithm>
#include <chrono>

namespace headrace::io {

class WorkerTime {
 public:
  using Clock = std::chrono::steady_clock;

  // Counts the time since the last change with what held during it.
  void advance() {
    const auto now = Clock::now();
    const double s = std::chrono::duration<double>(now - since_).count();
    since_ = now;
    if (!begun_) return;
    busy_s += s * (busy - waiting_for_memory);
    wait_output_s += s * waiting_for_memory;
    if (!queued) wait_input_s += s * std::max(0, wanted - busy);
  }
  // From now on workers count as idle: the first batch was submitted.
  void begin() {
    advance();
    begun_ = true;
  }

  double busy_s = 0;
  double wait_input_s = 0;
  double wait_output_s = 0;

  // What holds now. Call `advance` before a change.
  int wanted = 0;  // workers that may work
  int busy = 0;    // that have a batch
  int waiting_for_memory = 0;
  bool queued = false;  // a batch waits for a worker

 private:
  bool begun_ = false;
  Clock::time_point since_ = Clock::now();
};

}  // namespace headrace::io
