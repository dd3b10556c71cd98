#include "io/slow_engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <queue>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace headrace::io {
namespace {

using std::chrono::nanoseconds;

// How often a sleep looks whether the reader closes.
constexpr auto kLookAround = std::chrono::milliseconds(20);

class SlowEngine final : public Engine {
 public:
  SlowEngine(std::unique_ptr<Engine> inner, std::shared_ptr<SlowModel> model,
             const EngineOptions& options)
      : inner_(std::move(inner)),
        model_(std::move(model)),
        own_depth_(std::max(1u, options.queue_depth)),
        in_flight_(options.in_flight ? options.in_flight : std::make_shared<InFlight>()),
        name_(model_->label() + " over " + inner_->name()) {}

  const char* name() const override { return name_.c_str(); }
  void know_buffer(uint64_t id, std::span<std::byte> memory) override {
    inner_->know_buffer(id, memory);
  }
  void forget_buffer(uint64_t id) override { inner_->forget_buffer(id); }

  void read(std::span<Read> reads, const OnDone& on_done) override {
    try {
      read_all(reads, on_done);
    } catch (...) {  // none is in flight in `inner_`; what waits for its time is forgotten
      in_flight_->release(std::exchange(taken_, 0));
      places_ = 0;
      due_ = {};
      throw;
    }
  }

 private:
  void read_all(std::span<Read> reads, const OnDone& on_done) {
    for (size_t next = 0; next < reads.size() || !due_.empty();) {
      const size_t started = start(reads.subspan(next));
      next += started;
      if (report(on_done) == 0 && started == 0) wait(next < reads.size());
    }
  }

  struct Due {
    InFlight::Time at;
    InFlight::Time started;
    Read* read;
    int error;
    int64_t open_ns;
    unsigned others;
    bool operator<(const Due& other) const { return at > other.at; }  // the earliest on top
  };

  // Starts as many as there are places for; returns how many.
  size_t start(std::span<Read> reads) {
    const size_t depth = in_flight_->depth(own_depth_);
    if (depth <= due_.size()) return 0;
    const size_t wanted = std::min(reads.size(), depth - due_.size());
    if (wanted == 0) return 0;
    if (places_ == 0) hold(in_flight_->try_acquire(static_cast<unsigned>(wanted)));
    const size_t count = std::min<size_t>(places_, wanted);
    if (count == 0) return 0;
    const unsigned surplus = std::exchange(places_, 0) - static_cast<unsigned>(count);
    taken_ -= surplus;
    in_flight_->release(surplus);
    const auto batch = reads.first(count);
    const auto now = InFlight::Clock::now();
    const int64_t now_ns = now.time_since_epoch() / nanoseconds(1);
    unsigned others = in_flight_->taken() - static_cast<unsigned>(count);
    for (Read& read : batch) {
      const SlowAnswer answer = model_->admit(now_ns, read.length, read.path != nullptr);
      const InFlight::Time at(nanoseconds(answer.due_ns));
      due_.push({at, now, &read, answer.error, answer.open_ns, others++});
    }
    inner_->read(batch, [](Read&) {});
    return count;
  }

  // Reports what is due; returns how many.
  size_t report(const OnDone& on_done) {
    const auto now = InFlight::Clock::now();
    finished_.clear();
    took_ns_.clear();
    uint64_t bytes = 0;
    while (!due_.empty() && (due_.top().at <= now || in_flight_->closed())) {
      const Due& due = due_.top();
      if (due.error != 0 && due.read->error == 0) {
        due.read->error = due.error;
        due.read->done = 0;
      }
      bytes += due.read->done;
      due.read->took_ns = (now - due.started) / nanoseconds(1);
      due.read->open_ns = due.open_ns;
      due.read->others = due.others;
      took_ns_.push_back(due.read->took_ns);
      finished_.push_back(due.read);
      due_.pop();
    }
    taken_ -= static_cast<unsigned>(took_ns_.size());
    in_flight_->finished(took_ns_, bytes);
    for (Read* read : finished_) on_done(*read);
    return finished_.size();
  }

  // Until the next read is due, or there is a place for another.
  void wait(bool more_to_start) {
    auto until = InFlight::Clock::now() + kLookAround;
    if (!due_.empty()) until = std::min(until, due_.top().at);
    const bool may_start = more_to_start && in_flight_->depth(own_depth_) > due_.size();
    if (may_start) {
      hold(in_flight_->acquire_until(1, until));
    } else {
      std::this_thread::sleep_until(until);
    }
  }

  const std::unique_ptr<Engine> inner_;
  const std::shared_ptr<SlowModel> model_;
  const unsigned own_depth_;
  const std::shared_ptr<InFlight> in_flight_;
  const std::string name_;
  void hold(unsigned places) {
    places_ = places;
    taken_ += places;
  }

  unsigned taken_ = 0;   // places
  unsigned places_ = 0;  // of them, not yet used
  std::priority_queue<Due> due_;
  std::vector<Read*> finished_;
  std::vector<int64_t> took_ns_;
};

}  // namespace

std::unique_ptr<Engine> make_slow_engine(std::unique_ptr<Engine> inner,
                                         std::shared_ptr<SlowModel> model,
                                         const EngineOptions& options) {
  return std::make_unique<SlowEngine>(std::move(inner), std::move(model), options);
}

}  // namespace headrace::io
