// Host: one association with a controller: connect, enable, identify, open queues, keep alive: the
// control path of an initiator, for programs without Python. The same steps as
// src/headrace/fabric/host.py; no DH-HMAC-CHAP: a controller that asks for it is refused in words.
//
// It belongs to one thread. Everything throws HostError.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fabric/address.h"
#include "fabric/control_queue.h"
#include "fabric/initiator.h"

namespace headrace::fabric {

struct HostIdentity {
  std::string nqn;
  std::array<uint8_t, 16> id{};
  // What is the same on this machine after every start, and for headrace in Python.
  static HostIdentity of_machine();
};

struct HostOptions {
  HostIdentity identity;
  uint8_t dgst = kDgstHeader | kDgstData;  // offered
  uint16_t entries = 128;                  // of an I/O queue
  uint32_t kato_ms = 15'000;
  double timeout_s = 10;
  int stop_fd = -1;
};

struct ConnectedQueue {
  int fd = -1;  // whoever takes it closes it
  QpairOptions options;
};

class Host {
 public:
  Host(const FabricAddress& address, const HostOptions& options);

  // Largest read of one command, in bytes.
  uint32_t transfer_max() const { return transfer_max_; }
  // A namespace as a whole.
  NamespaceGeometry geometry(uint32_t nsid);
  // I/O queues 1 to `count`, or as many as the controller grants.
  std::vector<ConnectedQueue> open_queues(unsigned count);
  void keep_alive();
  // Shuts the controller down in order, if it still answers.
  void shut_down() noexcept;

 private:
  Completion connect(ControlQueue* queue, uint16_t qid, uint16_t entries);
  void enable();
  std::vector<std::byte> identify(uint8_t cns, uint32_t nsid);
  uint64_t get(uint32_t offset, bool wide);
  void set(uint32_t offset, uint64_t value);
  ConnectedQueue open_queue(uint16_t qid);
  ControlQueue::Options queue_options(bool admin) const;

  const FabricAddress address_;
  const HostOptions options_;
  std::unique_ptr<ControlQueue> admin_;
  uint16_t cntlid_ = 0xFFFF;
  uint64_t cap_ = 0;
  uint16_t maxcmd_ = 0;
  uint32_t transfer_max_ = 0;
};

}  // namespace headrace::fabric
