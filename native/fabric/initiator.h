// Initiator: reads ranges of NVMe/TCP namespaces over connected queue pairs; a RemoteEngine.
//
// A few threads (InitiatorLoop) move the bytes, each of some queues of all targets. Ranges are cut
// into commands of at most the target's transfer size (read_pieces.h), wait in one place (Backlog),
// and go to whichever queue of their target has room. Data goes straight to the requests' memory: a
// range need not be whole blocks, what lies around it in the first and last block is dropped on the
// way.
//
// Connections are made elsewhere (the control path): `attach` brings a queue that has passed
// Connect, `take_lost` says which ended and why, and `lost_event` becomes readable then. What was
// in flight on a lost queue is read again on another; while a target has none, its reads wait for
// `attach` until their deadline, and fail at once with EHOSTDOWN when it has had none for so long.
// Nothing is lost by reading twice: namespaces are read-only.
//
// Thread-safe. A forked child has neither the threads nor a right to the sockets: there, reads fail
// with ECANCELED, and nothing is closed.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/initiator_figures.h"
#include "fabric/lost_queues.h"
#include "fabric/qpair.h"
#include "fabric/read_pieces.h"
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
  // Threads; a target's queues are spread over them. Copying out of a socket takes a core for each
  // 3 to 4 GB/s.
  unsigned loops = 2;
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
  struct Parts;
  bool foreign() const;
  const pid_t owner_pid_;
  std::unique_ptr<Parts> parts_;
};

}  // namespace headrace::fabric
