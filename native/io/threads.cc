// The threads engine: blocking preadv on a pool of threads. Works wherever Linux does.
//
// The caller of `read` is one of the threads; the others are started by the first batch that can
// use them and sleep between batches. All take the next read from one counter, so a slow read
// holds up nobody but its thread. `on_done` runs on the thread that performed the read.
//
// Invariants:
//   - at most so many reads are in progress as there are threads and places in flight, each with at
//     most one file open
//   - a thread touches a batch only between joining and leaving it, both under the mutex
#include "io/threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "io/attempt.h"
#include "io/blocking.h"

namespace headrace::io {
namespace {

constexpr unsigned kThreadsMax = 1024;

struct Batch {
  std::span<Read> reads;
  const OnDone& on_done;
  unsigned files_max;
  InFlight& in_flight;
  std::atomic<size_t> next = 0;
};

// Signals are for the program's own threads: a handler that runs here would surprise it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

class Pool {
 public:
  explicit Pool(const Syscalls& sys) : sys_(sys) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Starts threads until there are `count`, or the system allows no more: fewer do the same work.
  void grow(unsigned count);
  // Performs the batch with the help of up to `helpers` pool threads; returns when all is done.
  void perform(Batch& batch, unsigned helpers);

 private:
  void run();
  void work(Batch& batch);

  const Syscalls sys_;
  OpenFiles files_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable left_;
  Batch* batch_ = nullptr;  // what threads may join; null: nothing to do
  unsigned places_ = 0;     // how many more may join
  unsigned inside_ = 0;     // how many have joined and not left
  bool stop_ = false;
};

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::grow(unsigned count) {
  if (threads_.size() >= count) return;
  const SignalsBlocked blocked;
  try {
    while (threads_.size() < count) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error&) {  // RLIMIT_NPROC or a cgroup's pids.max
  }
}

void Pool::perform(Batch& batch, unsigned helpers) {
  helpers = std::min<unsigned>(helpers, threads_.size());
  if (helpers > 0) {
    {
      std::lock_guard lock(mutex_);
      batch_ = &batch;
      places_ = helpers;
    }
    if (helpers == threads_.size()) {
      wake_.notify_all();
    } else {
      for (unsigned i = 0; i < helpers; ++i) wake_.notify_one();
    }
  }
  work(batch);
  std::unique_lock lock(mutex_);
  batch_ = nullptr;  // a thread that wakes only now finds nothing to join
  places_ = 0;
  left_.wait(lock, [&] { return inside_ == 0; });
}

void Pool::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || places_ > 0; });
    if (stop_) return;
    Batch& batch = *batch_;
    --places_;
    ++inside_;
    lock.unlock();
    work(batch);
    lock.lock();
    if (--inside_ == 0) left_.notify_one();
  }
}

void Pool::work(Batch& batch) {
  for (;;) {
    const size_t index = batch.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= batch.reads.size()) return;
    Read& read = batch.reads[index];
    batch.in_flight.acquire(1);
    read.others = batch.in_flight.taken() - 1;
    const auto started = InFlight::Clock::now();
    read_blocking(read, sys_, files_, batch.files_max);
    read.took_ns = (InFlight::Clock::now() - started) / std::chrono::nanoseconds(1);
    const int64_t took[] = {read.took_ns};
    batch.in_flight.finished(took, read.done);
    batch.on_done(read);
  }
}

class ThreadsEngine final : public Engine {
 public:
  ThreadsEngine(const EngineOptions& options, const Syscalls& sys)
      : threads_(std::max(options.threads, 1u)),
        in_flight_(options.in_flight ? options.in_flight : std::make_shared<InFlight>()),
        sys_(sys) {}

  ~ThreadsEngine() override { leave_behind_parent(); }

  const char* name() const override { return "threads"; }

  void read(std::span<Read> reads, const OnDone& on_done) override {
    if (reads.empty()) return;
    leave_behind_parent();
    if (!pool_) pool_ = std::make_unique<Pool>(sys_);
    const unsigned threads = std::clamp(in_flight_->depth(threads_), 1u, kThreadsMax);
    const unsigned helpers = std::min<size_t>(threads, reads.size()) - 1;
    pool_->grow(helpers);
    Batch batch{reads, on_done, open_files_max(threads), *in_flight_};
    pool_->perform(batch, helpers);
  }

 private:
  // A forked child has the pool's memory and none of its threads. Joining would wait for ever,
  // and its mutexes may be held by nobody: leak it.
  void leave_behind_parent() {
    if (pid_ == ::getpid()) return;
    static_cast<void>(pool_.release());
    pid_ = ::getpid();
  }

  const unsigned threads_;
  const std::shared_ptr<InFlight> in_flight_;
  const Syscalls sys_;
  pid_t pid_ = ::getpid();
  std::unique_ptr<Pool> pool_;
};

}  // namespace

std::unique_ptr<Engine> make_threads_engine(const EngineOptions& options, const Syscalls& sys) {
  return std::make_unique<ThreadsEngine>(options, sys);
}

std::unique_ptr<Engine> make_threads_engine(const EngineOptions& options) {
  return make_threads_engine(options, kSyscalls);
}

}  // namespace headrace::io
