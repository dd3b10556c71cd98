// Initiator: reads ranges of NVMe/TCP namespaces over connected queue pairs; a RemoteEngine.
//
// One thread moves the bytes of all queues of all targets. Ranges are cut into commands of at most
// the target's transfer size, spread over its queues by the room they have, and sent together. Data
// goes straight to the requests' memory: a range need not be whole blocks, what lies around it in
// the first and last block is dropped on the way.
//
// Connections are made elsewhere (the control path): `attach` brings a queue that has passed
// Connect, `take_lost` says which ended and why, and `lost_event` becomes readable then. What was
// in flight on a lost queue is read again on another; while a target has none, its reads wait for
// `attach` until their deadline, and fail at once with EHOSTDOWN when it has had none for so long.
// Nothing is lost by reading twice: namespaces are read-only.
//
// Thread-safe. A forked child has neither the thread nor a right to the sockets: there, reads fail
// with ECANCELED, and nothing is closed.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/qpair.h"
#include "io/remote_engine.h"

namespace headrace::fabric {

struct InitiatorOptions {
  // A command without an answer for so long ends its queue: the target or the way to it is gone.
  double command_timeout_s = 10;
  // A read that cannot be served by then fails with ETIMEDOUT: time to reconnect.
  double read_deadline_s = 60;
  // Commands in flight of all queues together, until `turn`.
  unsigned reads_in_flight = 256;
  // Largest command: beyond, more commands are as fast, and spread over queues.
  uint32_t command_bytes = 256 << 10;
  // Commands of one read may fail with a retryable status, or be lost, so often.
  unsigned attempts = 5;
};

// A volume: a namespace, or a window of one.
struct NamespaceGeometry {
  uint32_t nsid = 0;
  uint32_t block_bytes = 512;
  uint64_t blocks = 0;
  uint64_t first_byte = 0;
  uint64_t bytes = ~uint64_t{0};  // fewer where the namespace ends before
};

struct LostQueue {
  uint64_t target = 0;
  uint16_t label = 0;
  std::string reason;
};

struct InitiatorFigures {
  uint64_t reads = 0;     // finished well
  uint64_t commands = 0;  // sent
  uint64_t bytes = 0;     // that reads brought
  uint64_t retried = 0;   // commands sent again, for whatever reason
  uint64_t digest_errors = 0;
  uint64_t timeouts = 0;
  uint64_t lost_queues = 0;
  uint64_t failed = 0;  // reads
};

class Initiator final : public io::RemoteEngine, public std::enable_shared_from_this<Initiator> {
 public:
  explicit Initiator(const InitiatorOptions& options);
  ~Initiator() override;  // what is not finished fails with ECANCELED

  // A target, and the namespaces that volumes' URLs name.
  uint64_t add_target(uint32_t transfer_max);
  void add_volume(const std::string& url, uint64_t target, const NamespaceGeometry& geometry);
  // Takes `fd` over, whatever happens. `label` names the queue when it is lost.
  void attach(uint64_t target, uint16_t label, int fd, const QpairOptions& options);
  // The target will not come back: its reads fail with this errno value.
  void give_up(uint64_t target, int error);

  std::vector<LostQueue> take_lost();
  int lost_event() const;
  InitiatorFigures figures() const;
  // Ends the thread; later reads fail with ECANCELED.
  void close();

  void read(std::shared_ptr<io::RemoteRequests> requests) override;
  void turn(unsigned reads_in_flight) override;
  std::string name() const override { return "nvme+tcp"; }

 private:
  class Loop;
  bool foreign() const;
  const pid_t owner_pid_;
  std::unique_ptr<Loop> loop_;
};

}  // namespace headrace::fabric
