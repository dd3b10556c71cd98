#include "io/file_figures.h"

#include <algorithm>
#include <cmath>

namespace headrace::io {
namespace {

// A take waits for a read that has begun as long as so many reads take, and at least so long.
constexpr double kPatienceReads = 8;
constexpr double kPatienceSecondsMin = 0.05;
// The mean latency moves by this share of each new one.
constexpr double kLatencyWeight = 1.0 / 32;

size_t bucket_of(double microseconds) {
  if (microseconds < 1) return 0;
  const auto bucket = static_cast<size_t>(2 * std::log2(microseconds));
  return std::min(bucket, kLatencyBuckets - 1);
}

}  // namespace

void FileFigures::start() {
  if (!started_) accounted_ = Clock::now();
  started_ = true;
}

void FileFigures::account(unsigned alive, bool blocked) {
  if (!started_) return;
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - accounted_).count();
  stats.busy_s += seconds * static_cast<double>(stats.in_flight);
  const double idle_s = seconds * static_cast<double>(alive - stats.in_flight);
  (blocked ? stats.wait_output_s : stats.wait_input_s) += idle_s;
  accounted_ = now;
}

void FileFigures::note_latency(double seconds) {
  ++stats.latency_us[bucket_of(seconds * 1e6)];
  latency_s_ += (seconds - latency_s_) * (latency_s_ == 0 ? 1 : kLatencyWeight);
}

double FileFigures::patience_s() const {
  return std::max(kPatienceReads * latency_s_, kPatienceSecondsMin);
}

}  // namespace headrace::io
