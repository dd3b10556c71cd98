#include "io/reader.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "core/error.h"
#include "core/mapping.h"
#include "io/plan.h"
#include "io/worker.h"

namespace headrace::io {
namespace {

// A worker answers no signal but the ones that its own instructions raise.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  for (const int synchronous : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) {
    sigdelset(&all, synchronous);
  }
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

std::shared_ptr<Reader> Reader::make(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
                                     std::vector<int> parts) {
  return std::shared_ptr<Reader>(new Reader(std::move(catalog), options, std::move(parts)));
}

Reader::Reader(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
               std::vector<int> parts)
    : catalog_(std::move(catalog)),
      options_(options),
      planner_(catalog_, options_, std::move(parts)),
      arena_(Arena::make(options.budget_bytes)),
      owner_pid_(getpid()) {}

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
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    dropped.swap(queue_);
  }
  work_.notify_all();
  memory_.notify_all();
  for (const auto& job : dropped) {
    std::lock_guard lock(job->mutex_);
    job->error_ = std::make_exception_ptr(
        Error(ErrorKind::kInvalidArgument, "the reader was closed before this batch was read"));
    job->stage_ = Job::Stage::kDone;
    job->ready_.notify_all();
  }
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return alive_ == 0; });
}

void Reader::start_locked() {
  if (started_) return;
  const auto body = [](const std::shared_ptr<Reader>& self) {
    block_signals();
    {
      Worker worker(*self->catalog_, self->planner_, self->options_, self->arena_);
      self->work(worker);
    }
    std::lock_guard lock(self->mutex_);
    --self->alive_;
    self->ended_.notify_all();
  };
  for (unsigned i = 0; i < std::max(1u, options_.workers); ++i) {
    std::thread thread;
    try {
      thread = std::thread(body, shared_from_this());
    } catch (const std::system_error& error) {
      if (alive_ != 0) break;  // fewer threads serve as well
      throw Error(ErrorKind::kVolume,
                  std::string("cannot start a thread that reads: ") + error.what() +
                      ". Raise the limit of processes (ulimit -u).",
                  {}, -1, error.code().value());
    }
    ++alive_;
    pthread_setname_np(thread.native_handle(), "headrace-read");
    thread.detach();
  }
  started_ = true;
}

std::shared_ptr<Job> Reader::submit(std::vector<int64_t> indices) {
  refuse_foreign();
  for (const int64_t index : indices) catalog_->check_index(index);
  auto job = std::make_shared<Job>();
  job->reader_ = shared_from_this();
  job->indices_ = std::move(indices);
  {
    std::lock_guard lock(mutex_);
    if (closing_) throw Error(ErrorKind::kInvalidArgument, "the reader is closed");
    start_locked();
    job->number_ = next_number_++;
    undelivered_.insert(job->number_);
    queue_.push_back(job);
  }
  work_.notify_one();
  return job;
}

void Reader::work(Worker& worker) {
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error;
    try {
      run(worker, *job);
    } catch (...) {
      error = std::current_exception();
    }
    if (error) settle(*job);
    {
      std::lock_guard lock(job->mutex_);
      job->error_ = error;
      job->stage_ = Job::Stage::kDone;
    }
    job->ready_.notify_all();
  }
}

void Reader::run(Worker& worker, Job& job) {
  const auto enter = [&](Job::Stage stage, const Plan* plan) {
    std::lock_guard lock(job.mutex_);
    job.stage_ = stage;
    job.plan_ = plan;
  };
  enter(Job::Stage::kPlanning, nullptr);
  guard_mappings();
  worker.forget_unmapped();
  Plan plan;
  plan.batch = std::make_shared<Batch>();
  plan.batch->indices = std::move(job.indices_);
  const uint64_t bytes = planner_.plan(plan);
  enter(Job::Stage::kMemory, nullptr);
  charge(job, bytes);
  plan.batch->bytes = bytes;
  plan.batch->buffer = arena_->acquire(bytes);
  plan.data = plan.batch->buffer->data;
  planner_.ask(plan);
  for (const Segment& segment : catalog_->segments()) segment.directory->assert_whole();
  enter(Job::Stage::kReading, &plan);
  const auto leave = [&](void*) { enter(Job::Stage::kPlanning, nullptr); };
  const std::unique_ptr<void, decltype(leave)> guard(&plan, leave);  // before `plan` goes
  worker.perform(plan);
  note_engine(worker);
  std::lock_guard lock(job.mutex_);
  job.batch_ = std::move(plan.batch);
}

// Waits until the batch's memory fits. The oldest undelivered batch never waits: it is the one that
// the consumer takes next. Nor do a batch that somebody waits for and those before it, which stand
// in its way.
void Reader::charge(Job& job, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  memory_.wait(lock, [&] {
    return closing_ || outstanding_bytes_ + bytes <= options_.budget_bytes ||
           *undelivered_.begin() == job.number_ || job.number_ < wanted_end_;
  });
  if (closing_) throw Error(ErrorKind::kInvalidArgument, "the reader was closed");
  outstanding_bytes_ += bytes;
  job.charged_bytes_ = bytes;
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
    outstanding_bytes_ -= std::exchange(job.charged_bytes_, 0);
    undelivered_.erase(job.number_);
  }
  memory_.notify_all();
}

void Reader::note_engine(const Worker& worker) {
  std::lock_guard lock(mutex_);
  if (!engine_name_.empty() || worker.engine_name().empty()) return;
  engine_name_ = worker.engine_name();
  engine_reason_ = worker.engine_reason();
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
