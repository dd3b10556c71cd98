// FileReader: reads whole files by path ahead of the program that will open them.
//
// `submit` hands over the paths of some files and returns at once. A pool of threads looks at each
// (stat), lays one recycled buffer out for all of them, and reads; a file can be taken as soon as
// it is read, whatever the others do. Nothing is trusted beyond the moment: `take` looks at the
// path again and gives the bytes only if it still names what was read (whole_file.h).
//
// Invariants:
//   - at most `reads_in_flight` files are looked at or read at a time, each with at most one
//     descriptor, and no more than `open_files_max` allows
//   - buffers of jobs that are not yet let go of, and those kept for reuse, stay within
//     `buffer_bytes`; jobs get theirs in the order of submission
//   - a file's bytes are written by one thread, before its state says so
//
// Threads start with the first submit and belong to the process that made the reader; a forked
// child is refused and must make its own.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "io/slow_files.h"
#include "io/whole_file.h"

namespace headrace::io {

struct FileReaderOptions {
  // Files in work at a time. 16 direct reads saturate the test machine's disk at 110 kB.
  unsigned reads_in_flight = 16;
  // Memory for files that are being read, or read and not let go of.
  uint64_t buffer_bytes = 64 << 20;
  ColdReads cold = ColdReads::kDirect;
  FileCalls calls = {};
  std::shared_ptr<const SlowFiles> slow = nullptr;  // files that take their time
};

inline constexpr unsigned kReadsInFlightMax = 1024;
inline constexpr uint64_t kFileBufferBytesMin = 64 << 10;
inline constexpr size_t kLatencyBuckets = 64;

struct FileReaderStats {
  // Seconds of all threads: looking and reading; without work; with work that waits for memory.
  double busy_s = 0, wait_input_s = 0, wait_output_s = 0;
  uint64_t reads = 0;     // files read, well or not
  uint64_t failures = 0;  // of them and of the looks, with an error
  uint64_t bytes = 0;     // read well
  uint64_t page_cache_bytes = 0, source_bytes = 0;
  uint64_t in_flight = 0;
  uint64_t buffered_bytes = 0;  // in buffers that are in use
  uint64_t ready_bytes = 0;     // read and not taken
  uint64_t mapped_bytes = 0;    // in use or kept for reuse
  uint64_t threads = 0;
  uint64_t gave_up = 0;  // takes that did not wait for a read to its end
  // Bucket i counts reads that took [2^(i/2), 2^((i+1)/2)) microseconds.
  std::array<uint64_t, kLatencyBuckets> latency_us{};
};

class FileReader;

// The files of one job, one element of each vector per path. Its memory counts against the budget
// until the last owner lets go.
struct FileBatch {
  BufferPtr buffer;  // null: nothing to read
  uint64_t bytes = 0;
  std::vector<int64_t> offsets, lengths;
  std::vector<int32_t> errors;  // errno; 0: the bytes are there
  std::vector<FileIdentity> identities;

  ~FileBatch();

 private:
  friend class FileReader;
  friend class FileJob;
  std::shared_ptr<FileReader> reader_;
  uint64_t charged_bytes_ = 0;
  uint64_t ready_bytes_ = 0;
};

// One file's bytes; keeps the batch.
struct FileBytes {
  std::shared_ptr<FileBatch> batch;
  size_t index;
  const std::byte* data() const;
  size_t size() const { return static_cast<size_t>(batch->lengths[index]); }
  // Whether the open file `fd` is the one that was read, unchanged.
  bool same_as(int fd) const;
};

struct FileWork;  // what the threads know of a job

class FileJob {
 public:
  ~FileJob();
  FileJob(const FileJob&) = delete;
  FileJob& operator=(const FileJob&) = delete;

  size_t files() const;
  bool done() const;
  // All files, when all are finished; null when `seconds` are over.
  std::shared_ptr<FileBatch> wait(double seconds);
  // The file if it is read and its path still names what was read. A read that has begun is waited
  // for, at most `seconds` and not for much longer than reads usually take. Otherwise none, and
  // `*error` says why: ECANCELED (not begun, and will not be), ETIMEDOUT, ESTALE, or the read's
  // own.
  std::optional<FileBytes> take(size_t index, double seconds, int* error);
  // Nobody will take this file: it is not read any more, if its read has not begun.
  void forget(size_t index);

 private:
  friend class FileReader;
  FileJob(std::shared_ptr<FileReader> reader, std::shared_ptr<FileWork> work);
  std::shared_ptr<FileReader> reader_;
  std::shared_ptr<FileWork> work_;
};

class FileReader : public std::enable_shared_from_this<FileReader> {
 public:
  static std::shared_ptr<FileReader> make(const FileReaderOptions& options);

  std::shared_ptr<FileJob> submit(std::vector<std::string> paths);
  // Takes effect at once: threads are started, or end after the file they are at; jobs that are
  // laid out already keep their memory.
  void turn(std::optional<unsigned> reads_in_flight, std::optional<uint64_t> buffer_bytes,
            std::optional<ColdReads> cold);
  // Ends the threads; files that are not read are ECANCELED. At most `seconds`: a read that never
  // returns is left behind with its thread, and false is returned.
  bool close(double seconds);

  FileReaderStats stats() const;
  unsigned reads_in_flight() const;
  uint64_t buffer_bytes() const;
  bool foreign() const;  // in a forked child, where no lock of ours may be taken

 private:
  friend class FileJob;
  friend struct FileBatch;
  using Clock = std::chrono::steady_clock;
  struct Task;

  explicit FileReader(const FileReaderOptions& options);
  void refuse_foreign() const;
  void run();
  void grow_locked(size_t tasks);
  bool claim_locked(Task& task);
  bool claim_of_locked(const std::shared_ptr<FileWork>& work, Task& task);
  bool lay_out_locked(FileWork& work);
  void perform(Task& task);
  void finish_locked(Task& task);
  void settle_locked(FileWork& work);
  void cancel_locked(FileWork& work);
  void note_latency_locked(double seconds);
  void account_locked();
  double patience_locked() const;

  const int owner_pid_;
  const FileCalls calls_;
  const std::shared_ptr<const SlowFiles> slow_;
  std::atomic<uint64_t> direct_refused_{UINT64_MAX};

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable ended_;
  std::deque<std::shared_ptr<FileWork>> queue_;      // with files that nobody finished
  std::vector<std::shared_ptr<FileWork>> finished_;  // to be let go of without the lock
  std::shared_ptr<Arena> arena_;
  unsigned reads_in_flight_;
  uint64_t buffer_bytes_;
  ColdReads cold_;
  uint64_t outstanding_bytes_ = 0;
  unsigned alive_ = 0;
  unsigned threads_max_ = 1;
  unsigned idle_ = 0;
  bool closing_ = false;
  double latency_s_ = 0;  // a moving mean
  bool started_ = false;
  bool blocked_ = false;  // a job waits for memory
  Clock::time_point accounted_;
  FileReaderStats stats_;
};

}  // namespace headrace::io
