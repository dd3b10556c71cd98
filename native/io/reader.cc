#include "io/reader.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "core/mapping.h"
#include "io/plan.h"
#include "io/thread_signals.h"
#include "io/worker.h"

namespace headrace::io {
namespace {

ReaderOptions with_places(ReaderOptions options, std::shared_ptr<InFlight> in_flight) {
  options.engine_options.in_flight = std::move(in_flight);
  options.workers = std::max(1u, options.workers);
  return options;
}

// How much a new batch counts in the mean number of requests per batch.
constexpr double kNewBatchWeight = 0.25;

int kept_done_fd(int fd) {
  if (fd < 0) return -1;
  const int kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (kept >= 0) return kept;
  throw Error(
      ErrorKind::kVolume,
      std::string("cannot keep the descriptor that says when batches are done: ") + strerror(errno),
      {}, -1, errno);
}

int64_t now_ns() { return InFlight::Clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// Batches submitted ahead: 16 small ones hide a hiccup.
constexpr unsigned kBatchesAheadMin = 16;

}  // namespace

std::shared_ptr<Reader> Reader::make(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
                                     std::vector<int> parts) {
  return std::shared_ptr<Reader>(new Reader(std::move(catalog), options, std::move(parts)));
}

Reader::Reader(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
               std::vector<int> parts)
    : catalog_(std::move(catalog)),
      in_flight_(std::make_shared<InFlight>(options.reads_in_flight)),
      remote_(options.remote ? options.remote : catalog_->remote()),
      options_(with_places(options, in_flight_)),
      planner_(catalog_, options_, std::move(parts)),
      done_fd_(kept_done_fd(options.done_fd)),
      arena_(Arena::make(options.budget_bytes, options.buffers)),
      owner_pid_(getpid()),
      budget_bytes_(options.budget_bytes) {}

Reader::~Reader() {
  if (done_fd_ >= 0) ::close(done_fd_);
}

// Full or not: who waits for it has been rung for then.
void Reader::ring() const {
  if (done_fd_ >= 0) eventfd_write(done_fd_, 1);
}

bool Reader::foreign() const { return getpid() != owner_pid_; }

void Reader::refuse_foreign() const {
  if (!foreign()) return;
  throw Error(ErrorKind::kInvalidArgument,
              "this reader belongs to the process that made it, and its threads do not exist in a "
              "forked child. Open the store again after the fork.");
}

bool Reader::close(double seconds) {
  if (foreign()) return true;
  std::deque<std::shared_ptr<Job>> dropped;
  const auto closed = std::make_exception_ptr(
      Error(ErrorKind::kInvalidArgument, "the reader was closed before this batch was read"));
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    dropped.swap(queue_);
    time_.advance();
    time_.queued = false;
  }
  in_flight_->close();
  work_.notify_all();
  memory_.notify_all();
  for (const auto& job : dropped) {
    std::lock_guard lock(job->mutex_);
    job->error_ = closed;
    job->stage_ = Job::Stage::kDone;
    job->ready_.notify_all();
  }
  ring();
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return alive_ == 0; });
}

// Workers that it takes to have all places for reads taken: one more than batches, because each
// batch ends with fewer in flight than it began.
unsigned Reader::workers_wanted_locked() const {
  const unsigned limit = in_flight_->limit();
  if (limit == 0 || requests_per_batch_ < 0.5) return options_.workers;
  // A batch is under way until its slowest read is back, which takes several times as long as a
  // read does: of its reads a few are in flight on the average. Places and memory set the bounds;
  // a worker that waits for them costs nothing.
  const double batches = 4 * std::ceil(limit / std::max(1.0, requests_per_batch_)) + 1;
  const unsigned most = std::max(options_.workers, kWorkersMax);
  return static_cast<unsigned>(std::clamp<double>(batches, options_.workers, most));
}

// Sees to it that somebody takes the next batch, if it may be taken. Each taker does the same.
void Reader::wake_locked() {
  if (queue_.empty() || closing_) return;
  if (alive_ - idle_ >= workers_wanted_locked()) return;  // a busy one takes it when it is done
  int error = 0;
  if (idle_ > 0) {
    work_.notify_one();
  } else if (!start_worker_locked(&error) && alive_ == 0) {
    throw Error(ErrorKind::kVolume,
                std::string("cannot start a thread that reads: ") + strerror(error) +
                    ". Raise the limit of processes (ulimit -u).",
                {}, -1, error);
  }
}

bool Reader::start_worker_locked(int* error) {
  const auto body = [](const std::shared_ptr<Reader>& self) {
    block_signals();
    self->work();
    std::lock_guard lock(self->mutex_);
    --self->alive_;
    self->ended_.notify_all();
  };
  try {
    std::thread thread(body, shared_from_this());
    pthread_setname_np(thread.native_handle(), "headrace-read");
    thread.detach();
  } catch (const std::system_error& e) {
    *error = e.code().value();
    return false;
  } catch (const std::bad_alloc&) {
    *error = ENOMEM;
    return false;
  }
  ++alive_;
  return true;
}

std::shared_ptr<Job> Reader::submit(std::vector<int64_t> indices, std::vector<Range> ranges) {
  refuse_foreign();
  if (!ranges.empty() && (ranges.size() != indices.size() || planner_.parts().size() != 1)) {
    throw Error(ErrorKind::kInvalidArgument, std::to_string(ranges.size()) +
                                                 " ranges were given for " +
                                                 std::to_string(indices.size()) + " samples and " +
                                                 std::to_string(planner_.parts().size()) +
                                                 " parts, expected one each of one part");
  }
  for (const int64_t index : indices) catalog_->check_index(index);
  auto job = std::make_shared<Job>();
  job->indices_ = std::move(indices);
  job->ranges_ = std::move(ranges);
  job->way_.submitted_ns = now_ns();
  std::lock_guard lock(mutex_);
  if (closing_) throw Error(ErrorKind::kInvalidArgument, "the reader is closed");
  const uint64_t number = next_number_;
  try {
    undelivered_.insert(number);
    uncharged_.insert(number);
    queue_.push_back(job);
    wake_locked();
  } catch (...) {
    if (!queue_.empty() && queue_.back() == job) queue_.pop_back();
    undelivered_.erase(number);
    uncharged_.erase(number);
    throw;
  }
  time_.begin();
  job->reader_ = shared_from_this();
  job->number_ = next_number_++;
  time_.queued = true;
  time_.wanted = static_cast<int>(workers_wanted_locked());
  return job;
}

// Waits for a batch that this worker may take. Null: the reader closes.
std::shared_ptr<Job> Reader::next_job() {
  std::unique_lock lock(mutex_);
  ++idle_;
  work_.wait(lock, [&] {
    return closing_ || (!queue_.empty() && alive_ - idle_ < workers_wanted_locked());
  });
  --idle_;
  if (queue_.empty()) return nullptr;
  time_.advance();
  ++time_.busy;
  auto job = std::move(queue_.front());
  queue_.pop_front();
  time_.queued = !queue_.empty();
  wake_locked();
  return job;
}

// What making a worker meets is the error of the batch that it was to read; the next batch tries
// again.
void Reader::work() {
  std::optional<Worker> worker;
  while (const std::shared_ptr<Job> job = next_job()) {
    std::exception_ptr error;
    try {
      if (!worker) worker.emplace(*catalog_, planner_, options_, arena_);
      run(*worker, *job);
    } catch (...) {
      error = std::current_exception();
    }
    {
      std::lock_guard lock(mutex_);
      time_.advance();
      --time_.busy;
      if (error) settle_locked(*job);
    }
    if (error) memory_.notify_all();
    {
      std::lock_guard lock(job->mutex_);
      job->error_ = error;
      job->stage_ = Job::Stage::kDone;
    }
    job->ready_.notify_all();
    ring();
  }
}

void Reader::run(Worker& worker, Job& job) {
  const auto enter = [&](Job::Stage stage, const Plan* plan) {
    std::lock_guard lock(job.mutex_);
    job.stage_ = stage;
    job.plan_ = plan;
  };
  enter(Job::Stage::kPlanning, nullptr);
  job.way_.taken_ns = now_ns();
  guard_mappings();
  worker.forget_unmapped();
  Plan plan;
  plan.batch = std::make_shared<Batch>();
  plan.batch->indices = std::move(job.indices_);
  plan.ranges = std::move(job.ranges_);
  const uint64_t bytes = planner_.plan(plan);
  enter(Job::Stage::kMemory, nullptr);
  job.way_.planned_ns = now_ns();
  const bool waited = charge(job, bytes);
  // Else they are one moment, however long this thread waited for a processor in between.
  job.way_.begun_ns = waited ? now_ns() : job.way_.planned_ns;
  plan.batch->bytes = bytes;
  plan.batch->buffer = arena_->acquire(bytes);
  plan.data = plan.batch->buffer->data;
  planner_.ask(plan);
  for (const Segment& segment : catalog_->segments()) segment.directory->assert_whole();
  enter(Job::Stage::kReading, &plan);
  const auto leave = [&](void*) { enter(Job::Stage::kPlanning, nullptr); };
  const std::unique_ptr<void, decltype(leave)> guard(&plan, leave);  // before `plan` goes
  worker.perform(plan);
  performed(worker, plan, job);
  std::lock_guard lock(job.mutex_);
  BatchWay& way = plan.batch->way;
  way.add(job.way_);
  way.ready_ns = now_ns();
  job.batch_ = std::move(plan.batch);
}

// Waits until the batch's memory fits; batches get theirs in the order of submission. The oldest
// undelivered batch never waits: it is the one that the consumer takes next. Nor do a batch that
// somebody waits for and those before it, which stand in its way. Returns whether it had to wait.
bool Reader::charge(Job& job, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  const auto fits = [&] {
    if (closing_) return true;
    if (*uncharged_.begin() != job.number_) return false;
    return outstanding_bytes_ + bytes <= budget_bytes_ || *undelivered_.begin() == job.number_ ||
           job.number_ < wanted_end_;
  };
  const bool waits = !fits();
  if (waits) {
    time_.advance();
    ++time_.waiting_for_memory;
    memory_.wait(lock, fits);
    time_.advance();
    --time_.waiting_for_memory;
  }
  if (closing_) throw Error(ErrorKind::kInvalidArgument, "the reader was closed");
  uncharged_.erase(job.number_);
  if (time_.waiting_for_memory > 0) memory_.notify_all();  // the next in line
  outstanding_bytes_ += bytes;
  job.charged_bytes_ = bytes;
  return waits;
}

void Reader::want(const Job& job) {
  {
    std::lock_guard lock(mutex_);
    if (job.number_ < wanted_end_) return;
    wanted_end_ = job.number_ + 1;
  }
  memory_.notify_all();
}

// The job was delivered, failed or was forgotten: its memory is no longer ours to count.
void Reader::settle(Job& job) {
  if (foreign()) return;
  {
    std::lock_guard lock(mutex_);
    settle_locked(job);
  }
  memory_.notify_all();
}

void Reader::settle_locked(Job& job) {
  if (std::exchange(job.ready_bytes_counted_, false)) sums_.ready_bytes -= job.charged_bytes_;
  outstanding_bytes_ -= std::exchange(job.charged_bytes_, 0);
  undelivered_.erase(job.number_);
  uncharged_.erase(job.number_);
}

void Reader::delivered(Job& job) {
  {
    std::lock_guard lock(mutex_);
    sums_.delivered_samples += job.samples_;
    sums_.delivered_bytes += job.sample_bytes_;
    settle_locked(job);
  }
  memory_.notify_all();
}

// The batch is whole, and ready to be taken.
void Reader::performed(const Worker& worker, const Plan& plan, Job& job) {
  std::lock_guard lock(mutex_);
  time_.advance();
  const auto requests = static_cast<double>(plan.requests.size() + plan.remote.size());
  const double weight = requests_per_batch_ == 0 ? 1 : kNewBatchWeight;
  requests_per_batch_ += weight * (requests - requests_per_batch_);
  time_.wanted = static_cast<int>(workers_wanted_locked());
  sums_.gathered_bytes += plan.gathered_bytes;
  sums_.resident_bytes += plan.resident_bytes;
  job.sample_bytes_ = plan.sample_bytes;
  job.samples_ = plan.batch->samples;
  if (job.charged_bytes_ != 0) {
    sums_.ready_bytes += job.charged_bytes_;
    job.ready_bytes_counted_ = true;
  }
  if (engine_name_.empty() && !worker.engine_name().empty()) {
    engine_name_ = worker.engine_name();
    engine_reason_ = worker.engine_reason();
  }
  wake_locked();
}

void Reader::count_wait(std::chrono::nanoseconds waited) {
  consumer_wait_ns_.fetch_add(waited.count(), std::memory_order_relaxed);
}

void Reader::turn(std::optional<unsigned> reads_in_flight, std::optional<uint64_t> buffer_bytes) {
  refuse_foreign();
  if (reads_in_flight == 0u) {
    throw Error(ErrorKind::kInvalidArgument, "reads_in_flight is 0, expected at least 1");
  }
  if (buffer_bytes) arena_->retain_at_most(*buffer_bytes);
  {
    std::lock_guard lock(mutex_);
    time_.advance();
    if (buffer_bytes) budget_bytes_ = *buffer_bytes;
    if (reads_in_flight) in_flight_->turn(*reads_in_flight);
    time_.wanted = static_cast<int>(workers_wanted_locked());
    wake_locked();
  }
  memory_.notify_all();
  // Without the lock: the engine may have to wait for the interpreter's.
  if (reads_in_flight && remote_) remote_->turn(*reads_in_flight);
}

ReaderStats Reader::stats() const {
  if (foreign()) return {};
  ReaderStats stats;
  {
    std::lock_guard lock(mutex_);
    time_.advance();
    stats = sums_;
    stats.busy_s = time_.busy_s;
    stats.wait_input_s = time_.wait_input_s;
    stats.wait_output_s = time_.wait_output_s;
    stats.buffered_bytes = outstanding_bytes_;
    stats.workers = workers_wanted_locked();
    stats.buffer_bytes = budget_bytes_;
  }
  const EngineOptions& engine = options_.engine_options;
  const bool threads = options_.engine == EngineChoice::kThreads;
  stats.reads_in_flight =
      in_flight_->depth(options_.workers * (threads ? engine.threads : engine.queue_depth));
  stats.consumer_wait_s = 1e-9 * static_cast<double>(consumer_wait_ns_.load());
  stats.reads = in_flight_->stats();
  return stats;
}

unsigned Reader::batches_ahead() const {
  if (foreign()) return kBatchesAheadMin;
  std::lock_guard lock(mutex_);
  return std::max(kBatchesAheadMin, 2 * workers_wanted_locked());
}

std::string Reader::engine_name() const {
  if (foreign()) return {};
  std::lock_guard lock(mutex_);
  return engine_name_;
}

std::string Reader::engine_reason() const {
  if (foreign()) return {};
  std::lock_guard lock(mutex_);
  return engine_reason_;
}

}  // namespace headrace::io
