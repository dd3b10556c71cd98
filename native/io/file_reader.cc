#include "io/file_reader.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "io/attempt.h"

namespace headrace::io {
namespace {

// Jobs that wait for memory are looked at this far ahead: their names are warm when it comes.
constexpr size_t kJobsLookedAt = 4;
// A take waits for a read that has begun as long as so many reads take, and at least so long.
constexpr double kPatienceReads = 8;
constexpr double kPatienceSecondsMin = 0.05;
// The mean latency moves by this share of each new one.
constexpr double kLatencyWeight = 1.0 / 32;

// Kept for reuse, of all that `buffer_bytes` allows; the rest is for buffers in use.
uint64_t retained_share(uint64_t buffer_bytes) { return buffer_bytes / 4; }

// Signals are for the program's own threads: a handler that runs here would surprise it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int synchronous : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP}) {
      sigdelset(&all, synchronous);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

size_t bucket_of(double microseconds) {
  if (microseconds < 1) return 0;
  const auto bucket = static_cast<size_t>(2 * std::log2(microseconds));
  return std::min(bucket, kLatencyBuckets - 1);
}

std::chrono::duration<double> bounded(double seconds) {
  return std::chrono::duration<double>(seconds > 0 ? std::min(seconds, 1e9) : 0.0);
}

}  // namespace

enum class FileState : uint8_t { kNew, kLooking, kLooked, kReading, kDone, kTaken };

struct FileWork {
  std::vector<std::string> paths;
  std::vector<FileState> states;
  std::shared_ptr<FileBatch> batch;
  size_t next_look = 0;
  size_t looks_left = 0;  // files that are new or being looked at
  size_t next_read = 0;
  size_t left = 0;  // files that are not done
  bool laid_out = false;
  unsigned waiting = 0;
  std::condition_variable ready;
};

// One file to look at or to read, and how it went.
struct FileReader::Task {
  std::shared_ptr<FileWork> work;
  size_t index = 0;
  bool look = false;
  ColdReads cold = ColdReads::kDirect;
  FileIdentity identity;
  WholeFile result;
  Clock::time_point begun;
};

// ---- what users hold
// -----------------------------------------------------------------------------

FileBatch::~FileBatch() {
  if (reader_ == nullptr || reader_->foreign()) return;
  buffer.reset();  // the arena's before the budget's: a job that is let in finds the memory
  {
    std::lock_guard lock(reader_->mutex_);
    reader_->account_locked();
    reader_->outstanding_bytes_ -= charged_bytes_;
    reader_->stats_.ready_bytes -= ready_bytes_;
  }
  if (charged_bytes_ != 0) reader_->work_.notify_one();
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
          work_->ready.wait_for(lock, bounded(std::min(seconds, reader_->patience_locked())),
                                [&] { return state != FileState::kReading; });
      --work_->waiting;
      if (!read) {
        ++reader_->stats_.gave_up;
        *error = ETIMEDOUT;
        return std::nullopt;
      }
    }
    *error = batch.errors[index];
    if (*error != 0) return std::nullopt;
    if (state == FileState::kDone) {
      state = FileState::kTaken;
      const auto bytes = static_cast<uint64_t>(batch.lengths[index]);
      batch.ready_bytes_ -= bytes;
      reader_->stats_.ready_bytes -= bytes;
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
  if (state == FileState::kNew || state == FileState::kLooked) {
    if (state == FileState::kNew) --work_->looks_left;
    state = FileState::kDone;
    work_->batch->errors[index] = ECANCELED;
    --work_->left;
    reader_->settle_locked(*work_);
  } else if (state == FileState::kLooking) {
    work_->batch->errors[index] = ECANCELED;  // `finish_locked` sees it
  } else if (state == FileState::kDone && work_->batch->errors[index] == 0) {
    state = FileState::kTaken;
    const auto bytes = static_cast<uint64_t>(work_->batch->lengths[index]);
    work_->batch->ready_bytes_ -= bytes;
    reader_->stats_.ready_bytes -= bytes;
  }
  finished.swap(reader_->finished_);
}

// ---- the reader
// ----------------------------------------------------------------------------------

std::shared_ptr<FileReader> FileReader::make(const FileReaderOptions& options) {
  return std::shared_ptr<FileReader>(new FileReader(options));
}

FileReader::FileReader(const FileReaderOptions& options)
    : owner_pid_(getpid()),
      calls_(options.calls),
      slow_(options.slow),
      reads_in_flight_(std::clamp(options.reads_in_flight, 1u, kReadsInFlightMax)),
      buffer_bytes_(std::max(options.buffer_bytes, kFileBufferBytesMin)),
      cold_(options.cold) {
  arena_ = Arena::make(retained_share(buffer_bytes_));
}

bool FileReader::foreign() const { return getpid() != owner_pid_; }

void FileReader::refuse_foreign() const {
  if (!foreign()) return;
  throw Error(ErrorKind::kInvalidArgument,
              "this file reader belongs to the process that made it, and its threads do not exist "
              "in a forked child. Make another after the fork.");
}

std::shared_ptr<FileJob> FileReader::submit(std::vector<std::string> paths) {
  refuse_foreign();
  const size_t count = paths.size();
  auto work = std::make_shared<FileWork>();
  work->states.assign(count, FileState::kNew);
  work->looks_left = work->left = count;
  work->batch = std::make_shared<FileBatch>();
  work->batch->reader_ = shared_from_this();
  work->batch->offsets.assign(count, 0);
  work->batch->lengths.assign(count, 0);
  work->batch->errors.assign(count, EINPROGRESS);
  work->batch->identities.resize(count);
  work->paths = std::move(paths);
  std::shared_ptr<FileJob> job(new FileJob(shared_from_this(), work));

  std::vector<std::shared_ptr<FileWork>> finished;
  std::lock_guard lock(mutex_);
  account_locked();
  if (!started_) accounted_ = Clock::now();
  started_ = true;
  for (size_t i = 0; i < count; ++i) {
    if (work->paths[i].find('\0') == std::string::npos) continue;
    work->states[i] = FileState::kDone;  // no path has a NUL in it
    work->batch->errors[i] = EINVAL;
    --work->looks_left;
    --work->left;
  }
  if (work->left == 0) return job;
  queue_.push_back(work);
  grow_locked(work->left);
  if (closing_ || alive_ == 0) cancel_locked(*work);  // no thread could be started
  finished.swap(finished_);
  if (count >= idle_) {
    work_.notify_all();
  } else {
    for (size_t i = 0; i < count; ++i) work_.notify_one();
  }
  return job;
}

void FileReader::grow_locked(size_t tasks) {
  if (closing_) return;
  account_locked();
  threads_max_ = open_files_max(reads_in_flight_);
  const auto wanted = static_cast<unsigned>(std::min<size_t>(tasks, threads_max_));
  const SignalsBlocked blocked;
  try {
    for (unsigned spare = idle_; alive_ < threads_max_ && spare < wanted; ++spare) {
      std::thread([self = shared_from_this()] { self->run(); }).detach();
      ++alive_;
    }
  } catch (const std::system_error&) {  // RLIMIT_NPROC or a cgroup's pids.max: fewer serve as well
  }
}

void FileReader::turn(std::optional<unsigned> reads_in_flight, std::optional<uint64_t> buffer_bytes,
                      std::optional<ColdReads> cold) {
  refuse_foreign();
  {
    std::lock_guard lock(mutex_);
    if (reads_in_flight) {
      reads_in_flight_ = std::clamp(*reads_in_flight, 1u, kReadsInFlightMax);
      size_t files = 0;
      for (const auto& work : queue_) files += work->left;
      grow_locked(files);
    }
    if (buffer_bytes && std::max(*buffer_bytes, kFileBufferBytesMin) != buffer_bytes_) {
      buffer_bytes_ = std::max(*buffer_bytes, kFileBufferBytesMin);
      arena_ = Arena::make(retained_share(buffer_bytes_));
    }
    if (cold) cold_ = *cold;
  }
  work_.notify_all();
}

bool FileReader::close(double seconds) {
  if (foreign()) return true;
  std::vector<std::shared_ptr<FileWork>> finished;
  std::deque<std::shared_ptr<FileWork>> queued;
  std::unique_lock lock(mutex_);  // last: what the others hold is let go of without it
  closing_ = true;
  queued = queue_;
  for (const auto& work : queued) cancel_locked(*work);
  work_.notify_all();
  finished.swap(finished_);
  return ended_.wait_for(lock, bounded(seconds), [&] { return alive_ == 0; });
}

// ---- the threads
// ---------------------------------------------------------------------------------

void FileReader::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!finished_.empty()) {
      auto finished = std::exchange(finished_, {});
      lock.unlock();
      finished.clear();
      lock.lock();
    }
    if (closing_ || alive_ > threads_max_) break;
    Task task;
    account_locked();
    if (!claim_locked(task)) {
      ++idle_;
      work_.wait(lock);
      --idle_;
      continue;
    }
    ++stats_.in_flight;
    task.cold = cold_;
    task.begun = Clock::now();
    lock.unlock();
    perform(task);
    lock.lock();
    account_locked();
    --stats_.in_flight;
    finish_locked(task);
    task.work.reset();  // `queue_` or `finished_` holds it
  }
  account_locked();
  --alive_;
  lock.unlock();
  ended_.notify_all();
}

void FileReader::perform(Task& task) {
  const char* path = task.work->paths[task.index].c_str();
  const bool slow = slow_ != nullptr && slow_->has(path);
  if (task.look) {
    if (slow) slow_->look_delay();
    task.result.error = identify(path, calls_, &task.identity);
  } else {
    const FileBatch& batch = *task.work->batch;
    std::byte* dest =
        batch.buffer == nullptr ? nullptr : batch.buffer->data + batch.offsets[task.index];
    task.result =
        read_whole(path, batch.identities[task.index], dest, task.cold, calls_, direct_refused_);
    if (slow && task.result.error == 0) {  // wherever its bytes lie here, there they come from afar
      task.result = {.error = slow_->read_delay(batch.identities[task.index].size),
                     .tier = FileTier::kSource};
    }
  }
}

// The oldest job comes first. Jobs behind one that waits for memory are looked at meanwhile.
bool FileReader::claim_locked(Task& task) {
  blocked_ = false;
  size_t waiting = 0;
  for (size_t i = 0; i < queue_.size() && waiting < kJobsLookedAt; ++i) {
    const std::shared_ptr<FileWork> work = queue_[i];
    // Memory is given in the order of submission, so that the oldest job is never overtaken.
    if (!work->laid_out && work->looks_left == 0 && waiting == 0) blocked_ = !lay_out_locked(*work);
    if (claim_of_locked(work, task)) return true;
    if (!work->laid_out) ++waiting;
  }
  return false;
}

bool FileReader::claim_of_locked(const std::shared_ptr<FileWork>& work, Task& task) {
  const auto claim = [&](size_t& next, FileState from, FileState to) {
    while (next < work->states.size() && work->states[next] != from) ++next;
    if (next == work->states.size()) return false;
    work->states[next] = to;
    task.work = work;
    task.index = next++;
    return true;
  };
  task.look = !work->laid_out;
  if (task.look) return claim(work->next_look, FileState::kNew, FileState::kLooking);
  return claim(work->next_read, FileState::kLooked, FileState::kReading);
}

// Gives a job its buffer; false when there is no room yet.
bool FileReader::lay_out_locked(FileWork& work) {
  FileBatch& batch = *work.batch;
  const uint64_t bytes_max = buffer_bytes_ - retained_share(buffer_bytes_);
  uint64_t bytes = 0;
  std::vector<std::pair<size_t, int>> refused;
  for (size_t i = 0; i < work.states.size(); ++i) {
    if (work.states[i] != FileState::kLooked) continue;
    const uint64_t size = batch.identities[i].size;
    if (size > buffer_bytes_ / 2) {
      refused.emplace_back(i, EFBIG);
    } else if (bytes + room_for(size) > bytes_max) {
      refused.emplace_back(i, ENOBUFS);
    } else {
      batch.offsets[i] = static_cast<int64_t>(bytes);
      bytes += room_for(size);
    }
  }
  // The arena gives up to an eighth more than it is asked for.
  if (outstanding_bytes_ != 0 && outstanding_bytes_ + bytes + bytes / 8 > bytes_max) return false;
  try {
    if (bytes != 0) batch.buffer = arena_->acquire(bytes);
  } catch (const Error&) {
    refused.clear();
    for (size_t i = 0; i < work.states.size(); ++i) {
      if (work.states[i] == FileState::kLooked) refused.emplace_back(i, ENOMEM);
    }
  }
  for (const auto& [index, error] : refused) {
    work.states[index] = FileState::kDone;
    batch.errors[index] = error;
    --work.left;
  }
  batch.bytes = bytes;
  batch.charged_bytes_ = batch.buffer == nullptr ? 0 : batch.buffer->capacity;
  outstanding_bytes_ += batch.charged_bytes_;
  work.laid_out = true;
  if (!refused.empty()) settle_locked(work);
  if (work.left > 1 && idle_ > 0) work_.notify_all();
  return true;
}

void FileReader::finish_locked(Task& task) {
  FileWork& work = *task.work;
  FileBatch& batch = *work.batch;
  FileState& state = work.states[task.index];
  int& error = batch.errors[task.index];
  if (task.result.error != 0) ++stats_.failures;
  if (task.look) {
    --work.looks_left;
    batch.identities[task.index] = task.identity;
    if (error == EINPROGRESS && task.result.error == 0 && !closing_) {
      state = FileState::kLooked;
      return;
    }
    if (error == EINPROGRESS) error = closing_ ? ECANCELED : task.result.error;
  } else {
    ++stats_.reads;
    note_latency_locked(std::chrono::duration<double>(Clock::now() - task.begun).count());
    error = task.result.error;
    if (error == 0) {
      const uint64_t bytes = batch.identities[task.index].size;
      batch.lengths[task.index] = static_cast<int64_t>(bytes);
      batch.ready_bytes_ += bytes;
      stats_.ready_bytes += bytes;
      stats_.bytes += bytes;
      (task.result.tier == FileTier::kSource ? stats_.source_bytes : stats_.page_cache_bytes) +=
          bytes;
    }
  }
  state = FileState::kDone;
  --work.left;
  settle_locked(work);
}

// Tells those who wait, and lets go of a job that is over.
void FileReader::settle_locked(FileWork& work) {
  if (work.waiting > 0) work.ready.notify_all();
  if (work.left > 0) {
    // The last look at a job was given up: a thread must come to lay it out.
    if (!work.laid_out && work.looks_left == 0 && idle_ > 0) work_.notify_one();
    return;
  }
  const auto it = std::find_if(queue_.begin(), queue_.end(),
                               [&](const auto& queued) { return queued.get() == &work; });
  if (it == queue_.end()) return;
  finished_.push_back(std::move(*it));
  queue_.erase(it);
  if (idle_ > 0 && !queue_.empty()) work_.notify_one();  // the next job is the first now
}

// Files that nobody began to read are done with.
void FileReader::cancel_locked(FileWork& work) {
  if (work.left == 0) return;
  for (size_t i = 0; i < work.states.size(); ++i) {
    FileState& state = work.states[i];
    if (state == FileState::kLooking) work.batch->errors[i] = ECANCELED;
    if (state != FileState::kNew && state != FileState::kLooked) continue;
    if (state == FileState::kNew) --work.looks_left;
    state = FileState::kDone;
    work.batch->errors[i] = ECANCELED;
    --work.left;
  }
  settle_locked(work);
}

// ---- figures
// -------------------------------------------------------------------------------------

void FileReader::note_latency_locked(double seconds) {
  ++stats_.latency_us[bucket_of(seconds * 1e6)];
  latency_s_ += (seconds - latency_s_) * (latency_s_ == 0 ? 1 : kLatencyWeight);
}

double FileReader::patience_locked() const {
  return std::max(kPatienceReads * latency_s_, kPatienceSecondsMin);
}

void FileReader::account_locked() {
  if (!started_) return;
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - accounted_).count();
  stats_.busy_s += seconds * static_cast<double>(stats_.in_flight);
  const double idle_s = seconds * static_cast<double>(alive_ - stats_.in_flight);
  (blocked_ ? stats_.wait_output_s : stats_.wait_input_s) += idle_s;
  accounted_ = now;
}

FileReaderStats FileReader::stats() const {
  if (foreign()) return {};
  std::lock_guard lock(mutex_);
  const_cast<FileReader*>(this)->account_locked();
  FileReaderStats stats = stats_;
  stats.buffered_bytes = outstanding_bytes_;
  stats.mapped_bytes = arena_->mapped_bytes();
  stats.threads = alive_;
  return stats;
}

unsigned FileReader::reads_in_flight() const {
  if (foreign()) return 0;
  std::lock_guard lock(mutex_);
  return reads_in_flight_;
}

uint64_t FileReader::buffer_bytes() const {
  if (foreign()) return 0;
  std::lock_guard lock(mutex_);
  return buffer_bytes_;
}

}  // namespace headrace::io
