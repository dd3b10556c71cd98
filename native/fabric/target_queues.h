// TargetQueues: the threads that serve a target's I/O queues.
//
// Takes over connected sockets after Connect. Each queue belongs to one loop thread; what lies in
// the page cache is read there at once (RWF_NOWAIT), anything else by a pool of threads that may
// block. Answers go out in the order in which they are ready.
//
// Memory: a queue has at most `queue_bytes` of data read and not sent (one command may exceed it);
// commands beyond it wait. A queue that broke the protocol gets its TermReq and is closed within
// `kLingerSeconds`.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fabric/exports.h"
#include "fabric/tqpair.h"

namespace headrace::fabric {

inline constexpr double kLingerSeconds = 1.0;

struct TargetQueuesOptions {
  unsigned loops = 1;               // one saturates what one core can copy into sockets
  unsigned readers = 16;            // reads of what is not in the page cache: the disk's depth
  uint32_t transfer_max = 1 << 20;  // MDTS in bytes
  uint64_t queue_bytes = 4 << 20;
  // Exports that are larger together do not stay in the page cache: what is not there is read past
  // it (O_DIRECT). 0: half of this machine's memory.
  uint64_t cache_bytes = 0;
};

struct TargetFigures {
  uint64_t queues = 0;  // open now
  uint64_t reads = 0;
  uint64_t bytes = 0;
  uint64_t reads_cold = 0;      // not from the page cache
  uint64_t reads_uncopied = 0;  // from the page cache to the socket
  uint64_t refused = 0;         // commands answered with an error
  uint64_t read_errors = 0;     // of the file or device
  uint64_t faults = 0;          // connections that broke the protocol
  uint64_t digest_errors = 0;
};

class TargetQueues {
 public:
  explicit TargetQueues(const TargetQueuesOptions& options);
  ~TargetQueues();  // closes all queues, joins all threads
  TargetQueues(const TargetQueues&) = delete;
  TargetQueues& operator=(const TargetQueues&) = delete;

  // Takes `fd` over, whatever happens. `association` names the queue's group; `before` are bytes
  // that came with Connect. Thread-safe, as all of these.
  void adopt(int fd, const TargetQpairOptions& options, std::shared_ptr<const Exports> exports,
             uint64_t association, std::span<const std::byte> before);
  // Closes all queues and ends the loops; `adopt` closes what it is given from then on.
  void close();
  // Closes the queues of an association, soon.
  void drop(uint64_t association);
  TargetFigures figures() const;

 private:
  class Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace headrace::fabric
