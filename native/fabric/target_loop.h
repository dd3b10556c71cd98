// TargetLoop: a thread that serves some of a target's I/O queues.
//
// Answers commands in the order in which their data is there, and sends as it answers, so that what
// was read is still in the processor's cache when it is copied into the socket. A large read of
// what lies in the page cache is not copied at all: it goes from there to the socket (sendfile).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fabric/cold_reads.h"
#include "fabric/poller.h"
#include "fabric/target_queues.h"
#include "fabric/tqpair.h"

namespace headrace::fabric {

class TargetLoop {
 public:
  TargetLoop(const TargetQueuesOptions& options, ColdReads* cold_reads);
  ~TargetLoop();
  TargetLoop(const TargetLoop&) = delete;
  TargetLoop& operator=(const TargetLoop&) = delete;

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
  struct Held;
  struct Queue;

  void run();
  void take_inbox();
  void open(Adopted adopted);
  void close(uint64_t id);
  void handle(uint64_t id, uint32_t events);
  void serve(uint64_t id, Queue* queue);
  void answer(uint64_t id, Queue* queue, const TargetCommand& command);
  bool answer_uncopied(Queue* queue, uint16_t cid, const Judgement& range);
  void answer_read(Queue* queue, uint16_t cid, const Judgement& range, Buffer buffer, int error);
  bool send(uint64_t id, Queue* queue);
  void linger(Queue* queue);
  void listen(uint64_t id, Queue* queue, bool to_write);
  void close_overdue();
  Buffer take_buffer(uint32_t bytes);
  void give_back(Held* held);
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
  const std::unique_ptr<std::byte[]> scratch_;
  std::vector<TargetCommand> commands_;
  std::vector<uint16_t> released_;

  struct Counters {
    std::atomic<uint64_t> queues, reads, bytes, reads_cold, reads_uncopied, refused, read_errors,
        faults, digest_errors;
  } counters_{};
  std::thread thread_;
};

}  // namespace headrace::fabric
