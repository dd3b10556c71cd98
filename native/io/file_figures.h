// FileFigures: what a FileReader counts about itself. Guarded by the reader's mutex.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace headrace::io {

inline constexpr size_t kLatencyBuckets = 64;

struct FileReaderStats {
  // Seconds of all threads: looking and reading; without work; with work that waits for memory.
  double busy_s = 0, wait_input_s = 0, wait_output_s = 0;
  uint64_t reads = 0;     // files read, well or not
  uint64_t failures = 0;  // of them and of the looks, with an error
  uint64_t bytes = 0;     // read well
  uint64_t page_cache_bytes = 0, source_bytes = 0;
  uint64_t in_flight = 0;
  uint64_t buffered_bytes = 0;  // in buffers that are in use
  uint64_t ready_bytes = 0;     // read and not taken
  uint64_t mapped_bytes = 0;    // in use or kept for reuse
  uint64_t threads = 0;
  uint64_t gave_up = 0;  // takes that did not wait for a read to its end
  // Bucket i counts reads that took [2^(i/2), 2^((i+1)/2)) microseconds.
  std::array<uint64_t, kLatencyBuckets> latency_us{};
};

class FileFigures {
 public:
  using Clock = std::chrono::steady_clock;

  // From now on time counts.
  void start();
  // Time up to now belongs to what the threads did until now: `alive` of them, those without work
  // because there was none, or because it was `blocked`.
  void account(unsigned alive, bool blocked);
  void note_latency(double seconds);
  // How long a take waits for a read that has begun.
  double patience_s() const;

  FileReaderStats stats;

 private:
  bool started_ = false;
  double latency_s_ = 0;  // a moving mean
  Clock::time_point accounted_;
};

}  // namespace headrace::io
