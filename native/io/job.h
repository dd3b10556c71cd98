// Job: a batch that was submitted to a reader, from the queue to its delivery.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/batch.h"

namespace headrace::io {

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
  std::vector<Range> ranges_;  // one per index, or none
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  Stage stage_ = Stage::kQueued;
  const Plan* plan_ = nullptr;  // while reading
  std::shared_ptr<Batch> batch_;
  // Guarded by the reader's lock.
  uint64_t charged_bytes_ = 0;  // of the reader's memory
  uint64_t sample_bytes_ = 0;
  uint64_t samples_ = 0;
  bool ready_bytes_counted_ = false;
  BatchWay way_;  // so far
  std::exception_ptr error_;
  bool delivered_ = false;
};

}  // namespace headrace::io
