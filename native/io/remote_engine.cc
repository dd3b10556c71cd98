#include "io/remote_engine.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace headrace::io {
namespace {

// How often a wait looks whether the reader closes.
constexpr auto kLookAround = std::chrono::milliseconds(20);

}  // namespace

void RemoteInbox::put(std::span<const RemoteResult> results) {
  bool enough;
  {
    std::lock_guard lock(mutex_);
    results_.insert(results_.end(), results.begin(), results.end());
    enough = results_.size() >= wanted_;
  }
  if (enough) arrived_.notify_one();
}

std::vector<RemoteResult> RemoteInbox::take(Clock::time_point deadline, size_t at_least) {
  std::unique_lock lock(mutex_);
  wanted_ = at_least;
  arrived_.wait_until(lock, deadline, [&] { return results_.size() >= at_least; });
  return std::exchange(results_, {});
}

RemoteRequests::RemoteRequests(std::vector<RemoteRequest> requests, std::vector<std::string> paths,
                               std::shared_ptr<const void> memory,
                               std::shared_ptr<RemoteInbox> inbox, size_t first_number)
    : requests_(std::move(requests)),
      paths_(std::move(paths)),
      memory_(std::move(memory)),
      inbox_(std::move(inbox)),
      first_number_(first_number),
      states_(requests_.size(), State::kOpen) {}

bool RemoteRequests::open(size_t i) const {
  std::lock_guard lock(mutex_);
  return !abandoned_ && states_[i] == State::kOpen;
}

bool RemoteRequests::finish(size_t i, uint64_t bytes, int error) {
  {
    std::lock_guard lock(mutex_);
    if (abandoned_ || states_[i] != State::kOpen) return false;
    states_[i] = State::kFinished;
  }
  if (error == 0 && bytes > requests_[i].length) error = EPROTO;
  inbox_->put({first_number_ + i, error == 0 ? bytes : 0, error});
  return true;
}

void RemoteRequests::finish_many(std::span<const RemoteResult> results) {
  std::vector<RemoteResult> counted;
  counted.reserve(results.size());
  {
    std::lock_guard lock(mutex_);
    if (abandoned_) return;
    for (const RemoteResult& result : results) {
      if (states_[result.number] != State::kOpen) continue;
      states_[result.number] = State::kFinished;
      counted.push_back(result);
    }
  }
  for (RemoteResult& result : counted) {
    if (result.error == 0 && result.bytes > requests_[result.number].length) result.error = EPROTO;
    if (result.error != 0) result.bytes = 0;
    result.number += first_number_;
  }
  if (!counted.empty()) inbox_->put(counted);
}

bool RemoteRequests::finish_with(size_t i, std::span<const std::byte> bytes, int error) {
  {
    std::lock_guard lock(mutex_);
    if (abandoned_ || states_[i] != State::kOpen) return false;
    states_[i] = State::kFilling;
  }
  if (error == 0 && bytes.size() > requests_[i].length) error = EPROTO;
  if (error == 0 && !bytes.empty()) std::memcpy(requests_[i].dest, bytes.data(), bytes.size());
  {
    std::lock_guard lock(mutex_);
    states_[i] = State::kFinished;
    if (abandoned_) return false;
  }
  inbox_->put({first_number_ + i, error == 0 ? bytes.size() : 0, error});
  return true;
}

void RemoteRequests::abandon() {
  std::lock_guard lock(mutex_);
  abandoned_ = true;
}

int64_t read_remote(const RemoteCall& call, uint32_t volume, const std::string& path,
                    uint64_t offset, uint64_t length, std::byte* dest) {
  std::vector<RemoteRequest> pieces;
  for (uint64_t at = 0; at < length; at += kRemotePieceBytes) {
    pieces.push_back({volume, offset + at, std::min(kRemotePieceBytes, length - at), dest + at});
  }
  const size_t count = pieces.size();
  if (count == 0) return 0;
  const auto inbox = std::make_shared<RemoteInbox>();
  const auto requests = std::make_shared<RemoteRequests>(
      std::move(pieces), std::vector<std::string>(count, path), call.memory, inbox, 0);
  const auto seconds = std::chrono::duration<double>(std::clamp(call.deadline_s, 0.0, 1e9));
  const auto deadline =
      RemoteInbox::Clock::now() + std::chrono::duration_cast<RemoteInbox::Clock::duration>(seconds);
  call.engine->read(requests);
  int error = 0;
  uint64_t end = length;  // where data ended early
  for (size_t answered = 0; answered < count;) {
    const auto now = RemoteInbox::Clock::now();
    const bool closing = call.closing != nullptr && call.closing->closed();
    if (closing || now >= deadline) {
      requests->abandon();
      return closing ? -ECANCELED : -ETIMEDOUT;
    }
    for (const RemoteResult& result : inbox->take(std::min(deadline, now + kLookAround))) {
      ++answered;
      if (result.error != 0) error = result.error;
      if (result.bytes < requests->requests()[result.number].length) {
        end = std::min(end, result.number * kRemotePieceBytes + result.bytes);
      }
    }
  }
  return error != 0 ? -error : static_cast<int64_t>(end);
}

}  // namespace headrace::io
