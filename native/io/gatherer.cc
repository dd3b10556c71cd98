#include "io/gatherer.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "io/thread_signals.h"

namespace headrace::io {
namespace {

// Beside what is ready, the consumer has a batch, and may gather one itself: between two passes all
// of them are free, and should be there for the next.
uint64_t retained_bytes(uint64_t budget_bytes) { return 2 * budget_bytes; }

// How much a new batch counts in the mean size of a sample.
constexpr double kNewBatchWeight = 0.25;

// A thread is woken for no less: the consumer gathers so much itself in less time than two threads
// take to hand it over.
constexpr uint64_t kWakeBytes = uint64_t{2} << 20;

}  // namespace

GatherJob::~GatherJob() {
  if (!charged_ || gatherer_->foreign()) return;
  {
    std::lock_guard lock(gatherer_->mutex_);
    gatherer_->charged_bytes_ -= bytes_;
  }
  gatherer_->work_.notify_one();
}

bool GatherJob::done() const {
  if (gatherer_->foreign()) return true;
  std::lock_guard lock(gatherer_->mutex_);
  return stage_ == Stage::kDone;
}

std::shared_ptr<Batch> GatherJob::take() {
  Gatherer& gatherer = *gatherer_;
  if (gatherer.foreign()) {
    throw Error(ErrorKind::kInvalidArgument,
                "this batch was asked for before the process was forked; ask again in the child");
  }
  std::unique_lock lock(gatherer.mutex_);
  if (stage_ == Stage::kQueued) {
    stage_ = Stage::kRunning;
    // Mostly the first, since batches are taken in order; after `close` it is not there.
    const auto found =
        std::find_if(gatherer.queue_.begin(), gatherer.queue_.end(),
                     [this](const std::shared_ptr<GatherJob>& job) { return job.get() == this; });
    if (found != gatherer.queue_.end()) {
      gatherer.queue_.erase(found);
      gatherer.queued_bytes_ -= bytes_;
    }
    lock.unlock();
    gatherer.run(*this);
    lock.lock();
  }
  gatherer.done_.wait(lock, [this] { return stage_ != Stage::kRunning; });
  if (stage_ == Stage::kTaken) {
    throw Error(ErrorKind::kInvalidArgument, "the batch was taken already");
  }
  stage_ = Stage::kTaken;
  const bool freed = std::exchange(charged_, false);
  if (freed) gatherer.charged_bytes_ -= bytes_;
  auto batch = std::move(batch_);
  const auto error = error_;
  const bool wake = freed && gatherer.ready_locked();
  lock.unlock();
  if (wake) gatherer.work_.notify_one();
  if (error) std::rethrow_exception(error);
  return batch;
}

std::shared_ptr<Gatherer> Gatherer::make(uint64_t budget_bytes, unsigned threads) {
  return std::shared_ptr<Gatherer>(new Gatherer(budget_bytes, threads));
}

Gatherer::Gatherer(uint64_t budget_bytes, unsigned threads)
    : threads_max_(std::max(1u, threads)),
      owner_pid_(getpid()),
      arena_(Arena::make(retained_bytes(budget_bytes))),
      budget_bytes_(budget_bytes) {}

bool Gatherer::foreign() const { return getpid() != owner_pid_; }

// Whether a thread may begin the first job.
bool Gatherer::ready_locked() const {
  if (queue_.empty()) return false;
  return charged_bytes_ == 0 || charged_bytes_ + queue_.front()->bytes_ <= budget_bytes_;
}

std::shared_ptr<GatherJob> Gatherer::submit(std::shared_ptr<Hits> hits) {
  if (foreign() || !hits->missing.empty()) {
    throw Error(ErrorKind::kInvalidArgument,
                "only what is held can be gathered, in the process "
                "that made the gatherer");
  }
  auto job = std::make_shared<GatherJob>();
  job->gatherer_ = shared_from_this();
  job->hits_ = std::move(hits);
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    job->bytes_ =
        static_cast<uint64_t>(sample_bytes_ * static_cast<double>(job->hits_->held.size()));
    if (!closing_) {
      queue_.push_back(job);
      queued_bytes_ += job->bytes_;
    }
    if (queued_bytes_ >= kWakeBytes && ready_locked()) {
      wake = idle_ > 0;
      if (!wake && threads_ < threads_max_) start_thread_locked();
    }
  }
  if (wake) work_.notify_one();
  return job;
}

// Without a thread consumers gather for themselves.
void Gatherer::start_thread_locked() {
  try {
    std::thread thread([self = shared_from_this()] { self->work(); });
    pthread_setname_np(thread.native_handle(), "headrace-gather");
    thread.detach();
    ++threads_;
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
}

void Gatherer::work() {
  block_signals();
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    work_.wait(lock, [this] { return closing_ || ready_locked(); });
    --idle_;
    if (closing_) break;
    auto job = std::move(queue_.front());
    queue_.pop_front();
    queued_bytes_ -= job->bytes_;
    if (job.use_count() > 1) {  // somebody may still take it
      job->stage_ = GatherJob::Stage::kRunning;
      job->charged_ = true;
      charged_bytes_ += job->bytes_;
      lock.unlock();
      run(*job);
    } else {
      lock.unlock();
    }
    job.reset();  // may be the last one: without the lock
    lock.lock();
  }
  --threads_;
}

void Gatherer::run(GatherJob& job) {
  std::shared_ptr<Batch> batch;
  std::exception_ptr error;
  try {
    batch = gather(*job.hits_, nullptr);
  } catch (...) {
    error = std::current_exception();
  }
  std::shared_ptr<Hits> hits;  // lets go of slabs without the lock
  {
    std::lock_guard lock(mutex_);
    job.batch_ = std::move(batch);
    job.error_ = error;
    hits = std::move(job.hits_);
    job.held_bytes_ = hits->bytes;
    if (!hits->held.empty()) {
      const double found =
          static_cast<double>(hits->bytes) / static_cast<double>(hits->held.size());
      sample_bytes_ += (found - sample_bytes_) * (sample_bytes_ == 0 ? 1 : kNewBatchWeight);
    }
    job.stage_ = GatherJob::Stage::kDone;
  }
  done_.notify_all();
}

void Gatherer::close() {
  if (foreign()) return;
  std::deque<std::shared_ptr<GatherJob>> queued;  // let go of without the lock
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    queued.swap(queue_);
    queued_bytes_ = 0;
  }
  work_.notify_all();
}

void Gatherer::set_budget(uint64_t bytes) {
  if (foreign()) return;
  arena_->retain_at_most(retained_bytes(bytes));
  {
    std::lock_guard lock(mutex_);
    budget_bytes_ = bytes;
  }
  work_.notify_all();
}

}  // namespace headrace::io
