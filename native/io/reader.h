// Reader: reads batches of samples ahead of the consumer.
//
// `submit` hands over the indices of a batch and returns at once; a few worker threads plan, read
// and check submitted batches in order; `Job::wait` delivers one. For each volume of a batch a
// worker decides by residency whether to gather from the page cache (mmap engine) or to read with
// O_DIRECT (io_uring, or a pool of threads): DESIGN.md, "Reading".
//
// Memory: buffers of batches that are being read or wait to be delivered stay below
// `budget_bytes`, except that the oldest undelivered batch is always let through, however large it
// is, and so are a batch that somebody waits for and those before it.
//
// Workers: as many as it takes to have `reads_in_flight` reads in flight with batches of the size
// seen lately, at most kWorkersMax (or what the options ask for). Threads are started when they are
// first needed, sleep when they are not, and belong to the process that made the reader: after a
// fork the child must make its own; the parent's refuses the child.
//
// Knobs may be turned at any time. A smaller one takes effect as reads and batches finish.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/arena.h"
#include "io/batch.h"
#include "io/catalog.h"
#include "io/job.h"
#include "io/pieces.h"
#include "io/planner.h"
#include "io/reader_options.h"
#include "io/worker_time.h"

namespace headrace::io {

class Worker;

// Each costs a ring and a stack. Beyond so many, larger batches are the way to more reads in
// flight.
inline constexpr unsigned kWorkersMax = 64;

// What a reader did since it was made, and what it holds now.
struct ReaderStats {
  // Seconds, summed over workers: with a batch; without one because none is submitted; with one
  // that waits for memory within the budget.
  double busy_s = 0;
  double wait_input_s = 0;
  double wait_output_s = 0;
  double consumer_wait_s = 0;  // that `Job::wait` waited
  InFlightStats reads;         // of requests to the device; gathers from the page cache are not
  uint64_t gathered_bytes = 0;
  uint64_t resident_bytes = 0;  // of requests: what lay in the page cache all the same
  uint64_t delivered_samples = 0;
  uint64_t delivered_bytes = 0;
  uint64_t buffered_bytes = 0;   // now: of batches that are read, or are ready and not taken
  uint64_t ready_bytes = 0;      // now: of the latter
  unsigned workers = 0;          // now: that may work
  unsigned reads_in_flight = 0;  // the knobs
  uint64_t buffer_bytes = 0;
};

class Reader : public std::enable_shared_from_this<Reader> {
 public:
  // `parts`: numbers in Catalog::part_names() to read, in this order.
  static std::shared_ptr<Reader> make(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
                                      std::vector<int> parts);
  ~Reader();

  // `ranges`: one per index, within the only part that is read; empty for whole samples. Throws
  // Error(kSampleNotFound) for an index outside the store, Error(kInvalidArgument) for other
  // numbers of ranges or parts. A range that leaves its sample is the batch's error.
  std::shared_ptr<Job> submit(std::vector<int64_t> indices, std::vector<Range> ranges = {});
  // Copies the pieces into one new batch, see pieces.h.
  std::shared_ptr<Batch> gather(std::span<const Piece> pieces) {
    return gather_pieces(*arena_, planner_.parts().size(), pieces);
  }
  // Forgets jobs that no worker has begun and waits until the threads have finished theirs, at most
  // `seconds`: a read that the device never answers must not hold up the program's end. Must be
  // called before the last reference goes; the threads keep the reader alive until then.
  // False: threads were left behind.
  bool close(double seconds);

  // Sets the knobs that are given: reads in flight of all workers together, and bytes of batches
  // that are read or ready. Throws Error(kInvalidArgument) for zero reads.
  void turn(std::optional<unsigned> reads_in_flight, std::optional<uint64_t> buffer_bytes);
  ReaderStats stats() const;
  // How many batches should be submitted ahead so that no worker runs dry.
  unsigned batches_ahead() const;

  const ReaderOptions& options() const { return options_; }
  // The asynchronous engine in use and, where it is not io_uring, why.
  std::string engine_name() const;
  std::string engine_reason() const;
  uint64_t mapped_bytes() const { return foreign() ? 0 : arena_->mapped_bytes(); }

 private:
  friend class Job;
  Reader(std::shared_ptr<const Catalog> catalog, ReaderOptions options, std::vector<int> parts);
  unsigned workers_wanted_locked() const;
  void wake_locked();
  bool start_worker_locked(int* error);
  std::shared_ptr<Job> next_job();
  void work();
  void run(Worker& worker, Job& job);
  bool charge(Job& job, uint64_t bytes);
  void want(const Job& job);
  void settle(Job& job);
  void settle_locked(Job& job);
  void delivered(Job& job);
  void count_wait(std::chrono::nanoseconds waited);
  void performed(const Worker& worker, const Plan& plan, Job& job);
  void ring() const;

  const std::shared_ptr<const Catalog> catalog_;
  const std::shared_ptr<InFlight> in_flight_;
  const std::shared_ptr<RemoteEngine> remote_;
  const ReaderOptions options_;
  const Planner planner_;
  const int done_fd_;
  std::shared_ptr<Arena> arena_;
  const int owner_pid_;
  bool foreign() const;  // in a forked child, where no lock of ours may be taken
  void refuse_foreign() const;

  mutable std::mutex mutex_;
  std::condition_variable work_;    // a job was queued, or closing
  std::condition_variable memory_;  // memory was given back
  std::deque<std::shared_ptr<Job>> queue_;
  std::set<uint64_t> undelivered_;
  std::set<uint64_t> uncharged_;  // submitted, and without memory yet
  uint64_t wanted_end_ = 0;       // somebody waits or waited for a job below this number
  uint64_t budget_bytes_;
  uint64_t outstanding_bytes_ = 0;
  uint64_t next_number_ = 0;
  bool closing_ = false;
  unsigned alive_ = 0;             // threads
  unsigned idle_ = 0;              // of them without a batch
  double requests_per_batch_ = 0;  // lately
  mutable WorkerTime time_;
  ReaderStats sums_;
  std::atomic<int64_t> consumer_wait_ns_{0};
  std::condition_variable ended_;
  std::string engine_name_;
  std::string engine_reason_;
};

}  // namespace headrace::io
