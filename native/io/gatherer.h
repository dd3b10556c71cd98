// Gatherer: puts batches together from held samples ahead of the consumer.
//
// `submit` hands over what a look-up found and returns at once; a few threads copy submitted
// batches in order into recycled buffers. A consumer that takes a batch which nobody has begun
// gathers it itself: it never waits for a thread to wake up.
//
// Memory: batches that are being gathered or wait to be taken stay below `budget_bytes`, but for
// one that somebody waits for. Threads are started when they are first needed and belong to the
// process that made the gatherer: a forked child must make its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>

#include "core/arena.h"
#include "io/batch.h"
#include "io/held.h"

namespace headrace::io {

class Gatherer;

// A batch that was submitted. Its memory is given up with it.
class GatherJob {
 public:
  ~GatherJob();
  // The batch, once. Throws what went wrong.
  std::shared_ptr<Batch> take();
  bool done() const;
  // Of the samples; known when the batch was taken.
  uint64_t bytes() const { return held_bytes_; }

 private:
  friend class Gatherer;
  enum class Stage { kQueued, kRunning, kDone, kTaken };
  std::shared_ptr<Gatherer> gatherer_;
  std::shared_ptr<Hits> hits_;
  uint64_t held_bytes_ = 0;  // of the samples; known when the batch is whole
  uint64_t bytes_ = 0;       // the same, as far as one can tell before
  // Guarded by the gatherer's lock.
  Stage stage_ = Stage::kQueued;
  bool charged_ = false;
  std::shared_ptr<Batch> batch_;
  std::exception_ptr error_;
};

class Gatherer : public std::enable_shared_from_this<Gatherer> {
 public:
  static std::shared_ptr<Gatherer> make(uint64_t budget_bytes, unsigned threads);

  // Nothing may be missing: Error(kInvalidArgument).
  std::shared_ptr<GatherJob> submit(std::shared_ptr<Hits> hits);
  // One batch of what is held and what was read for the rest, at once: see gather_hits.
  std::shared_ptr<Batch> gather(Hits& hits, const Batch* misses) const {
    read_entries(&hits);
    return gather_hits(*arena_, hits, misses);
  }
  // Ends the threads, soon; batches can be taken still.
  void close();
  void set_budget(uint64_t bytes);
  uint64_t mapped_bytes() const { return foreign() ? 0 : arena_->mapped_bytes(); }

 private:
  friend class GatherJob;
  Gatherer(uint64_t budget_bytes, unsigned threads);
  bool foreign() const;
  bool ready_locked() const;
  void start_thread_locked();
  void work();
  void run(GatherJob& job);

  const unsigned threads_max_;
  const int owner_pid_;
  const std::shared_ptr<Arena> arena_;
  std::mutex mutex_;
  std::condition_variable work_;  // a job may be begun, or closing
  std::condition_variable done_;
  std::deque<std::shared_ptr<GatherJob>> queue_;
  uint64_t queued_bytes_ = 0;  // of the jobs in queue_
  uint64_t budget_bytes_;
  uint64_t charged_bytes_ = 0;
  double sample_bytes_ = 0;  // of a sample, lately
  unsigned threads_ = 0;
  unsigned idle_ = 0;
  bool closing_ = false;
};

}  // namespace headrace::io
