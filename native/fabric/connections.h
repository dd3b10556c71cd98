// Connections: an Initiator's targets, kept connected, for programs without Python.
//
// Each target has a thread: it keeps the association alive, and when a queue ends makes the whole
// association anew, with a growing pause, as src/headrace/fabric/engine.py does it. A target that
// is gone for `give_up_s` fails its reads with EHOSTDOWN and is still tried. A namespace that is
// another one when its target comes back is not read: its reads stay failed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "fabric/address.h"
#include "fabric/host.h"
#include "fabric/initiator.h"

namespace headrace::fabric {

struct ConnectionsOptions {
  HostOptions host;  // its stop_fd is set here
  unsigned queues = 2;
  double command_timeout_s = 10;
  double give_up_s = 60;
  double read_deadline_s = 60;
};

class Connections {
 public:
  explicit Connections(const ConnectionsOptions& options);
  ~Connections();  // closes
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Makes a namespace, or a window of it, readable under its URL; connects to the target if no
  // other of its namespaces is open. Returns the bytes that can be read. Throws HostError, and
  // Error(kInvalidArgument) for a URL that is none or a window that leaves the namespace.
  uint64_t open(const std::string& url);
  // The same under another name.
  uint64_t open(const std::string& url, const std::string& name);
  // Every read goes through it.
  const std::shared_ptr<Initiator>& initiator() const { return initiator_; }
  uint64_t reconnects() const;

 private:
  class Peer;
  Peer& peer_of(const FabricAddress& address);
  void watch();

  ConnectionsOptions options_;
  const int owner_pid_;
  int stop_fd_ = -1;
  std::shared_ptr<Initiator> initiator_;
  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Peer>> peers_;  // by FabricAddress::target()
  std::thread watcher_;
};

}  // namespace headrace::fabric
