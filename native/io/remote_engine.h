// RemoteEngine: what reads volumes that are no files: objects in a store, extents on another node.
//
// It is handed requests in batches and finishes each of them exactly once, in any order, from any
// thread, before or after `read` returns. Who waits for them may give up first (`abandon`): what
// is finished later changes nothing but the memory, which the requests keep alive.
//
// An engine may be used by several threads at once.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/in_flight.h"

namespace headrace::io {

struct RemoteRequest {
  uint32_t volume = 0;  // its number in the catalog
  uint64_t offset = 0;
  uint64_t length = 0;
  std::byte* dest = nullptr;
};

// What became of a request.
struct RemoteResult {
  size_t number = 0;
  uint64_t bytes = 0;  // that arrived
  int error = 0;       // 0 or an errno value
};

// Where results arrive, and the thread that asked waits for them.
class RemoteInbox {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~RemoteInbox() = default;
  void put(RemoteResult result) { put(std::span(&result, 1)); }
  // From any thread, the engine's own too. An engine over another one acts on results here.
  virtual void put(std::span<const RemoteResult> results);
  // All results since the last call; waits until there are `at_least` so many, or for `deadline`.
  std::vector<RemoteResult> take(Clock::time_point deadline, size_t at_least = 1);

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<RemoteResult> results_;
  size_t wanted_ = 1;
};

// One batch of requests. Thread-safe.
class RemoteRequests {
 public:
  // `memory` keeps every `dest` valid. Results have the numbers `first_number` and up.
  RemoteRequests(std::vector<RemoteRequest> requests, std::vector<std::string> paths,
                 std::shared_ptr<const void> memory, std::shared_ptr<RemoteInbox> inbox,
                 size_t first_number);

  std::span<const RemoteRequest> requests() const { return requests_; }
  const std::string& path(size_t i) const { return paths_[i]; }

  // Request `i` brought `bytes`, or failed with `error`. The first call for a request counts; false
  // for every later one and after `abandon`. More bytes than asked for are an error (EPROTO).
  bool finish(size_t i, uint64_t bytes, int error);
  // The same for many: who waits is woken once.
  void finish_many(std::span<const RemoteResult> results);
  // The same for bytes that lie elsewhere: copies them first.
  bool finish_with(size_t i, std::span<const std::byte> bytes, int error);
  // Whether request `i` still wants an answer.
  bool open(size_t i) const;
  // Nobody waits any more.
  void abandon();
  bool abandoned() const { return abandoned_.load(std::memory_order_relaxed); }

 private:
  enum class State : uint8_t { kOpen, kFilling, kFinished };
  const std::vector<RemoteRequest> requests_;
  const std::vector<std::string> paths_;
  const std::shared_ptr<const void> memory_;
  const std::shared_ptr<RemoteInbox> inbox_;
  const size_t first_number_;
  mutable std::mutex mutex_;
  std::vector<State> states_;
  std::atomic<bool> abandoned_ = false;  // written with the mutex
};

class RemoteEngine {
 public:
  virtual ~RemoteEngine() = default;
  // Must not throw: what cannot be read is finished with an error.
  virtual void read(std::shared_ptr<RemoteRequests> requests) = 0;
  // How many requests it may have in flight from now on.
  virtual void turn(unsigned reads_in_flight) = 0;
  virtual std::string name() const = 0;
};

// How a single range is read: by which engine, into memory that who owns, and for how long.
struct RemoteCall {
  std::shared_ptr<RemoteEngine> engine;
  std::shared_ptr<const void> memory;
  double deadline_s = 300;
  std::shared_ptr<const InFlight> closing = nullptr;  // gives up when its reader closes
};

// Reads [offset, offset + length) of a volume in pieces of `kRemotePieceBytes`. Returns the bytes
// that arrived in one piece from the start, or -errno: ETIMEDOUT at the deadline, ECANCELED.
inline constexpr uint64_t kRemotePieceBytes = 8 << 20;
int64_t read_remote(const RemoteCall& call, uint32_t volume, const std::string& path,
                    uint64_t offset, uint64_t length, std::byte* dest);

}  // namespace headrace::io
