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
// Threads start with the first submit and belong to the process that made the reader: after a fork
// the child must make its own; the parent's refuses the child.
#pragma once

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
#include "io/engine.h"

namespace headrace::io {

enum class EngineChoice { kAuto, kUring, kThreads, kMmap };
enum class DirectReads { kAuto, kAlways, kNever };

struct ReaderOptions {
  EngineChoice engine = EngineChoice::kAuto;
  DirectReads direct = DirectReads::kAuto;
  EngineOptions engine_options;
  unsigned workers = 2;
  uint64_t budget_bytes = 64 << 20;
  bool verify = true;
  // A gap up to this many bytes between two extents is read rather than skipped: on an NVMe device
  // a request costs about as much as 16 KiB of bandwidth.
  uint64_t coalesce_gap_bytes = 16 << 10;
  // Runs are cut into requests of at most this size.
  uint64_t request_bytes_max = 512 << 10;
};

class Reader;
struct Plan;

class Job : public std::enable_shared_from_this<Job> {
 public:
  // Waits up to `seconds`. Returns null when the time is over; throws what the worker met.
  std::shared_ptr<Batch> wait(double seconds);
  // What the job is waiting for, in words.
  std::string waiting_for() const;
  bool done() const;
  ~Job();

 private:
  friend class Reader;
  enum class Stage { kQueued, kPlanning, kMemory, kReading, kDone };
  std::shared_ptr<Reader> reader_;
  uint64_t number_ = UINT64_MAX;
  std::vector<int64_t> indices_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  Stage stage_ = Stage::kQueued;
  const Plan* plan_ = nullptr;  // while reading
  std::shared_ptr<Batch> batch_;
  uint64_t charged_bytes_ = 0;
  std::exception_ptr error_;
  bool delivered_ = false;
};

class Reader : public std::enable_shared_from_this<Reader> {
 public:
  // `parts`: numbers in Catalog::part_names() to read, in this order.
  static std::shared_ptr<Reader> make(std::shared_ptr<const Catalog> catalog, ReaderOptions options,
                                      std::vector<int> parts);

  // Throws Error(kSampleNotFound) for an index outside the store.
  std::shared_ptr<Job> submit(std::vector<int64_t> indices);
  // Copies samples [start, stop) of each of `pieces`, in order, into one new batch.
  struct Piece {
    std::shared_ptr<const Batch> batch;
    uint64_t start;
    uint64_t stop;
  };
  std::shared_ptr<Batch> gather(std::span<const Piece> pieces);
  // Forgets jobs that no worker has begun and waits until the threads have finished theirs, at most
  // `seconds`: a read that the device never answers must not hold up the program's end. Must be
  // called before the last reference goes; the threads keep the reader alive until then.
  // False: threads were left behind.
  bool close(double seconds);

  const ReaderOptions& options() const { return options_; }
  // The asynchronous engine in use and, where it is not io_uring, why.
  std::string engine_name() const;
  std::string engine_reason() const;
  uint64_t mapped_bytes() const { return foreign() ? 0 : arena_->mapped_bytes(); }

 private:
  friend class Job;
  // What each volume taught us. Written by workers without order: these are hints.
  struct VolumeHint {
    std::atomic<bool> doubtful{false};  // a gather met pages that were not resident
  };
  struct Worker;

  Reader(std::shared_ptr<const Catalog> catalog, ReaderOptions options, std::vector<int> parts);
  void start_locked();
  void work(Worker& worker);
  void run(Worker& worker, Job& job);
  void locate(Plan& plan, std::span<const int64_t> indices) const;
  void choose(Plan& plan);
  void choose_volume(Plan& plan, std::span<uint32_t> slots, uint32_t volume);
  uint64_t lay_out(Plan& plan) const;
  void lay_out_runs(Plan& plan, uint64_t* bytes) const;
  void ask(Plan& plan) const;
  void read(Worker& worker, Plan& plan);
  void check_tails(Plan& plan) const;
  void check_slot(Plan& plan, uint32_t slot, bool crc_known, uint32_t crc) const;
  void try_again(Plan& plan) const;
  void finish(Plan& plan) const;
  void charge(Job& job, uint64_t bytes);
  void want(const Job& job);
  void settle(Job& job);

  const std::shared_ptr<const Catalog> catalog_;
  const ReaderOptions options_;
  const std::vector<int> parts_;
  std::vector<std::vector<int>> slots_of_part_;  // per segment: part -> position in parts_ or -1
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<VolumeHint[]> hints_;
  const int owner_pid_;
  bool foreign() const;  // in a forked child, where no lock of ours may be taken
  void refuse_foreign() const;

  mutable std::mutex mutex_;
  std::condition_variable work_;    // a job was queued, or closing
  std::condition_variable memory_;  // memory was given back
  std::deque<std::shared_ptr<Job>> queue_;
  std::set<uint64_t> undelivered_;
  uint64_t wanted_end_ = 0;  // somebody waits or waited for a job below this number
  uint64_t outstanding_bytes_ = 0;
  uint64_t next_number_ = 0;
  bool closing_ = false;
  unsigned alive_ = 0;  // threads
  bool started_ = false;
  std::condition_variable ended_;
  std::string engine_name_;
  std::string engine_reason_;
};

}  // namespace headrace::io
