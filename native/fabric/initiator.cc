#include "fabric/initiator.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "fabric/poller.h"
#include "fabric/socket_mover.h"

namespace headrace::fabric {
namespace {

int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

// One request of a batch. Its commands share it.
struct ReadState {
  std::shared_ptr<io::RemoteRequests> requests;
  size_t number = 0;
  uint64_t bytes = 0;
  unsigned commands_left = 0;
  int error = 0;
  int64_t deadline_ns = 0;
};

// One command of a read: whole blocks, of which `place` is wanted.
struct Piece {
  std::shared_ptr<ReadState> read;
  uint32_t nsid = 0;
  uint64_t slba = 0;
  uint32_t blocks = 0;
  uint32_t bytes = 0;
  DataPlace place;
  unsigned attempts = 0;
};

struct Volume {
  uint64_t target = 0;
  NamespaceGeometry geometry;
};

}  // namespace

class Initiator::Loop {
 public:
  explicit Loop(const InitiatorOptions& options);
  ~Loop();

  uint64_t add_target(uint32_t transfer_max);
  void add_volume(const std::string& url, uint64_t target, const NamespaceGeometry& geometry);
  void attach(uint64_t target, uint16_t label, int fd, const QpairOptions& options);
  void give_up(uint64_t target, int error);
  std::vector<LostQueue> take_lost();
  int lost_event() const { return lost_event_; }
  InitiatorFigures figures() const;
  void close();
  void read(std::shared_ptr<io::RemoteRequests> requests);
  void turn(unsigned reads_in_flight) { depth_ = std::max(1u, reads_in_flight); }

 private:
  struct Queue {
    Queue(uint64_t target, uint16_t label, int fd, const QpairOptions& options)
        : target(target), label(label), fd(fd), qpair(options) {}
    ~Queue() {
      ::shutdown(fd, SHUT_RDWR);  // a forked child may hold the socket open
      ::close(fd);
    }

    const uint64_t target;
    const uint16_t label;
    const int fd;
    Qpair qpair;
    std::unordered_map<uint64_t, Piece> live;  // by the command's `user`
    bool writable_asked = false;
  };
  struct Target {
    uint32_t transfer_max = 0;
    std::deque<Piece> waiting;
    std::vector<uint64_t> queues;
    int error = 0;        // given up
    int64_t lost_ns = 0;  // when its last queue went; 0: it has one, or never had
  };
  struct Attached {
    uint64_t target;
    uint16_t label;
    int fd;
    QpairOptions options;
  };

  void run();
  void take_inbox();
  void open(const Attached& attached);
  void begin(const std::shared_ptr<io::RemoteRequests>& requests);
  // Whether a target has had no queue for as long as a read may take.
  bool away(const Target& target, int64_t now) const {
    return target.lost_ns != 0 && now - target.lost_ns >= nanoseconds(options_.read_deadline_s);
  }
  void cut(const Volume& volume, const io::RemoteRequest& request, std::shared_ptr<ReadState> read,
           Target* target);
  void pump();
  void pump_target(uint64_t number, Target* target);
  bool submit(Queue* queue, Piece piece);
  void handle(uint64_t id, uint32_t events);
  void settle(uint64_t id, Queue* queue);
  void complete(Queue* queue, const Completion& completion);
  void again(uint64_t target, Piece piece, int error, bool counts);
  void finish(const Piece& piece, int error);
  void lose(uint64_t id, std::string reason);
  void listen(uint64_t id, Queue* queue, bool to_write);
  void keep_time();
  int timeout_ms();
  void end_all();

  const InitiatorOptions options_;
  std::atomic<unsigned> depth_;
  Poller poller_{"NVMe/TCP initiator"};
  int lost_event_ = -1;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<io::RemoteRequests>> asked_;
  std::vector<Attached> attached_;
  std::vector<std::pair<uint64_t, int>> given_up_;
  std::unordered_map<std::string, Volume> volumes_;
  std::map<uint64_t, uint32_t> new_targets_;
  std::vector<LostQueue> lost_;
  uint64_t targets_made_ = 0;
  bool stopping_ = false;

  // The loop thread's own.
  std::map<uint64_t, Target> targets_;
  std::map<uint64_t, std::unique_ptr<Queue>> queues_;
  uint64_t ids_ = 0;
  uint64_t users_ = 0;
  unsigned in_flight_ = 0;
  std::vector<Completion> completions_;

  struct Counters {
    std::atomic<uint64_t> reads, commands, bytes, retried, digest_errors, timeouts, lost_queues,
        failed;
  } counters_{};
  std::thread thread_;
};

// -- threads outside ------------------------------------------------------------------------------

Initiator::Loop::Loop(const InitiatorOptions& options)
    : options_(options), depth_(std::max(1u, options.reads_in_flight)) {
  lost_event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (lost_event_ < 0) {
    throw std::system_error(errno, std::generic_category(), "NVMe/TCP initiator");
  }
  thread_ = std::thread([this] { run(); });
}

Initiator::Loop::~Loop() {
  close();
  for (const Attached& attached : attached_) ::close(attached.fd);
  ::close(lost_event_);
}

void Initiator::Loop::close() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  poller_.wake();
  if (thread_.joinable()) thread_.join();
}

uint64_t Initiator::Loop::add_target(uint32_t transfer_max) {
  const std::lock_guard lock(mutex_);
  new_targets_[++targets_made_] = transfer_max;
  return targets_made_;
}

void Initiator::Loop::add_volume(const std::string& url, uint64_t target,
                                 const NamespaceGeometry& geometry) {
  const std::lock_guard lock(mutex_);
  volumes_[url] = {target, geometry};
}

void Initiator::Loop::attach(uint64_t target, uint16_t label, int fd, const QpairOptions& options) {
  {
    const std::lock_guard lock(mutex_);
    attached_.push_back({target, label, fd, options});
  }
  poller_.wake();
}

void Initiator::Loop::give_up(uint64_t target, int error) {
  {
    const std::lock_guard lock(mutex_);
    given_up_.push_back({target, error});
  }
  poller_.wake();
}

std::vector<LostQueue> Initiator::Loop::take_lost() {
  uint64_t ignored;
  [[maybe_unused]] const ssize_t read = ::read(lost_event_, &ignored, sizeof(ignored));
  const std::lock_guard lock(mutex_);
  return std::exchange(lost_, {});
}

InitiatorFigures Initiator::Loop::figures() const {
  return {counters_.reads,         counters_.commands, counters_.bytes,       counters_.retried,
          counters_.digest_errors, counters_.timeouts, counters_.lost_queues, counters_.failed};
}

void Initiator::Loop::read(std::shared_ptr<io::RemoteRequests> requests) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      asked_.push_back(std::move(requests));
      if (asked_.size() > 1) return;  // who came first has woken the loop
    }
  }
  if (requests != nullptr) {
    for (size_t i = 0; i < requests->requests().size(); ++i) requests->finish(i, 0, ECANCELED);
    return;
  }
  poller_.wake();
}

// -- the loop -------------------------------------------------------------------------------------

void Initiator::Loop::run() {
  while (true) {
    const auto ready = poller_.wait(timeout_ms());
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    for (const epoll_event& event : ready) {
      event.data.u64 == Poller::kWoken ? take_inbox() : handle(event.data.u64, event.events);
    }
    keep_time();
    pump();
  }
  end_all();
}

void Initiator::Loop::take_inbox() {
  std::vector<std::shared_ptr<io::RemoteRequests>> asked;
  std::vector<Attached> attached;
  std::vector<std::pair<uint64_t, int>> given_up;
  {
    const std::lock_guard lock(mutex_);
    asked.swap(asked_);
    attached.swap(attached_);
    given_up.swap(given_up_);
    for (const auto& [number, transfer_max] : new_targets_) {
      targets_[number].transfer_max = transfer_max;
    }
    new_targets_.clear();
  }
  for (const Attached& each : attached) open(each);
  for (const auto& requests : asked) begin(requests);
  for (const auto& [number, error] : given_up) {
    Target& target = targets_[number];
    target.error = error;
    for (const Piece& piece : std::exchange(target.waiting, {})) finish(piece, error);
  }
}

void Initiator::Loop::open(const Attached& attached) {
  const uint64_t id = ++ids_;
  auto queue =
      std::make_unique<Queue>(attached.target, attached.label, attached.fd, attached.options);
  const bool listens = poller_.add(queue->fd, id);
  Target& target = targets_[attached.target];
  target.queues.push_back(id);
  target.error = 0;
  target.lost_ns = 0;
  queues_.emplace(id, std::move(queue));
  if (!listens) lose(id, "the socket cannot be waited for");
}

// -- reads ----------------------------------------------------------------------------------------

void Initiator::Loop::begin(const std::shared_ptr<io::RemoteRequests>& requests) {
  const int64_t now = now_ns();
  const int64_t deadline_ns = now + nanoseconds(options_.read_deadline_s);
  for (size_t i = 0; i < requests->requests().size(); ++i) {
    const io::RemoteRequest& request = requests->requests()[i];
    Volume volume;
    bool known = false;
    {
      const std::lock_guard lock(mutex_);
      const auto it = volumes_.find(requests->path(i));
      known = it != volumes_.end();
      if (known) volume = it->second;
    }
    Target* target = known ? &targets_[volume.target] : nullptr;
    if (known && away(*target, now)) target->error = EHOSTDOWN;
    if (!known || target->error != 0) {
      ++counters_.failed;
      requests->finish(i, 0, known ? target->error : ENOENT);
      continue;
    }
    const NamespaceGeometry& geometry = volume.geometry;
    const uint64_t whole = geometry.blocks * geometry.block_bytes;
    const uint64_t first = std::min(geometry.first_byte, whole);
    const uint64_t capacity = std::min(geometry.bytes, whole - first);
    // As of a file: what lies behind the end does not arrive.
    const uint64_t offset = std::min(request.offset, capacity);
    const uint64_t length = std::min(request.length, capacity - offset);
    if (length == 0) {
      requests->finish(i, 0, 0);
      continue;
    }
    auto read = std::make_shared<ReadState>(ReadState{requests, i, length, 0, 0, deadline_ns});
    cut(volume, {request.volume, first + offset, length, request.dest}, std::move(read), target);
  }
}

void Initiator::Loop::cut(const Volume& volume, const io::RemoteRequest& request,
                          std::shared_ptr<ReadState> read, Target* target) {
  const uint32_t block = volume.geometry.block_bytes;
  const uint32_t most =
      std::max(block, std::min(options_.command_bytes, target->transfer_max) / block * block);
  const uint64_t end = request.offset + request.length;
  std::byte* dest = request.dest;
  for (uint64_t at = request.offset; at < end;) {
    const uint64_t slba = at / block;
    const uint64_t last = std::min((end + block - 1) / block, slba + most / block);
    const uint64_t until = std::min(end, last * block);
    Piece piece;
    piece.read = read;
    piece.nsid = volume.geometry.nsid;
    piece.slba = slba;
    piece.blocks = static_cast<uint32_t>(last - slba);
    piece.bytes = piece.blocks * block;
    piece.place = {at - slba * block, {dest, until - at}};
    ++read->commands_left;
    target->waiting.push_back(std::move(piece));
    dest += until - at;
    at = until;
  }
}

void Initiator::Loop::pump() {
  for (auto& [number, target] : targets_) pump_target(number, &target);
}

void Initiator::Loop::pump_target(uint64_t number, Target* target) {
  while (!target->waiting.empty() && in_flight_ < depth_) {
    Piece& piece = target->waiting.front();
    if (!piece.read->requests->open(piece.read->number)) {
      finish(piece, ECANCELED);  // nobody waits any more
      target->waiting.pop_front();
      continue;
    }
    Queue* roomiest = nullptr;
    for (const uint64_t id : target->queues) {
      Queue* queue = queues_.at(id).get();
      if (roomiest == nullptr || queue->qpair.room() > roomiest->qpair.room()) roomiest = queue;
    }
    if (roomiest == nullptr || roomiest->qpair.room() == 0) break;
    submit(roomiest, std::move(piece));
    target->waiting.pop_front();
  }
  const std::vector<uint64_t> ids = target->queues;  // sending may lose one
  for (const uint64_t id : ids) {
    const auto it = queues_.find(id);
    if (it != queues_.end() && it->second->qpair.outgoing_bytes() > 0) settle(id, it->second.get());
  }
  static_cast<void>(number);
}

bool Initiator::Loop::submit(Queue* queue, Piece piece) {
  Command command;
  command.sqe = read_command(piece.nsid, piece.slba, piece.blocks, piece.bytes);
  command.data_bytes = piece.bytes;
  command.place = piece.place;
  command.user = ++users_;
  command.deadline_ns = now_ns() + nanoseconds(options_.command_timeout_s);
  if (!queue->qpair.submit(command)) return false;
  ++in_flight_;
  ++counters_.commands;
  ++piece.attempts;
  queue->live.emplace(command.user, std::move(piece));
  return true;
}

void Initiator::Loop::handle(uint64_t id, uint32_t events) {
  const auto it = queues_.find(id);
  if (it == queues_.end()) return;
  Queue* queue = it->second.get();
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) &&
      receive(queue->fd, &queue->qpair) == Moved::kEnded) {
    lose(id, "the target closed the connection");
    return;
  }
  settle(id, queue);
}

// Sends what is there and takes completions. The queue may be lost afterwards.
void Initiator::Loop::settle(uint64_t id, Queue* queue) {
  const Moved moved = transmit(queue->fd, &queue->qpair);
  completions_.clear();
  queue->qpair.take_completions(&completions_);
  for (const Completion& completion : std::exchange(completions_, {})) {
    complete(queue, completion);
  }
  if (queue->qpair.state() >= Qpair::State::kTerminating) {
    const Fault& fault = queue->qpair.fault();
    lose(id, std::string(name_of(fault.status)) + ": " + fault.what);
    return;
  }
  if (queue->qpair.overdue() > 0) {
    lose(id, "a command had no answer in time");
    return;
  }
  if (moved == Moved::kEnded) {
    lose(id, "the connection broke");
    return;
  }
  listen(id, queue, moved == Moved::kBlocked);
}

void Initiator::Loop::complete(Queue* queue, const Completion& completion) {
  const auto it = queue->live.find(completion.user);
  Piece piece = std::move(it->second);
  queue->live.erase(it);
  --in_flight_;
  switch (completion.outcome) {
    case Outcome::kTimedOut:
      ++counters_.timeouts;
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
    finish(piece, 0);
  } else if (completion.status & kDoNotRetry) {
    // Not an error of the medium: the block will be there later.
    const bool unwritten = (completion.status & ~kDoNotRetry) == kUnwrittenBlock;
    finish(piece, unwritten ? ENODATA : EIO);
  } else {
    if (completion.status == kTransientTransportError) ++counters_.digest_errors;
    again(queue->target, std::move(piece), EIO, true);
  }
}

// Reads a piece again, unless it was tried often enough.
void Initiator::Loop::again(uint64_t target, Piece piece, int error, bool counts) {
  if (!counts) --piece.attempts;
  if (piece.attempts >= options_.attempts) {
    finish(piece, error);
    return;
  }
  ++counters_.retried;
  Target& to = targets_[target];
  if (to.error != 0) {
    finish(piece, to.error);
  } else {
    to.waiting.push_front(std::move(piece));
  }
}

void Initiator::Loop::finish(const Piece& piece, int error) {
  ReadState& read = *piece.read;
  if (error != 0) read.error = error;
  if (--read.commands_left > 0) return;
  if (read.error == 0) {
    ++counters_.reads;
    counters_.bytes += read.bytes;
  } else {
    ++counters_.failed;
  }
  read.requests->finish(read.number, read.bytes, read.error);
}

void Initiator::Loop::lose(uint64_t id, std::string reason) {
  const auto it = queues_.find(id);
  const std::unique_ptr<Queue> queue = std::move(it->second);
  queues_.erase(it);
  Target& target = targets_[queue->target];
  std::erase(target.queues, id);
  if (target.queues.empty()) target.lost_ns = now_ns();
  queue->qpair.lost();
  completions_.clear();
  queue->qpair.take_completions(&completions_);
  for (const Completion& completion : std::exchange(completions_, {})) {
    complete(queue.get(), completion);
  }
  ++counters_.lost_queues;
  {
    const std::lock_guard lock(mutex_);
    lost_.push_back({queue->target, queue->label, std::move(reason)});
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(lost_event_, &one, sizeof(one));
}

void Initiator::Loop::listen(uint64_t id, Queue* queue, bool to_write) {
  if (queue->writable_asked == to_write) return;
  queue->writable_asked = to_write;
  poller_.listen(queue->fd, id, to_write);
}

// -- time -----------------------------------------------------------------------------------------

void Initiator::Loop::keep_time() {
  const int64_t now = now_ns();
  std::vector<uint64_t> late;
  for (const auto& [id, queue] : queues_) {
    queue->qpair.expire(now);
    if (queue->qpair.overdue() > 0) late.push_back(id);
  }
  for (const uint64_t id : late) settle(id, queues_.at(id).get());
  for (auto& [number, target] : targets_) {
    if (away(target, now)) {
      for (const Piece& piece : std::exchange(target.waiting, {})) finish(piece, EHOSTDOWN);
    }
    // Oldest first, but for those that are read again: these are in front, and older.
    while (!target.waiting.empty() && target.waiting.front().read->deadline_ns <= now) {
      finish(target.waiting.front(), ETIMEDOUT);
      target.waiting.pop_front();
    }
  }
}

int Initiator::Loop::timeout_ms() {
  bool waits = in_flight_ > 0;
  for (const auto& [number, target] : targets_) waits = waits || !target.waiting.empty();
  // Deadlines are of seconds: to look every 100 ms costs nothing and needs no order of them.
  return waits ? 100 : -1;
}

void Initiator::Loop::end_all() {
  take_inbox();
  for (auto& [number, target] : targets_) {
    target.error = ECANCELED;
    for (const Piece& piece : std::exchange(target.waiting, {})) finish(piece, ECANCELED);
  }
  while (!queues_.empty()) lose(queues_.begin()->first, "closed");
}

// -- the whole ------------------------------------------------------------------------------------

Initiator::Initiator(const InitiatorOptions& options)
    : owner_pid_(::getpid()), loop_(std::make_unique<Loop>(options)) {}

Initiator::~Initiator() {
  if (foreign()) static_cast<void>(loop_.release());
}

bool Initiator::foreign() const { return ::getpid() != owner_pid_; }

uint64_t Initiator::add_target(uint32_t transfer_max) { return loop_->add_target(transfer_max); }
void Initiator::add_volume(const std::string& url, uint64_t target,
                           const NamespaceGeometry& geometry) {
  loop_->add_volume(url, target, geometry);
}
void Initiator::attach(uint64_t target, uint16_t label, int fd, const QpairOptions& options) {
  loop_->attach(target, label, fd, options);
}
void Initiator::give_up(uint64_t target, int error) { loop_->give_up(target, error); }
std::vector<LostQueue> Initiator::take_lost() { return loop_->take_lost(); }
int Initiator::lost_event() const { return loop_->lost_event(); }
InitiatorFigures Initiator::figures() const { return loop_->figures(); }
void Initiator::close() {
  if (!foreign()) loop_->close();
}
void Initiator::read(std::shared_ptr<io::RemoteRequests> requests) {
  if (!foreign()) return loop_->read(std::move(requests));
  for (size_t i = 0; i < requests->requests().size(); ++i) requests->finish(i, 0, ECANCELED);
}
void Initiator::turn(unsigned reads_in_flight) { loop_->turn(reads_in_flight); }

}  // namespace headrace::fabric
