#include "io/file_reader.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "io/attempt.h"
#include "io/file_work.h"

namespace headrace::io {
namespace {

// Behind a job that is looked at, or waits for memory, so many are looked at meanwhile: their names
// are warm when it comes. And so many files for each read in flight: jobs may be a file each.
constexpr size_t kJobsLookedAt = 4;
constexpr size_t kFilesLookedAt = 2;
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

}  // namespace

// One file to look at or to read, and how it went.
struct FileReader::Task {
  std::shared_ptr<FileWork> work;
  size_t index = 0;
  bool look = false;
  ColdReads cold = ColdReads::kDirect;
  FileIdentity identity;
  WholeFile result;
  int64_t ready_ns = 0;
  Clock::time_point begun;
};

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

std::shared_ptr<FileJob> FileReader::submit(std::vector<std::string> paths,
                                            std::vector<FileIdentity> known) {
  refuse_foreign();
  if (!known.empty() && known.size() != paths.size()) {
    throw Error(ErrorKind::kInvalidArgument, std::to_string(known.size()) + " files are known of " +
                                                 std::to_string(paths.size()) + " to be read");
  }
  const auto work = std::make_shared<FileWork>(std::move(paths), std::move(known));
  work->batch->reader_ = shared_from_this();
  std::shared_ptr<FileJob> job(new FileJob(shared_from_this(), work));
  const size_t count = work->left;

  std::vector<std::shared_ptr<FileWork>> finished;
  std::lock_guard lock(mutex_);
  account_locked();
  figures_.start();
  if (count == 0) return job;
  queue_.push_back(work);
  grow_locked(count);
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
  } catch (const std::bad_alloc&) {     // the same
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
    ++figures_.stats.in_flight;
    task.cold = cold_;
    task.begun = Clock::now();
    lock.unlock();
    perform(task);
    lock.lock();
    account_locked();
    --figures_.stats.in_flight;
    finish_locked(task);
    task.work.reset();  // `queue_` or `finished_` holds it
  }
  account_locked();
  --alive_;
  if (idle_ > 0 && !queue_.empty()) work_.notify_one();  // what woke this thread was meant for it
  lock.unlock();
  ended_.notify_all();
}

void FileReader::perform(Task& task) {
  const char* path = task.work->paths[task.index].c_str();
  const int64_t begun_ns = slow_ == nullptr ? 0 : SlowModel::now_ns();
  const bool slow = slow_ != nullptr && slow_->has(path);
  if (task.look) {
    if (slow) slow_->look_delay(begun_ns);
    task.result.error = identify(path, calls_, &task.identity);
  } else {
    const FileBatch& batch = *task.work->batch;
    std::byte* dest =
        batch.buffer == nullptr ? nullptr : batch.buffer->data + batch.offsets[task.index];
    task.result =
        read_whole(path, batch.identities[task.index], dest, task.cold, calls_, direct_refused_);
    if (slow && task.result.error == 0) {  // wherever its bytes lie here, there they come from afar
      const uint64_t bytes = batch.identities[task.index].size;
      const SlowAnswer answer = slow_->read_delay(begun_ns, bytes);
      task.result = {.error = answer.error, .tier = FileTier::kSource};
      task.ready_ns = answer.due_ns;
    } else {
      task.ready_ns = SlowModel::now_ns();
    }
  }
}

// The oldest job comes first.
bool FileReader::claim_locked(Task& task) {
  blocked_ = false;
  size_t jobs = 0, files = 0;  // that have no memory yet
  bool overtakes = false, small = true;
  const size_t files_max = kFilesLookedAt * threads_max_;
  for (size_t i = 0; i < queue_.size() && (jobs < kJobsLookedAt || files < files_max);) {
    FileWork& work = *queue_[i];  // `finished_` keeps one that ends here
    // Where memory is short it is given in the order of submission, so that the oldest job is never
    // overtaken.
    if (work.may_be_laid_out() && !blocked_) {
      const bool waits = (!overtakes || small) && !lay_out_locked(work, overtakes);
      blocked_ = waits && !overtakes;
    }
    if (work.left == 0) continue;  // all of it was refused, and the next job is at its place
    task.look = !work.laid_out;
    if (const auto index = work.claim()) {
      task.work = queue_[i];
      task.index = *index;
      return true;
    }
    if (!work.laid_out) {
      ++jobs;
      files += work.left;
      overtakes = true;
      small = small && work.paths.size() == 1;
    }
    ++i;
  }
  return false;
}

// Gives a job its buffer; false when there is no room yet.
bool FileReader::lay_out_locked(FileWork& work, bool overtakes) {
  FileBatch& batch = *work.batch;
  const uint64_t bytes_max = buffer_bytes_ - retained_share(buffer_bytes_);
  const size_t left = work.left;
  const uint64_t bytes = work.lay_out(buffer_bytes_ / 2, bytes_max);
  // The arena gives up to an eighth more than it is asked for. Who overtakes leaves room for the
  // largest file, so that whoever waits for the oldest job, and lets go of nothing before, gets it.
  const uint64_t most = outstanding_bytes_ + bytes + bytes / 8;
  const bool room =
      overtakes ? most <= bytes_max / 4 : outstanding_bytes_ == 0 || most <= bytes_max;
  if (room) {
    try {
      if (bytes != 0) batch.buffer = arena_->acquire(bytes);
    } catch (const Error&) {
      work.refuse_all(ENOMEM);
    } catch (const std::bad_alloc&) {
      work.refuse_all(ENOMEM);
    }
    batch.bytes = batch.buffer == nullptr ? 0 : bytes;
    batch.charged_bytes_ = batch.buffer == nullptr ? 0 : batch.buffer->capacity;
    outstanding_bytes_ += batch.charged_bytes_;
    work.laid_out = true;
  }
  if (work.left != left) settle_locked(work);
  if (room && work.left > 1 && idle_ > 0) work_.notify_all();
  return room || work.left == 0;
}

void FileReader::finish_locked(Task& task) {
  FileWork& work = *task.work;
  FileBatch& batch = *work.batch;
  FileReaderStats& stats = figures_.stats;
  int error = task.result.error;
  if (error != 0) ++stats.failures;
  if (task.look) {
    batch.identities[task.index] = task.identity;
    const int given_up = batch.errors[task.index];
    if (given_up != EINPROGRESS) error = given_up;
    if (error == 0 && closing_) error = ECANCELED;
    if (error == 0) {
      --work.looks_left;
      work.states[task.index] = FileState::kLooked;
      return;
    }
  } else {
    ++stats.reads;
    batch.ready_ns = std::max(batch.ready_ns, task.ready_ns);
    figures_.note_latency(std::chrono::duration<double>(Clock::now() - task.begun).count());
  }
  work.end(task.index, error);
  if (error == 0) {
    const uint64_t bytes = batch.identities[task.index].size;
    batch.lengths[task.index] = static_cast<int64_t>(bytes);
    batch.note_ready_locked(task.index);
    stats.bytes += bytes;
    (task.result.tier == FileTier::kSource ? stats.source_bytes : stats.page_cache_bytes) += bytes;
  }
  settle_locked(work);
}

// Tells those who wait, and lets go of a job that is over.
void FileReader::settle_locked(FileWork& work) {
  if (work.waiting > 0) work.ready.notify_all();
  if (work.left > 0) {
    // The last look at a job was given up: a thread must come to lay it out.
    if (work.may_be_laid_out() && idle_ > 0) work_.notify_one();
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
  for (size_t i = 0; i < work.states.size(); ++i) work.give_up(i);
  settle_locked(work);
}

// ---- figures
// -------------------------------------------------------------------------------------

void FileReader::account_locked() { figures_.account(alive_, blocked_); }

FileReaderStats FileReader::stats() const {
  if (foreign()) return {};
  std::lock_guard lock(mutex_);
  const_cast<FileReader*>(this)->account_locked();
  FileReaderStats stats = figures_.stats;
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
