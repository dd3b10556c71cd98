// FileJob: what users of a FileReader hold: a job, its files' bytes, and the memory they lie in.
//
// A job's memory counts against the reader's budget until its last owner lets go, be it the job,
// the batch or a single file's bytes. In a forked child all of it is left alone.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "io/whole_file.h"

namespace headrace::io {

class FileReader;
struct FileWork;

// For waits: never negative, and no more than a clock can take.
inline std::chrono::duration<double> bounded(double seconds) {
  return std::chrono::duration<double>(seconds > 0 ? std::min(seconds, 1e9) : 0.0);
}

// The files of one job, one element of each vector per path.
struct FileBatch {
  BufferPtr buffer;  // null: nothing to read
  uint64_t bytes = 0;
  std::vector<int64_t> offsets, lengths;
  std::vector<int32_t> errors;  // errno; 0: the bytes are there
  std::vector<FileIdentity> identities;
  // When the last file was there, of the steady clock; on a simulated storage: when it was due. Who
  // waits for it is woken later. 0 when nothing was read.
  int64_t ready_ns = 0;

  ~FileBatch();

 private:
  friend class FileReader;
  friend class FileJob;
  // A file's bytes are there, or nobody wants them any more: `ready_bytes` of the reader follow.
  void note_ready_locked(size_t index);
  void note_taken_locked(size_t index);

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

}  // namespace headrace::io
