#include "io/job.h"

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "io/plan.h"
#include "io/reader.h"

namespace headrace::io {

Job::~Job() {
  if (reader_ != nullptr) reader_->settle(*this);
}

bool Job::done() const {
  if (reader_->foreign()) return false;
  std::lock_guard lock(mutex_);
  return stage_ == Stage::kDone;
}

std::shared_ptr<Batch> Job::wait(double seconds) {
  reader_->refuse_foreign();
  const bool waits = !done();
  if (waits) reader_->want(*this);
  const auto started = std::chrono::steady_clock::now();
  std::shared_ptr<Batch> batch;
  const auto count_wait = [&](void*) {
    if (waits) reader_->count_wait(std::chrono::steady_clock::now() - started);
  };
  const std::unique_ptr<void, decltype(count_wait)> counted(this, count_wait);
  {
    std::unique_lock lock(mutex_);
    // Bounded: the clock counts nanoseconds in 64 bits.
    const auto patience = std::chrono::duration<double>(seconds > 0 ? std::min(seconds, 1e9) : 0.0);
    if (!ready_.wait_for(lock, patience, [&] { return stage_ == Stage::kDone; })) return nullptr;
    if (error_) std::rethrow_exception(error_);
    if (delivered_) throw Error(ErrorKind::kInvalidArgument, "this batch was delivered before");
    delivered_ = true;
    batch = std::move(batch_);
  }
  reader_->delivered(*this);
  return batch;
}

std::string Job::waiting_for() const {
  if (reader_->foreign()) return "a reader of another process";
  std::lock_guard lock(mutex_);
  switch (stage_) {
    case Stage::kQueued:
      return "a free worker";
    case Stage::kPlanning:
      return "the sample directory";
    case Stage::kMemory:
      return "memory within the budget";
    case Stage::kDone:
      return "nothing";
    case Stage::kReading:
      break;
  }
  const uint64_t done = plan_->requests_done.load();
  const uint64_t reads = plan_->requests.size() + plan_->remote.size();
  std::string text = std::to_string(reads - done) + " of " + std::to_string(reads) + " reads";
  for (const Run& run : plan_->runs) {
    if (run.requests_left.load() == 0) continue;
    return text + ", one of them in volume " + reader_->catalog_->volume(run.volume).path() +
           " at offset " + std::to_string(run.begin);
  }
  return plan_->paths.empty() ? text : text + ", files such as " + plan_->paths.front();
}

}  // namespace headrace::io
