#include "fabric/target_queues.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/cold_reads.h"
#include "fabric/poller.h"
#include "fabric/socket_mover.h"

namespace headrace::fabric {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBufferSmall = 16 << 10;

}  // namespace

class TargetQueues::Loop {
 public:
  Loop(const TargetQueuesOptions& options, ColdReads* cold_reads);
  ~Loop();

  struct Adopted {
    int fd;
    TargetQpairOptions options;
    std::shared_ptr<const Exports> exports;
    uint64_t association;
    std::vector<std::byte> before;
  };
  void adopt(Adopted adopted);
  void drop(uint64_t association);
  // Closes all queues and ends the thread. Readers may still hand in what nobody waits for.
  void stop();
  void add_figures(TargetFigures* figures) const;

 private:
  struct Queue {
    Queue(const Adopted& adopted)
        : fd(adopted.fd),
          association(adopted.association),
          exports(adopted.exports),
          qpair(adopted.options) {}
    ~Queue() { ::close(fd); }

    const int fd;
    const uint64_t association;
    const std::shared_ptr<const Exports> exports;
    TargetQpair qpair;
    std::deque<TargetCommand> waiting;
    std::map<uint16_t, std::pair<Buffer, uint32_t>> held;  // by CID: data that is being sent
    uint64_t bytes = 0;                                    // read or being read, and not sent
    bool writable_asked = false;
    bool lingering = false;
    Clock::time_point close_at{};
  };

  void run();
  void take_inbox();
  void open(Adopted adopted);
  void close(uint64_t id);
  void handle(uint64_t id, uint32_t events);
  void serve(uint64_t id, Queue* queue);
  void answer(uint64_t id, Queue* queue, const TargetCommand& command);
  void answer_read(Queue* queue, uint16_t cid, const Judgement& range, Buffer buffer, int error);
  bool send(uint64_t id, Queue* queue);
  void linger(Queue* queue);
  void listen(uint64_t id, Queue* queue, bool to_write);
  void close_overdue();
  Buffer take_buffer(uint32_t bytes);
  void give_buffer(Buffer buffer, uint32_t bytes);
  int timeout_ms() const;

  const TargetQueuesOptions options_;
  ColdReads* const cold_reads_;
  Poller poller_{"NVMe/TCP target"};
  std::mutex mutex_;
  std::vector<Adopted> adopted_;
  std::vector<uint64_t> dropped_;
  std::vector<ColdRead> cold_done_;
  bool stopping_ = false;

  // The loop thread's own.
  std::map<uint64_t, std::unique_ptr<Queue>> queues_;
  uint64_t next_id_ = 1;
  size_t lingering_ = 0;
  std::vector<Buffer> small_buffers_;
  std::vector<Buffer> large_buffers_;
  std::vector<TargetCommand> commands_;
  std::vector<uint16_t> released_;

  struct Counters {
    std::atomic<uint64_t> queues, reads, bytes, reads_cold, refused, read_errors, faults,
        digest_errors;
  } counters_{};
  std::thread thread_;
};

// -- threads outside ------------------------------------------------------------------------------

TargetQueues::Loop::Loop(const TargetQueuesOptions& options, ColdReads* cold_reads)
    : options_(options), cold_reads_(cold_reads) {
  thread_ = std::thread([this] { run(); });
}

void TargetQueues::Loop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  poller_.wake();
  if (thread_.joinable()) thread_.join();
}

// REQUIRES: stopped.
TargetQueues::Loop::~Loop() {
  for (const Adopted& adopted : adopted_) ::close(adopted.fd);
}

void TargetQueues::Loop::adopt(Adopted adopted) {
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) {
      ::close(adopted.fd);
      return;
    }
    adopted_.push_back(std::move(adopted));
  }
  poller_.wake();
}

void TargetQueues::Loop::drop(uint64_t association) {
  {
    const std::lock_guard lock(mutex_);
    dropped_.push_back(association);
  }
  poller_.wake();
}

void TargetQueues::Loop::add_figures(TargetFigures* figures) const {
  figures->queues += counters_.queues;
  figures->reads += counters_.reads;
  figures->bytes += counters_.bytes;
  figures->reads_cold += counters_.reads_cold;
  figures->refused += counters_.refused;
  figures->read_errors += counters_.read_errors;
  figures->faults += counters_.faults;
  figures->digest_errors += counters_.digest_errors;
}

// -- the loop -------------------------------------------------------------------------------------

void TargetQueues::Loop::run() {
  while (true) {
    const auto ready = poller_.wait(timeout_ms());
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    for (const epoll_event& event : ready) {
      event.data.u64 == Poller::kWoken ? take_inbox() : handle(event.data.u64, event.events);
    }
    if (lingering_ > 0) close_overdue();
  }
  while (!queues_.empty()) close(queues_.begin()->first);
}

int TargetQueues::Loop::timeout_ms() const { return lingering_ > 0 ? 100 : -1; }

void TargetQueues::Loop::take_inbox() {
  std::vector<Adopted> adopted;
  std::vector<uint64_t> dropped;
  std::vector<ColdRead> done;
  {
    const std::lock_guard lock(mutex_);
    adopted.swap(adopted_);
    dropped.swap(dropped_);
    done.swap(cold_done_);
  }
  for (Adopted& each : adopted) open(std::move(each));
  for (ColdRead& each : done) {
    const auto it = queues_.find(each.queue);
    if (it == queues_.end()) {
      give_buffer(std::move(each.buffer), each.range.bytes);
      continue;
    }
    answer_read(it->second.get(), each.cid, each.range, std::move(each.buffer), each.error);
    serve(it->first, it->second.get());
  }
  for (const uint64_t association : dropped) {
    for (auto it = queues_.begin(); it != queues_.end();) {
      const uint64_t id = it->first;
      const bool theirs = it->second->association == association;
      ++it;
      if (theirs) close(id);
    }
  }
}

void TargetQueues::Loop::open(Adopted adopted) {
  const uint64_t id = next_id_++;
  auto made = std::make_unique<Queue>(adopted);
  Queue* queue = made.get();
  queues_.emplace(id, std::move(made));
  ++counters_.queues;
  if (!poller_.add(queue->fd, id)) {
    close(id);
    return;
  }
  if (!adopted.before.empty()) {
    queue->qpair.feed(adopted.before);
    serve(id, queue);
  }
}

void TargetQueues::Loop::close(uint64_t id) {
  const auto it = queues_.find(id);
  Queue& queue = *it->second;
  queue.qpair.lost();
  counters_.digest_errors += queue.qpair.digest_errors();
  if (queue.lingering) --lingering_;
  for (auto& [cid, held] : queue.held) give_buffer(std::move(held.first), held.second);
  queues_.erase(it);
  --counters_.queues;
}

void TargetQueues::Loop::handle(uint64_t id, uint32_t events) {
  const auto it = queues_.find(id);
  if (it == queues_.end()) return;  // closed by an event before
  Queue* queue = it->second.get();
  if (queue->lingering) {
    std::byte rest[4096];
    const ssize_t count = ::recv(queue->fd, rest, sizeof(rest), MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) close(id);
    return;
  }
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) &&
      receive(queue->fd, &queue->qpair) == Moved::kEnded) {
    close(id);
    return;
  }
  serve(id, queue);
}

// Answers what can be answered now, and sends. The queue may be closed afterwards.
void TargetQueues::Loop::serve(uint64_t id, Queue* queue) {
  do {
    commands_.clear();
    queue->qpair.take_commands(&commands_);
    std::move(commands_.begin(), commands_.end(), std::back_inserter(queue->waiting));
    while (!queue->waiting.empty() && queue->bytes < options_.queue_bytes) {
      const TargetCommand command = std::move(queue->waiting.front());
      queue->waiting.pop_front();
      answer(id, queue, command);
    }
    if (!send(id, queue)) return;
    // What was sent made room for what waits.
  } while (!queue->waiting.empty() && queue->bytes < options_.queue_bytes);
}

void TargetQueues::Loop::answer(uint64_t id, Queue* queue, const TargetCommand& command) {
  Judgement range = judge_command(command.sqe, *queue->exports, options_.transfer_max);
  const uint16_t cid = command.sqe.cid;
  if (range.source == nullptr) {
    if (range.status != kSuccess) ++counters_.refused;
    queue->qpair.answer(cid, range.status);
    return;
  }
  queue->bytes += range.bytes;
  Buffer buffer = take_buffer(range.bytes);
  const int error =
      read_range(*range.source, range.offset, {buffer.get(), range.bytes}, RWF_NOWAIT);
  if (error == 0) {
    answer_read(queue, cid, range, std::move(buffer), 0);
    return;
  }
  // EAGAIN: not in the page cache. EOPNOTSUPP: the file system cannot tell.
  ++counters_.reads_cold;
  cold_reads_->put({id, cid, std::move(range), std::move(buffer), 0}, [this](ColdRead done) {
    {
      const std::lock_guard lock(mutex_);
      cold_done_.push_back(std::move(done));
    }
    poller_.wake();
  });
}

void TargetQueues::Loop::answer_read(Queue* queue, uint16_t cid, const Judgement& range,
                                     Buffer buffer, int error) {
  if (error != 0) {
    ++counters_.read_errors;
    queue->bytes -= range.bytes;
    give_buffer(std::move(buffer), range.bytes);
    queue->qpair.answer(cid, kUnrecoveredReadError);
    return;
  }
  ++counters_.reads;
  counters_.bytes += range.bytes;
  const std::span<const std::byte> data(buffer.get(), range.bytes);
  queue->held[cid] = {std::move(buffer), range.bytes};
  queue->qpair.answer_data(cid, data);
}

// False: the queue was closed.
bool TargetQueues::Loop::send(uint64_t id, Queue* queue) {
  const Moved moved = transmit(queue->fd, &queue->qpair);
  released_.clear();
  queue->qpair.take_released(&released_);
  for (const uint16_t cid : released_) {
    const auto it = queue->held.find(cid);
    queue->bytes -= it->second.second;
    give_buffer(std::move(it->second.first), it->second.second);
    queue->held.erase(it);
  }
  if (moved == Moved::kEnded) {
    close(id);
    return false;
  }
  if (queue->qpair.state() == TargetQpair::State::kTerminating && !queue->lingering) {
    ++counters_.faults;
    linger(queue);
  }
  listen(id, queue, moved == Moved::kBlocked);
  return true;
}

// A TermReq was sent, as far as the socket took it. Waits for the host to close: our closing first,
// with its bytes unread, would reset the connection and might lose the TermReq.
void TargetQueues::Loop::linger(Queue* queue) {
  queue->lingering = true;
  queue->waiting.clear();
  ++lingering_;
  queue->close_at = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(kLingerSeconds));
  ::shutdown(queue->fd, SHUT_WR);
}

void TargetQueues::Loop::listen(uint64_t id, Queue* queue, bool to_write) {
  if (queue->lingering) to_write = false;
  if (queue->writable_asked == to_write) return;
  queue->writable_asked = to_write;
  poller_.listen(queue->fd, id, to_write);
}

void TargetQueues::Loop::close_overdue() {
  const auto now = Clock::now();
  for (auto it = queues_.begin(); it != queues_.end();) {
    const uint64_t id = it->first;
    const bool overdue = it->second->lingering && it->second->close_at <= now;
    ++it;
    if (overdue) close(id);
  }
}

// -- buffers --------------------------------------------------------------------------------------

Buffer TargetQueues::Loop::take_buffer(uint32_t bytes) {
  std::vector<Buffer>& pool = bytes <= kBufferSmall ? small_buffers_ : large_buffers_;
  if (!pool.empty()) {
    Buffer buffer = std::move(pool.back());
    pool.pop_back();
    return buffer;
  }
  const size_t size = bytes <= kBufferSmall ? kBufferSmall : options_.transfer_max;
  return std::make_unique_for_overwrite<std::byte[]>(size);
}

void TargetQueues::Loop::give_buffer(Buffer buffer, uint32_t bytes) {
  const bool small = bytes <= kBufferSmall;
  std::vector<Buffer>& pool = small ? small_buffers_ : large_buffers_;
  // As many as one queue may hold: the rest goes back to the system.
  const size_t size = small ? kBufferSmall : options_.transfer_max;
  if (pool.size() * size < options_.queue_bytes) pool.push_back(std::move(buffer));
}

// -- the whole ------------------------------------------------------------------------------------

class TargetQueues::Shared {
 public:
  explicit Shared(const TargetQueuesOptions& options) : cold_reads(options.readers) {
    for (unsigned i = 0; i < std::max(1u, options.loops); ++i) {
      loops.push_back(std::make_unique<Loop>(options, &cold_reads));
    }
  }
  // Loops give work to readers, and readers give it back.
  ~Shared() { stop(); }
  void stop() {
    for (const auto& loop : loops) loop->stop();
  }

  std::vector<std::unique_ptr<Loop>> loops;
  ColdReads cold_reads;
  std::atomic<size_t> next{0};
};

TargetQueues::TargetQueues(const TargetQueuesOptions& options)
    : shared_(std::make_unique<Shared>(options)) {}
TargetQueues::~TargetQueues() = default;

void TargetQueues::adopt(int fd, const TargetQpairOptions& options,
                         std::shared_ptr<const Exports> exports, uint64_t association,
                         std::span<const std::byte> before) {
  Loop& loop = *shared_->loops[shared_->next++ % shared_->loops.size()];
  loop.adopt({fd, options, std::move(exports), association, {before.begin(), before.end()}});
}

void TargetQueues::close() { shared_->stop(); }

void TargetQueues::drop(uint64_t association) {
  for (const auto& loop : shared_->loops) loop->drop(association);
}

TargetFigures TargetQueues::figures() const {
  TargetFigures figures;
  for (const auto& loop : shared_->loops) loop->add_figures(&figures);
  return figures;
}

}  // namespace headrace::fabric
