#include "fabric/initiator_loop.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "fabric/socket_mover.h"

namespace headrace::fabric {
namespace {

// Deadlines are of seconds: to look so often costs nothing and needs no order of them.
constexpr int kTickMs = 50;
constexpr int64_t kTickNs = int64_t{kTickMs} * 1'000'000;

// What a command's status comes to.
int errno_of(uint16_t status) {
  // Not an error of the medium: the block will be there later.
  return (status & ~kDoNotRetry) == kUnwrittenBlock ? ENODATA : EIO;
}

}  // namespace

struct InitiatorLoop::Queue {
  Queue(uint64_t id, const Attached& attached)
      : id(id),
        target(attached.target),
        label(attached.label),
        fd(attached.fd),
        qpair(attached.options) {}
  ~Queue() {
    ::shutdown(fd, SHUT_RDWR);  // a forked child may hold the socket open
    ::close(fd);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  const uint64_t id;
  const uint64_t target;
  const uint16_t label;
  const int fd;
  Qpair qpair;
  std::vector<Piece> live;      // by the command's `user`
  std::vector<uint64_t> spare;  // places of `live`
  bool writable_asked = false;
};

InitiatorLoop::InitiatorLoop(const LoopOptions& options, Backlog* backlog, LostQueues* lost,
                             InitiatorCounters* counters)
    : options_(options),
      backlog_(backlog),
      lost_(lost),
      counters_(counters),
      number_(backlog->add_loop(&poller_)),
      answers_(counters) {}

InitiatorLoop::~InitiatorLoop() {
  stop();
  for (const Attached& attached : attached_) ::close(attached.fd);
}

void InitiatorLoop::start() {
  thread_ = std::thread([this] { run(); });
}

void InitiatorLoop::attach(const Attached& attached) {
  {
    const std::lock_guard lock(mutex_);
    attached_.push_back(attached);
  }
  poller_.wake();
}

void InitiatorLoop::stop() {
  stopping_ = true;
  poller_.wake();
  if (thread_.joinable()) thread_.join();
}

// -- the loop -------------------------------------------------------------------------------------

void InitiatorLoop::run() {
  while (true) {
    const auto ready = poller_.wait(timeout_ms());
    if (stopping_) break;
    now_ns_ = now_ns();
    for (const epoll_event& event : ready) {
      event.data.u64 == Poller::kWoken ? take_inbox() : handle(event.data.u64, event.events);
    }
    keep_time();
    pump();
    answers_.tell();
  }
  take_inbox();
  while (!queues_.empty()) lose(queues_.begin()->second.get(), "closed");
  answers_.tell();
}

void InitiatorLoop::take_inbox() {
  std::vector<Attached> attached;
  {
    const std::lock_guard lock(mutex_);
    attached.swap(attached_);
  }
  for (const Attached& each : attached) open(each);
  kept_time_ns_ = 0;  // perhaps there is time to be kept for what nobody can read yet
}

void InitiatorLoop::open(const Attached& attached) {
  auto made = std::make_unique<Queue>(++ids_, attached);
  Queue* queue = made.get();
  queues_.emplace(queue->id, std::move(made));
  by_target_[queue->target].push_back(queue);
  if (!poller_.add(queue->fd, queue->id)) lose(queue, "the socket cannot be waited for");
}

// -- commands -------------------------------------------------------------------------------------

void InitiatorLoop::pump() {
  for (const auto& [target, queues] : by_target_) pump_target(target, queues);
  for (auto it = queues_.begin(); it != queues_.end();) {
    Queue* queue = it->second.get();
    ++it;  // sending may lose it
    if (queue->qpair.outgoing_bytes() > 0 && !queue->writable_asked) settle(queue);
  }
}

void InitiatorLoop::pump_target(uint64_t target, const std::vector<Queue*>& queues) {
  size_t room = 0;
  for (const Queue* queue : queues) room += queue->qpair.room();
  const unsigned depth = depth_;
  room = std::min<size_t>(room, depth > in_flight_ ? depth - in_flight_ : 0);
  if (room == 0) return;
  taken_.clear();
  backlog_->take(target, number_, room, &taken_);
  for (Piece& piece : taken_) {
    submit(*std::max_element(
               queues.begin(), queues.end(),
               [](const Queue* a, const Queue* b) { return a->qpair.room() < b->qpair.room(); }),
           std::move(piece));
  }
}

// REQUIRES: room in the queue.
void InitiatorLoop::submit(Queue* queue, Piece piece) {
  if (queue->spare.empty()) {
    queue->spare.push_back(queue->live.size());
    queue->live.emplace_back();
  }
  Command command;
  command.sqe = read_command(piece.nsid, piece.slba, piece.blocks, piece.bytes);
  command.data_bytes = piece.bytes;
  command.place = piece.place;
  command.user = queue->spare.back();
  command.deadline_ns = now_ns_ + static_cast<int64_t>(options_.command_timeout_s * 1e9);
  queue->qpair.submit(command);
  queue->spare.pop_back();
  ++in_flight_;
  ++counters_->commands;
  ++piece.attempts;
  queue->live[command.user] = std::move(piece);
}

void InitiatorLoop::handle(uint64_t id, uint32_t events) {
  const auto it = queues_.find(id);
  if (it == queues_.end()) return;
  Queue* queue = it->second.get();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) &&
      receive(queue->fd, &queue->qpair) == Moved::kEnded) {
    lose(queue, "the target closed the connection");
    return;
  }
  settle(queue);
}

// Sends what is there and takes completions. The queue may be lost afterwards.
void InitiatorLoop::settle(Queue* queue) {
  const Moved moved = transmit(queue->fd, &queue->qpair);
  completions_.clear();
  queue->qpair.take_completions(&completions_);
  for (const Completion& completion : completions_) complete(queue, completion);
  if (queue->qpair.state() >= Qpair::State::kTerminating) {
    const Fault& fault = queue->qpair.fault();
    lose(queue, std::string(name_of(fault.status)) + ": " + fault.what);
  } else if (queue->qpair.overdue() > 0) {
    lose(queue, "a command had no answer in time");
  } else if (moved == Moved::kEnded) {
    lose(queue, "the connection broke");
  } else {
    listen(queue, moved == Moved::kBlocked);
  }
}

void InitiatorLoop::complete(Queue* queue, const Completion& completion) {
  Piece piece = std::move(queue->live[completion.user]);
  queue->spare.push_back(completion.user);
  --in_flight_;
  switch (completion.outcome) {
    case Outcome::kTimedOut:
      ++counters_->timeouts;
      again(queue->target, std::move(piece), ETIMEDOUT, true);
      return;
    case Outcome::kLost:
      // Not the command's fault: as often as the deadline allows.
      again(queue->target, std::move(piece), ECONNRESET, false);
      return;
    case Outcome::kAnswered:
      break;
  }
  if (completion.status == kSuccess) {
    answers_.ended(piece, 0);
  } else if (completion.status & kDoNotRetry) {
    answers_.ended(piece, errno_of(completion.status));
  } else {
    if (completion.status == kTransientTransportError) ++counters_->digest_errors;
    again(queue->target, std::move(piece), errno_of(completion.status), true);
  }
}

// Has a piece read again, unless it was tried often enough.
void InitiatorLoop::again(uint64_t target, Piece piece, int error, bool counts) {
  if (!counts) --piece.attempts;
  if (piece.attempts >= options_.attempts) {
    answers_.ended(piece, error);
  } else {
    backlog_->put_back(target, std::move(piece), &answers_);
    kept_time_ns_ = 0;
  }
}

void InitiatorLoop::lose(Queue* queue, std::string reason) {
  const std::unique_ptr<Queue> owned = std::move(queues_.at(queue->id));
  queues_.erase(queue->id);
  std::erase(by_target_[queue->target], queue);
  backlog_->close_queue(queue->target, number_);
  queue->qpair.lost();
  completions_.clear();
  queue->qpair.take_completions(&completions_);
  for (const Completion& completion : completions_) complete(queue, completion);
  ++counters_->lost_queues;
  lost_->put({queue->target, queue->label, std::move(reason)});
}

void InitiatorLoop::listen(Queue* queue, bool to_write) {
  if (queue->writable_asked == to_write) return;
  queue->writable_asked = to_write;
  poller_.listen(queue->fd, queue->id, to_write);
}

// -- time -----------------------------------------------------------------------------------------

void InitiatorLoop::keep_time() {
  if (now_ns_ - kept_time_ns_ < kTickNs) return;
  kept_time_ns_ = now_ns_;
  std::vector<Queue*> late;
  for (const auto& [id, queue] : queues_) {
    queue->qpair.expire(now_ns_);
    if (queue->qpair.overdue() > 0) late.push_back(queue.get());
  }
  for (Queue* queue : late) settle(queue);
  backlog_waits_ = backlog_->keep_time(now_ns_);
}

int InitiatorLoop::timeout_ms() const { return in_flight_ > 0 || backlog_waits_ ? kTickMs : -1; }

}  // namespace headrace::fabric
