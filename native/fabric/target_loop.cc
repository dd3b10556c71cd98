#include "fabric/target_loop.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <utility>

#include "core/crc32c.h"
#include "fabric/socket_mover.h"
#include "io/residency.h"
#include "io/thread_signals.h"

namespace headrace::fabric {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBufferSmall = 16 << 10;

// Answers are sent when there are so many bytes of them.
constexpr size_t kSendBytes = 128 << 10;

// From this size on, data goes from the page cache to the socket uncopied: below, the system calls
// that it takes for each read cost more than the copy.
constexpr uint32_t kUncopiedBytesMin = 32 << 10;

// Data is read for its digest in parts that stay in the first-level cache.
constexpr size_t kDigestPart = 32 << 10;

TargetQueuesOptions with_defaults(TargetQueuesOptions options) {
  if (options.cache_bytes == 0) {
    options.cache_bytes = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                          static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) / 2;
  }
  return options;
}

// The checksum of what lies in the page cache. 0, or an errno value: EAGAIN if some does not.
int checksum_cached(const Export& source, uint64_t offset, uint32_t bytes, std::byte* scratch,
                    uint32_t* crc) {
  *crc = 0;
  for (uint32_t at = 0; at < bytes;) {
    const std::span<std::byte> part(scratch, std::min<size_t>(kDigestPart, bytes - at));
    if (const int error = read_range(source, offset + at, part, RWF_NOWAIT)) return error;
    *crc = crc32c(*crc, part.data(), part.size());
    at += static_cast<uint32_t>(part.size());
  }
  return 0;
}

}  // namespace

// What an answer has borrowed: memory, or a file that stays open.
struct TargetLoop::Held {
  uint32_t bytes = 0;
  Buffer buffer;
  std::shared_ptr<const Export> source;
};

struct TargetLoop::Queue {
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
  std::map<uint16_t, Held> held;  // by CID: data that is being sent
  uint64_t bytes = 0;             // read or being read, and not sent
  bool writable_asked = false;
  bool lingering = false;
  // The socket has taken all that it can.
  bool blocked() const { return writable_asked; }
  Clock::time_point close_at{};
};

// -- threads outside ------------------------------------------------------------------------------

TargetLoop::TargetLoop(const TargetQueuesOptions& options, ColdReads* cold_reads)
    : options_(with_defaults(options)),
      cold_reads_(cold_reads),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(kDigestPart)) {
  thread_ = std::thread([this] { run(); });
}

void TargetLoop::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  poller_.wake();
  if (thread_.joinable()) thread_.join();
}

// REQUIRES: stopped.
TargetLoop::~TargetLoop() {
  for (const Adopted& adopted : adopted_) ::close(adopted.fd);
}

void TargetLoop::adopt(Adopted adopted) {
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

void TargetLoop::drop(uint64_t association) {
  {
    const std::lock_guard lock(mutex_);
    dropped_.push_back(association);
  }
  poller_.wake();
}

void TargetLoop::add_figures(TargetFigures* figures) const {
  figures->queues += counters_.queues;
  figures->reads += counters_.reads;
  figures->bytes += counters_.bytes;
  figures->reads_cold += counters_.reads_cold;
  figures->reads_uncopied += counters_.reads_uncopied;
  figures->refused += counters_.refused;
  figures->read_errors += counters_.read_errors;
  figures->faults += counters_.faults;
  figures->digest_errors += counters_.digest_errors;
}

// -- the loop -------------------------------------------------------------------------------------

void TargetLoop::run() {
  io::block_signals();  // SIGPIPE: sendfile cannot be told to raise none
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

int TargetLoop::timeout_ms() const { return lingering_ > 0 ? 100 : -1; }

void TargetLoop::take_inbox() {
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

void TargetLoop::open(Adopted adopted) {
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

void TargetLoop::close(uint64_t id) {
  const auto it = queues_.find(id);
  Queue& queue = *it->second;
  queue.qpair.lost();
  counters_.digest_errors += queue.qpair.digest_errors();
  if (queue.lingering) --lingering_;
  for (auto& [cid, held] : queue.held) give_back(&held);
  queues_.erase(it);
  --counters_.queues;
}

void TargetLoop::handle(uint64_t id, uint32_t events) {
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

// Sends what is there, and answers what can be answered now. What the socket does not take is not
// read either. The queue may be closed afterwards.
void TargetLoop::serve(uint64_t id, Queue* queue) {
  commands_.clear();
  queue->qpair.take_commands(&commands_);
  std::move(commands_.begin(), commands_.end(), std::back_inserter(queue->waiting));
  do {
    if (!send(id, queue)) return;
    while (!queue->waiting.empty() && !queue->blocked() && queue->bytes < options_.queue_bytes &&
           queue->qpair.outgoing_bytes() < kSendBytes) {
      const TargetCommand command = std::move(queue->waiting.front());
      queue->waiting.pop_front();
      answer(id, queue, command);
    }
  } while (queue->qpair.outgoing_bytes() > 0 && !queue->blocked() && !queue->lingering);
}

void TargetLoop::answer(uint64_t id, Queue* queue, const TargetCommand& command) {
  Judgement range = judge_command(command.sqe, *queue->exports, options_.transfer_max);
  const uint16_t cid = command.sqe.cid;
  if (range.source == nullptr) {
    if (range.status != kSuccess) ++counters_.refused;
    queue->qpair.answer(cid, range.status);
    return;
  }
  if (answer_uncopied(queue, cid, range)) return;
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
  const bool direct = queue->exports->bytes() > options_.cache_bytes;
  cold_reads_->put({id, cid, std::move(range), std::move(buffer), direct, 0},
                   [this](ColdRead done) {
                     {
                       const std::lock_guard lock(mutex_);
                       cold_done_.push_back(std::move(done));
                     }
                     poller_.wake();
                   });
}

// False: it is small, or not all in the page cache, or beyond the file's end. The data may change
// between its digest and its sending: then the host finds the digest wrong, and reads again.
bool TargetLoop::answer_uncopied(Queue* queue, uint16_t cid, const Judgement& range) {
  const Export& source = *range.source;
  if (range.bytes < kUncopiedBytesMin || range.bytes > queue->qpair.options().data_pdu_max ||
      range.offset + range.bytes > source.bytes) {
    return false;
  }
  uint32_t crc = 0;
  const bool cached =
      queue->qpair.data_digests()
          ? checksum_cached(source, range.offset, range.bytes, scratch_.get(), &crc) == 0
          : io::resident(source.fd, range.offset, range.bytes);
  if (!cached) return false;
  ++counters_.reads;
  ++counters_.reads_uncopied;
  counters_.bytes += range.bytes;
  queue->bytes += range.bytes;
  queue->held[cid] = {range.bytes, nullptr, range.source};
  queue->qpair.answer_file(cid, {source.fd, range.offset, range.bytes}, crc);
  return true;
}

void TargetLoop::answer_read(Queue* queue, uint16_t cid, const Judgement& range, Buffer buffer,
                             int error) {
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
  queue->held[cid] = {range.bytes, std::move(buffer), nullptr};
  queue->qpair.answer_data(cid, data);
}

// False: the queue was closed.
bool TargetLoop::send(uint64_t id, Queue* queue) {
  const Moved moved = transmit(queue->fd, &queue->qpair);
  released_.clear();
  queue->qpair.take_released(&released_);
  for (const uint16_t cid : released_) {
    const auto it = queue->held.find(cid);
    queue->bytes -= it->second.bytes;
    give_back(&it->second);
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
void TargetLoop::linger(Queue* queue) {
  queue->lingering = true;
  queue->waiting.clear();
  ++lingering_;
  queue->close_at = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(kLingerSeconds));
  ::shutdown(queue->fd, SHUT_WR);
}

void TargetLoop::listen(uint64_t id, Queue* queue, bool to_write) {
  if (queue->lingering) to_write = false;
  if (queue->writable_asked == to_write) return;
  queue->writable_asked = to_write;
  poller_.listen(queue->fd, id, to_write);
}

void TargetLoop::close_overdue() {
  const auto now = Clock::now();
  for (auto it = queues_.begin(); it != queues_.end();) {
    const uint64_t id = it->first;
    const bool overdue = it->second->lingering && it->second->close_at <= now;
    ++it;
    if (overdue) close(id);
  }
}

// -- buffers --------------------------------------------------------------------------------------

Buffer TargetLoop::take_buffer(uint32_t bytes) {
  std::vector<Buffer>& pool = bytes <= kBufferSmall ? small_buffers_ : large_buffers_;
  if (!pool.empty()) {
    Buffer buffer = std::move(pool.back());
    pool.pop_back();
    return buffer;
  }
  const size_t size = bytes <= kBufferSmall ? kBufferSmall : options_.transfer_max;
  return make_buffer(size);
}

void TargetLoop::give_back(Held* held) {
  if (held->buffer != nullptr) give_buffer(std::move(held->buffer), held->bytes);
}

void TargetLoop::give_buffer(Buffer buffer, uint32_t bytes) {
  const bool small = bytes <= kBufferSmall;
  std::vector<Buffer>& pool = small ? small_buffers_ : large_buffers_;
  // As many as one queue may hold: the rest goes back to the system.
  const size_t size = small ? kBufferSmall : options_.transfer_max;
  if (pool.size() * size < options_.queue_bytes) pool.push_back(std::move(buffer));
}

}  // namespace headrace::fabric
