#include "io/slow_model.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace headrace::io {
namespace {

constexpr double kNs = 1e9;

// splitmix64: the n-th number of a seed's stream, without state.
uint64_t mix(uint64_t seed, uint64_t n) {
  uint64_t z = seed + (n + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// In (0, 1].
double uniform(uint64_t bits) { return (static_cast<double>(bits >> 11) + 1) * 0x1.0p-53; }

void require(bool ok, const char* what, double value, const char* expected) {
  if (ok) return;
  throw Error(ErrorKind::kInvalidArgument, std::string(what) + " of a simulation is " +
                                               std::to_string(value) + ", expected " + expected);
}

void check(const SlowFigures& f) {
  const auto amount = [](const char* what, double value, double most) {
    require(value >= 0 && value <= most, what, value, "0 or more, and finite");
  };
  amount("latency_median_s", f.latency_median_s, 3600);
  amount("latency_sigma", f.latency_sigma, 10);
  amount("open_median_s", f.open_median_s, 3600);
  amount("open_sigma", f.open_sigma, 10);
  amount("bandwidth_bytes_per_s", f.bandwidth_bytes_per_s, 1e15);
  amount("stream_bytes_per_s", f.stream_bytes_per_s, 1e15);
  require(f.error_rate >= 0 && f.error_rate <= 1, "error_rate", f.error_rate, "0 to 1");
  require(f.parallelism <= SlowModel::kParallelismMax, "parallelism", f.parallelism, "0 to 4096");
  double last = 0;
  for (const SlowStep& step : f.steps) {
    require(step.at_s >= last && std::isfinite(step.at_s), "at_s", step.at_s, "steps in order");
    require(step.factor > 0 && step.factor <= 1e6, "factor", step.factor, "more than 0");
    last = step.at_s;
  }
}

}  // namespace

struct SlowModel::Shared {
  pthread_mutex_t mutex;
  int64_t origin_ns;
  std::atomic<double> factor;
  uint64_t draws;
  double link_free_ns;
  SlowStats stats;
  int64_t server_free_ns[kParallelismMax];
};

// A process that dies inside leaves numbers that are merely a little off.
class SlowModel::Lock {
 public:
  explicit Lock(Shared& shared) : mutex_(&shared.mutex) {
    if (pthread_mutex_lock(mutex_) == EOWNERDEAD) pthread_mutex_consistent(mutex_);
  }
  ~Lock() { pthread_mutex_unlock(mutex_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  pthread_mutex_t* mutex_;
};

SlowModel::SlowModel(SlowFigures figures)
    : figures_((check(figures), std::move(figures))),
      shared_(static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                        MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
  if (shared_ == MAP_FAILED) {
    throw Error(ErrorKind::kVolume, "no shared memory for a simulated storage", {}, -1, errno);
  }
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&shared_->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  shared_->origin_ns = now_ns();
  shared_->factor.store(1);
}

// Other processes may still use the mutex: only the mapping goes.
SlowModel::~SlowModel() { munmap(shared_, sizeof(Shared)); }

int64_t SlowModel::now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

void SlowModel::sleep_until(int64_t due_ns) {
  const timespec due{due_ns / 1'000'000'000, due_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr) == EINTR) {
  }
}

void SlowModel::scale_latency(double factor) {
  require(factor > 0 && factor <= 1e6, "the latency's factor", factor, "more than 0");
  shared_->factor.store(factor);
}

double SlowModel::latency_factor(int64_t now_ns) const {
  const double at_s = static_cast<double>(now_ns - shared_->origin_ns) / kNs;
  double factor = 1;
  for (const SlowStep& step : figures_.steps) {
    if (step.at_s <= at_s) factor = step.factor;
  }
  return factor * shared_->factor.load();
}

double SlowModel::draw(double median_s, double sigma, int64_t now_ns) {
  const double u = uniform(mix(figures_.seed, shared_->draws++));
  const double v = uniform(mix(figures_.seed, shared_->draws++));
  const double normal = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
  return median_s * std::exp(sigma * normal) * latency_factor(now_ns);
}

int64_t SlowModel::serve_locked(int64_t now_ns, double latency_s, uint64_t bytes) {
  const auto size = static_cast<double>(bytes);
  int64_t* server = nullptr;
  int64_t start = now_ns;
  if (figures_.parallelism > 0) {
    server =
        std::min_element(shared_->server_free_ns, shared_->server_free_ns + figures_.parallelism);
    start = std::max(start, *server);
  }
  int64_t sent = start;
  // What moves no bytes passes by the transfers that queue for the link.
  if (figures_.bandwidth_bytes_per_s > 0 && bytes > 0) {
    // With its fractions: cut off at every request they would make the link faster than it is.
    shared_->link_free_ns = std::max(static_cast<double>(start), shared_->link_free_ns) +
                            size / figures_.bandwidth_bytes_per_s * kNs;
    sent = static_cast<int64_t>(shared_->link_free_ns);
  }
  if (figures_.stream_bytes_per_s > 0) {
    sent = std::max(sent, start + static_cast<int64_t>(size / figures_.stream_bytes_per_s * kNs));
  }
  const int64_t due = sent + static_cast<int64_t>(latency_s * kNs);
  if (server != nullptr) *server = due;
  ++shared_->stats.requests;
  shared_->stats.bytes += bytes;
  shared_->stats.delay_s += static_cast<double>(due - now_ns) / kNs;
  return due;
}

SlowAnswer SlowModel::admit(int64_t now_ns, uint64_t bytes, bool opens) {
  const Lock lock(*shared_);
  double latency_s = draw(figures_.latency_median_s, figures_.latency_sigma, now_ns);
  const double open_s = opens ? draw(figures_.open_median_s, figures_.open_sigma, now_ns) : 0.0;
  latency_s += open_s;
  const bool fails = uniform(mix(figures_.seed, shared_->draws++)) <= figures_.error_rate;
  if (fails) ++shared_->stats.errors;
  return {serve_locked(now_ns, latency_s, fails ? 0 : bytes), fails ? EIO : 0,
          static_cast<int64_t>(open_s * kNs)};
}

int64_t SlowModel::admit_open(int64_t now_ns) {
  const Lock lock(*shared_);
  return serve_locked(now_ns, draw(figures_.open_median_s, figures_.open_sigma, now_ns), 0);
}

void SlowModel::open_delay() { sleep_until(admit_open(now_ns())); }

int SlowModel::read_delay(uint64_t bytes) {
  const SlowAnswer answer = admit(now_ns(), bytes, false);
  sleep_until(answer.due_ns);
  return answer.error;
}

SlowStats SlowModel::stats() const {
  const Lock lock(*shared_);
  return shared_->stats;
}

}  // namespace headrace::io
