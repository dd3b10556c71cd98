#include "fabric/backlog.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <utility>

namespace headrace::fabric {
namespace {

// One more loop is woken for so many pieces: for fewer, waking it costs more than it brings.
constexpr size_t kPiecesPerLoop = 8;

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

}  // namespace

int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

unsigned Backlog::add_loop(Poller* poller) {
  const std::lock_guard lock(mutex_);
  loops_.push_back(poller);
  queues_.push_back(0);
  return static_cast<unsigned>(loops_.size() - 1);
}

uint64_t Backlog::add_target(uint32_t transfer_max) {
  const std::lock_guard lock(mutex_);
  const uint64_t number = targets_.size() + 1;
  Target& added = targets_[number];
  added.transfer_max = transfer_max;
  added.queues.resize(loops_.size());
  added.hungry.resize(loops_.size());
  return number;
}

void Backlog::add_volume(const std::string& url, uint64_t target,
                         const NamespaceGeometry& geometry) {
  const std::lock_guard lock(mutex_);
  volumes_[url] = {target, geometry};
}

Backlog::Target& Backlog::target(uint64_t number) { return targets_.at(number); }

// -- queues ---------------------------------------------------------------------------------------

unsigned Backlog::open_queue(uint64_t number) {
  const std::lock_guard lock(mutex_);
  Target& target = this->target(number);
  target.error = 0;
  target.lost_ns = 0;
  unsigned best = 0;
  for (unsigned loop = 1; loop < loops_.size(); ++loop) {
    if (std::pair(target.queues[loop], queues_[loop]) <
        std::pair(target.queues[best], queues_[best])) {
      best = loop;
    }
  }
  ++target.queues[best];
  ++queues_[best];
  return best;
}

void Backlog::close_queue(uint64_t number, unsigned loop) {
  const std::lock_guard lock(mutex_);
  Target& target = this->target(number);
  --queues_[loop];
  if (--target.queues[loop] == 0) target.hungry[loop] = false;
  if (std::accumulate(target.queues.begin(), target.queues.end(), 0u) == 0) {
    target.lost_ns = now_ns();
  }
}

unsigned Backlog::loops_in_use() const {
  const std::lock_guard lock(mutex_);
  return static_cast<unsigned>(
      std::count_if(queues_.begin(), queues_.end(), [](unsigned count) { return count > 0; }));
}

// -- pieces ---------------------------------------------------------------------------------------

void Backlog::put(std::shared_ptr<io::RemoteRequests> requests) {
  const int64_t now = now_ns();
  const auto batch =
      std::make_shared<ReadBatch>(std::move(requests), now + nanoseconds(options_.read_deadline_s));
  for (size_t first = 0; first < batch->size();) {
    size_t end = first + 1;
    while (end < batch->size() && batch->path(end) == batch->path(first)) ++end;
    put_run(batch, first, end, now);
    first = end;
  }
}

// Requests [first, end) of one volume.
void Backlog::put_run(const std::shared_ptr<ReadBatch>& batch, size_t first, size_t end,
                      int64_t now) {
  Answers answers(counters_);  // told when the mutex is free again
  Volume volume;
  uint32_t command_bytes = 0;
  if (const int error = find(batch->path(first), now, &volume, &command_bytes)) {
    for (size_t number = first; number < end; ++number) answers.finished(batch, number, error);
    return;
  }
  std::vector<Piece> pieces;
  pieces.reserve(end - first);
  for (size_t number = first; number < end; ++number) {
    if (cut(volume.geometry, command_bytes, batch, number, &pieces) > 0) continue;
    answers.finished(batch, number, 0);
  }
  const std::lock_guard lock(mutex_);
  Target& target = this->target(volume.target);
  if (const int error = closed_ ? ECANCELED : target.error) {
    for (const Piece& piece : pieces) answers.ended(piece, error);
    return;
  }
  std::move(pieces.begin(), pieces.end(), std::back_inserter(target.waiting));
  wake_for(&target);
}

// 0, or why nothing can be read from the volume.
int Backlog::find(const std::string& url, int64_t now, Volume* volume, uint32_t* command_bytes) {
  const std::lock_guard lock(mutex_);
  if (closed_) return ECANCELED;
  const auto it = volumes_.find(url);
  if (it == volumes_.end()) return ENOENT;
  *volume = it->second;
  const Target& target = this->target(volume->target);
  *command_bytes = std::min(options_.command_bytes, target.transfer_max);
  return target.error == 0 && away(target, now) ? EHOSTDOWN : target.error;
}

void Backlog::wake_for(Target* target) {
  if (target->waiting.empty()) return;
  const size_t most = 1 + target->waiting.size() / kPiecesPerLoop;
  size_t woken = 0;
  bool served = false;
  for (unsigned loop = 0; loop < loops_.size() && woken < most; ++loop) {
    served = served || target->queues[loop] > 0;
    if (!target->hungry[loop]) continue;
    target->hungry[loop] = false;
    loops_[loop]->wake();
    ++woken;
  }
  if (!served && !loops_.empty()) loops_.front()->wake();  // it keeps the time
}

void Backlog::take(uint64_t number, unsigned loop, size_t most, std::vector<Piece>* pieces) {
  Answers answers(counters_);
  const std::lock_guard lock(mutex_);
  Target& target = this->target(number);
  while (most > 0 && !target.waiting.empty()) {
    Piece piece = std::move(target.waiting.front());
    target.waiting.pop_front();
    if (piece.batch->abandoned()) {
      answers.ended(piece, ECANCELED);
      continue;
    }
    pieces->push_back(std::move(piece));
    --most;
  }
  target.hungry[loop] = most > 0;
}

void Backlog::put_back(uint64_t number, Piece piece, Answers* answers) {
  const std::lock_guard lock(mutex_);
  Target& target = this->target(number);
  if (closed_ || target.error != 0) {
    answers->ended(piece, closed_ ? ECANCELED : target.error);
    return;
  }
  ++counters_->retried;
  target.waiting.push_front(std::move(piece));
  wake_for(&target);
}

// -- ends -----------------------------------------------------------------------------------------

void Backlog::fail_all(Target* target, int error, Answers* answers) {
  for (const Piece& piece : target->waiting) answers->ended(piece, error);
  target->waiting.clear();
}

void Backlog::give_up(uint64_t number, int error) {
  Answers answers(counters_);
  const std::lock_guard lock(mutex_);
  Target& target = this->target(number);
  target.error = error;
  fail_all(&target, error, &answers);
}

// Whether a target has had no queue for as long as a read may take.
bool Backlog::away(const Target& target, int64_t now) const {
  return target.lost_ns != 0 && target.lost_ns <= now - nanoseconds(options_.read_deadline_s);
}

bool Backlog::keep_time(int64_t now) {
  Answers answers(counters_);
  const std::lock_guard lock(mutex_);
  bool waits = false;
  for (auto& [number, target] : targets_) {
    if (away(target, now)) fail_all(&target, EHOSTDOWN, &answers);
    // Oldest first, but for those that are read again: these are in front, and older.
    while (!target.waiting.empty() && target.waiting.front().batch->deadline_ns() <= now) {
      answers.ended(target.waiting.front(), ETIMEDOUT);
      target.waiting.pop_front();
    }
    waits = waits || !target.waiting.empty();
  }
  return waits;
}

void Backlog::close() {
  Answers answers(counters_);
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& [number, target] : targets_) fail_all(&target, ECANCELED, &answers);
}

}  // namespace headrace::fabric
