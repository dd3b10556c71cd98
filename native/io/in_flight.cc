#include "io/in_flight.h"

#include <algorithm>
#include <bit>

namespace headrace::io {

size_t latency_bucket(int64_t nanoseconds) {
  const uint64_t us = nanoseconds < 1000 ? 1 : static_cast<uint64_t>(nanoseconds) / 1000;
  const auto octave = static_cast<size_t>(std::bit_width(us) - 1);
  // The octave's upper half begins at 2^octave * sqrt(2). Whole microseconds decide it exactly
  // enough: the first buckets are narrower than one.
  const bool upper = static_cast<double>(nanoseconds) / 1000 >=
                     static_cast<double>(uint64_t{1} << octave) * 1.4142135623730951;
  return std::min<size_t>(2 * octave + (upper ? 1 : 0), LatencyCounts{}.size() - 1);
}

InFlight::InFlight(unsigned limit) : limit_(limit) {}

unsigned InFlight::take_locked(unsigned wanted) {
  const unsigned limit = limit_.load(std::memory_order_relaxed);
  const bool bounded = limit != 0 && !closed();
  const unsigned free = !bounded ? wanted : limit > taken_ ? limit - taken_ : 0;
  const unsigned got = std::min(wanted, free);
  if (got == 0) return 0;
  advance_locked(Clock::now());
  taken_ += got;
  taken_now_.store(taken_, std::memory_order_relaxed);
  sums_.in_flight_most = std::max<uint64_t>(sums_.in_flight_most, taken_);
  return got;
}

unsigned InFlight::try_acquire(unsigned wanted) {
  std::lock_guard lock(mutex_);
  return take_locked(wanted);
}

unsigned InFlight::acquire(unsigned wanted) {
  std::unique_lock lock(mutex_);
  unsigned got = take_locked(wanted);
  if (got != 0) return got;
  ++waiting_;
  given_.wait(lock, [&] { return (got = take_locked(wanted)) != 0; });
  --waiting_;
  return got;
}

unsigned InFlight::acquire_until(unsigned wanted, Time deadline) {
  std::unique_lock lock(mutex_);
  unsigned got = take_locked(wanted);
  if (got != 0) return got;
  ++waiting_;
  given_.wait_until(lock, deadline, [&] { return (got = take_locked(wanted)) != 0; });
  --waiting_;
  return got;
}

void InFlight::give_locked(unsigned places) {
  advance_locked(Clock::now());
  taken_ -= places;
  taken_now_.store(taken_, std::memory_order_relaxed);
  if (waiting_ == 0) return;
  if (places == 1) {
    given_.notify_one();
  } else {
    given_.notify_all();
  }
}

void InFlight::release(unsigned places) {
  if (places == 0) return;
  std::lock_guard lock(mutex_);
  give_locked(places);
}

void InFlight::finished(std::span<const int64_t> latencies_ns, uint64_t bytes) {
  if (latencies_ns.empty()) return;
  std::lock_guard lock(mutex_);
  for (const int64_t ns : latencies_ns) ++sums_.latency_us[latency_bucket(ns)];
  sums_.reads += latencies_ns.size();
  sums_.bytes += bytes;
  give_locked(static_cast<unsigned>(latencies_ns.size()));
}

void InFlight::turn(unsigned limit) {
  std::lock_guard lock(mutex_);
  limit_.store(limit, std::memory_order_relaxed);
  given_.notify_all();
}

void InFlight::close() {
  std::lock_guard lock(mutex_);
  closed_.store(true, std::memory_order_relaxed);
  given_.notify_all();
}

void InFlight::advance_locked(Time now) const {
  in_flight_s_ += taken_ * std::chrono::duration<double>(now - seen_).count();
  seen_ = now;
}

InFlightStats InFlight::stats() const {
  std::lock_guard lock(mutex_);
  advance_locked(Clock::now());
  InFlightStats stats = sums_;
  stats.in_flight = taken_;
  stats.in_flight_s = in_flight_s_;
  return stats;
}

}  // namespace headrace::io
