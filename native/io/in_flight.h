// InFlight: the places for reads in flight, shared by all engines of a reader, and the record of
// the reads that took them.
//
// An engine takes a place before it hands a read to the device and gives it back with the time that
// the read took. The number of places can be changed at any time: a smaller one takes effect as
// reads finish. Thread-safe; belongs to the process that made it.
//
// Invariants:
//   - reads in flight <= places, except for those begun before a `turn` to fewer
//   - a place that was taken is given back once, by `finished` or `release`
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>

namespace headrace::io {

// Counts of reads by latency: bucket i holds [2^(i/2), 2^((i+1)/2)) microseconds; the first and the
// last also hold what lies beyond them.
using LatencyCounts = std::array<uint64_t, 64>;
size_t latency_bucket(int64_t nanoseconds);

struct InFlightStats {
  uint64_t reads = 0;  // finished
  uint64_t bytes = 0;  // that arrived
  uint64_t in_flight = 0;
  uint64_t in_flight_most = 0;  // at any moment
  double in_flight_s = 0;       // integral over time: its growth over an interval is the mean
  LatencyCounts latency_us{};
};

class InFlight {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  // `limit` 0: as many as the engines' own depths allow, until `turn`.
  explicit InFlight(unsigned limit = 0);
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Takes up to `wanted` places, at least one: waits until there is one.
  unsigned acquire(unsigned wanted);
  // The same, but returns 0 when there is none, or none until `deadline`.
  unsigned try_acquire(unsigned wanted);
  unsigned acquire_until(unsigned wanted, Time deadline);
  // Gives back places that were not used ...
  void release(unsigned places);
  // ... and places whose reads took `latencies_ns` and brought `bytes` in all.
  void finished(std::span<const int64_t> latencies_ns, uint64_t bytes);

  void turn(unsigned limit);
  // Reads in flight now, in passing.
  unsigned taken() const { return taken_now_.load(std::memory_order_relaxed); }
  unsigned limit() const { return limit_.load(std::memory_order_relaxed); }
  // How many reads one engine should be able to have in flight: the limit where one was set.
  unsigned depth(unsigned own_depth) const {
    const unsigned limit = limit_.load(std::memory_order_relaxed);
    return limit == 0 ? own_depth : limit;
  }

  // The reader is closing: places are no longer counted, and who delays or may give up stops.
  void close();
  bool closed() const { return closed_.load(std::memory_order_relaxed); }

  InFlightStats stats() const;

 private:
  unsigned take_locked(unsigned wanted);
  void give_locked(unsigned places);
  void advance_locked(Time now) const;

  mutable std::mutex mutex_;
  std::condition_variable given_;
  unsigned waiting_ = 0;
  unsigned taken_ = 0;
  std::atomic<unsigned> taken_now_{0};  // the same, for who does not hold the lock
  std::atomic<unsigned> limit_;
  std::atomic<bool> closed_{false};
  mutable Time seen_ = Clock::now();
  mutable double in_flight_s_ = 0;
  InFlightStats sums_;
};

}  // namespace headrace::io
