// SlowModel: how long a slow storage would take, computed rather than suffered.
//
// A seeded model of one storage system as its clients see it: opens and reads have lognormal
// latencies, all transfers share one link, at most `parallelism` requests are served at a time, and
// some fail. `admit` says when a request that begins at a given time is done; it is told the time
// and sleeps nowhere, so that tests need no clock. `open_delay` and `read_delay` do sleep: for
// readers that block.
//
// Its state lies in memory that forked children share: all processes of a job queue for one link,
// as they do for one real storage. Thread-safe and fork-safe.
//
// How a request is served: it waits for a free server, then for the link behind all earlier
// transfers, then its bytes arrive one latency later. So an idle storage answers after latency +
// bytes / bandwidth, and a saturated one delivers its bandwidth. An open moves no bytes and does
// not wait for the link.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace headrace::io {

// From `at_s` seconds after the model was made, latencies are multiplied by `factor`.
struct SlowStep {
  double at_s = 0;
  double factor = 1;
};

struct SlowFigures {
  std::string name = "slow";  // for labels: "simulated NAME"
  double latency_median_s = 0;
  double latency_sigma = 0;  // of the latency's logarithm: p99 = median * exp(2.326 sigma)
  double open_median_s = 0;  // open, or look-up of metadata
  double open_sigma = 0;
  double bandwidth_bytes_per_s = 0;  // of the link that all share; 0: unbounded
  double stream_bytes_per_s = 0;     // of one request; 0: unbounded
  unsigned parallelism = 0;          // requests served at a time; 0: unbounded
  double error_rate = 0;             // of reads: EIO
  uint64_t seed = 0;
  std::vector<SlowStep> steps = {};  // by `at_s`
};

struct SlowStats {
  uint64_t requests = 0;
  uint64_t bytes = 0;
  uint64_t errors = 0;
  double delay_s = 0;  // sum over requests of what each takes, queues included
};

struct SlowAnswer {
  int64_t due_ns = 0;
  int error = 0;        // 0 or EIO
  int64_t open_ns = 0;  // of the time until then, for opening
};

// Shared from within, so that threads of readers that outlive the interpreter let go of it without
// it.
class SlowModel : public std::enable_shared_from_this<SlowModel> {
 public:
  // Throws Error(kInvalidArgument) for figures that make no sense.
  explicit SlowModel(SlowFigures figures);
  ~SlowModel();
  SlowModel(const SlowModel&) = delete;
  SlowModel& operator=(const SlowModel&) = delete;

  static constexpr unsigned kParallelismMax = 4096;
  // Nanoseconds of the steady clock.
  static int64_t now_ns();
  static void sleep_until(int64_t due_ns);

  // A read of `bytes` that begins at `now`, after the file was opened if `opens`.
  SlowAnswer admit(int64_t now_ns, uint64_t bytes, bool opens);
  // An open or stat that begins at `now`: when it is done.
  int64_t admit_open(int64_t now_ns);

  // The same, and sleeps until it is done. `read_delay` returns 0 or EIO.
  void open_delay();
  int read_delay(uint64_t bytes);

  // Multiplies all latencies from now on, on top of the scheduled steps.
  void scale_latency(double factor);
  double latency_factor(int64_t now_ns) const;

  const SlowFigures& figures() const { return figures_; }
  std::string label() const { return "simulated " + figures_.name; }
  SlowStats stats() const;

 private:
  struct Shared;
  class Lock;
  double draw(double median_s, double sigma, int64_t now_ns);
  int64_t serve_locked(int64_t now_ns, double latency_s, uint64_t bytes);

  const SlowFigures figures_;
  Shared* const shared_;
};

}  // namespace headrace::io
