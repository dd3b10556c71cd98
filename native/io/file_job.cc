#include "io/file_job.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "core/error.h"
#include "io/file_reader.h"
#include "io/file_work.h"

namespace headrace::io {

FileBatch::~FileBatch() {
  if (reader_ == nullptr || reader_->foreign()) return;
  buffer.reset();  // the arena's before the budget's: a job that is let in finds the memory
  {
    std::lock_guard lock(reader_->mutex_);
    reader_->account_locked();
    reader_->outstanding_bytes_ -= charged_bytes_;
    reader_->figures_.stats.ready_bytes -= ready_bytes_;
  }
  if (charged_bytes_ != 0) reader_->work_.notify_one();
}

void FileBatch::note_ready_locked(size_t index) {
  const auto bytes = static_cast<uint64_t>(lengths[index]);
  ready_bytes_ += bytes;
  reader_->figures_.stats.ready_bytes += bytes;
}

void FileBatch::note_taken_locked(size_t index) {
  const auto bytes = static_cast<uint64_t>(lengths[index]);
  ready_bytes_ -= bytes;
  reader_->figures_.stats.ready_bytes -= bytes;
}

const std::byte* FileBytes::data() const {
  return batch->buffer == nullptr ? nullptr : batch->buffer->data + batch->offsets[index];
}

bool FileBytes::same_as(int fd) const {
  return compare(fd, batch->identities[index], kSyscalls) == 0;
}

FileJob::FileJob(std::shared_ptr<FileReader> reader, std::shared_ptr<FileWork> work)
    : reader_(std::move(reader)), work_(std::move(work)) {}

FileJob::~FileJob() {
  if (reader_->foreign()) return;
  std::vector<std::shared_ptr<FileWork>> finished;
  std::lock_guard lock(reader_->mutex_);
  reader_->cancel_locked(*work_);
  finished.swap(reader_->finished_);
  // `finished` is declared before the lock, and so goes after it.
}

size_t FileJob::files() const { return work_->paths.size(); }

bool FileJob::done() const {
  if (reader_->foreign()) return false;
  std::lock_guard lock(reader_->mutex_);
  return work_->left == 0;
}

std::shared_ptr<FileBatch> FileJob::wait(double seconds) {
  reader_->refuse_foreign();
  std::unique_lock lock(reader_->mutex_);
  ++work_->waiting;
  const bool done = work_->ready.wait_for(lock, bounded(seconds), [&] { return work_->left == 0; });
  --work_->waiting;
  return done ? work_->batch : nullptr;
}

std::optional<FileBytes> FileJob::take(size_t index, double seconds, int* error) {
  *error = ECANCELED;
  if (reader_->foreign()) return std::nullopt;
  if (index >= work_->paths.size()) {
    throw Error(ErrorKind::kInvalidArgument, "the job has no file " + std::to_string(index));
  }
  FileBatch& batch = *work_->batch;
  {
    std::unique_lock lock(reader_->mutex_);
    FileState& state = work_->states[index];
    if (state < FileState::kReading) {
      lock.unlock();
      forget(index);
      return std::nullopt;
    }
    if (state == FileState::kReading) {
      ++work_->waiting;
      const bool read =
          work_->ready.wait_for(lock, bounded(std::min(seconds, reader_->figures_.patience_s())),
                                [&] { return state != FileState::kReading; });
      --work_->waiting;
      if (!read) {
        ++reader_->figures_.stats.gave_up;
        *error = ETIMEDOUT;
        return std::nullopt;
      }
    }
    *error = batch.errors[index];
    if (*error != 0) return std::nullopt;
    if (state == FileState::kDone) {
      state = FileState::kTaken;
      batch.note_taken_locked(index);
    }
  }
  FileIdentity now;
  *error = identify(work_->paths[index].c_str(), reader_->calls_, &now);
  if (*error == 0 && now != batch.identities[index]) *error = ESTALE;
  if (*error != 0) return std::nullopt;
  return FileBytes{work_->batch, index};
}

void FileJob::forget(size_t index) {
  if (reader_->foreign() || index >= work_->paths.size()) return;
  std::vector<std::shared_ptr<FileWork>> finished;
  std::lock_guard lock(reader_->mutex_);
  FileState& state = work_->states[index];
  if (state < FileState::kReading) {
    work_->give_up(index);
    if (state == FileState::kDone) reader_->settle_locked(*work_);
  } else if (state == FileState::kDone && work_->batch->errors[index] == 0) {
    state = FileState::kTaken;
    work_->batch->note_taken_locked(index);
  }
  finished.swap(reader_->finished_);
}

}  // namespace headrace::io
