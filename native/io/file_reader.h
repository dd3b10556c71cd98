// FileReader: reads whole files by path ahead of the program that will open them.
//
// `submit` hands over the paths of some files and returns at once. A pool of threads looks at each
// (stat) unless it is known what it is, lays one recycled buffer out for all of them, and reads; a
// file can be taken as soon as it is read, whatever the others do. Nothing is trusted beyond the
// moment: `take` looks at the path again and gives the bytes only if it still names what was read
// (whole_file.h).
//
// Invariants:
//   - at most `reads_in_flight` files are looked at or read at a time, each with at most one
//     descriptor, and no more than `open_files_max` allows
//   - buffers of jobs that are not yet let go of, and those kept for reuse, stay within
//     `buffer_bytes`; jobs get theirs in the order of submission, but one file of which a
//     look takes long holds up no others, as long as what they take leaves it room enough
//   - a file's bytes are written by one thread, before its state says so
//
// Threads start with the first submit and belong to the process that made the reader; a forked
// child is refused and must make its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/arena.h"
#include "io/file_figures.h"
#include "io/file_job.h"
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
class FileReader : public std::enable_shared_from_this<FileReader> {
 public:
  static std::shared_ptr<FileReader> make(const FileReaderOptions& options);

  // `known`: what each file is, by somebody who has looked: it is not looked at again before it is
  // read, and is ESTALE if it is another by then. Empty: nobody has. Throws
  // Error(kInvalidArgument) if it is not one for each path.
  std::shared_ptr<FileJob> submit(std::vector<std::string> paths,
                                  std::vector<FileIdentity> known = {});
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
  using Clock = FileFigures::Clock;
  struct Task;

  explicit FileReader(const FileReaderOptions& options);
  void refuse_foreign() const;
  void run();
  void grow_locked(size_t tasks);
  bool claim_locked(Task& task);
  bool lay_out_locked(FileWork& work, bool overtakes);
  void perform(Task& task);
  void finish_locked(Task& task);
  void settle_locked(FileWork& work);
  void cancel_locked(FileWork& work);
  void account_locked();

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
  bool blocked_ = false;  // a job waits for memory
  FileFigures figures_;
};

}  // namespace headrace::io
