// InitiatorLoop: a thread that moves the bytes of some queues of an initiator.
//
// Takes pieces from the backlog as its queues have room, sends the commands of a turn together, and
// tells what became of them at the turn's end. A queue belongs to one loop for its life; what was
// in flight on one that is lost goes back to the backlog.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fabric/answers.h"
#include "fabric/backlog.h"
#include "fabric/lost_queues.h"
#include "fabric/poller.h"
#include "fabric/qpair.h"

namespace headrace::fabric {

struct LoopOptions {
  double command_timeout_s = 10;
  unsigned attempts = 5;
};

// A socket after Connect, and what was agreed there.
struct Attached {
  uint64_t target = 0;
  uint16_t label = 0;
  int fd = -1;
  QpairOptions options;
};

class InitiatorLoop {
 public:
  InitiatorLoop(const LoopOptions& options, Backlog* backlog, LostQueues* lost,
                InitiatorCounters* counters);
  ~InitiatorLoop();
  InitiatorLoop(const InitiatorLoop&) = delete;
  InitiatorLoop& operator=(const InitiatorLoop&) = delete;

  // When all loops are known to the backlog. The rest may be called from any thread.
  void start();
  // Takes the socket over.
  void attach(const Attached& attached);
  // Commands in flight from now on.
  void turn(unsigned depth) { depth_ = depth; }
  // Ends the thread; what is in flight goes back to the backlog.
  void stop();

 private:
  struct Queue;

  void run();
  void take_inbox();
  void open(const Attached& attached);
  void pump();
  void pump_target(uint64_t target, const std::vector<Queue*>& queues);
  void submit(Queue* queue, Piece piece);
  void handle(uint64_t id, uint32_t events);
  void settle(Queue* queue);
  void complete(Queue* queue, const Completion& completion);
  void again(uint64_t target, Piece piece, int error, bool counts);
  void lose(Queue* queue, std::string reason);
  void listen(Queue* queue, bool to_write);
  void keep_time();
  int timeout_ms() const;

  const LoopOptions options_;
  Backlog* const backlog_;
  LostQueues* const lost_;
  InitiatorCounters* const counters_;
  Poller poller_{"NVMe/TCP initiator"};
  const unsigned number_;
  std::atomic<unsigned> depth_ = 1;
  std::atomic<bool> stopping_ = false;
  std::mutex mutex_;
  std::vector<Attached> attached_;

  // The thread's own.
  std::map<uint64_t, std::unique_ptr<Queue>> queues_;
  std::map<uint64_t, std::vector<Queue*>> by_target_;
  uint64_t ids_ = 0;
  unsigned in_flight_ = 0;
  bool backlog_waits_ = false;
  int64_t now_ns_ = 0;  // when the turn began
  int64_t kept_time_ns_ = 0;
  Answers answers_;
  std::vector<Piece> taken_;
  std::vector<Completion> completions_;
  std::thread thread_;
};

}  // namespace headrace::fabric
