// ControlQueue: a host's side of one connection while it carries control commands: connects, and
// has one command answered at a time, each within a deadline. An I/O queue is connected here too
// and then handed over (`detach`) to the data path.
//
// The protocol is the Qpair's; this is the socket and the clock. It belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/error.h"
#include "fabric/qpair.h"

namespace headrace::fabric {

// A target that cannot be reached, refuses, or breaks the protocol.
class HostError : public Error {
 public:
  explicit HostError(const std::string& message, int system_errno = 0, bool unsupported = false)
      : Error(ErrorKind::kVolume, message, {}, -1, system_errno), unsupported(unsupported) {}
  const bool unsupported;  // it asks for something that this host does not speak
};

class ControlQueue {
 public:
  struct Options {
    std::string host;
    uint16_t port = 4420;
    bool admin = true;
    uint8_t dgst = 0;  // offered
    double timeout_s = 10;
    int stop_fd = -1;  // readable: give everything up
  };
  static constexpr uint32_t kDataMax = 4096;
  static constexpr uint32_t kCapsuleDataMax = 8192;

  // Connects and exchanges ICReq and ICResp. Everything throws HostError.
  explicit ControlQueue(const Options& options);
  ~ControlQueue();
  ControlQueue(const ControlQueue&) = delete;
  ControlQueue& operator=(const ControlQueue&) = delete;

  // Sends a command with `data` in its capsule, and waits until it is answered and `dest` filled.
  // `what` names it in errors.
  Completion command(Sqe sqe, std::span<const std::byte> data, std::span<std::byte> dest,
                     const std::string& what);
  // Hands the socket over; nothing else may be called afterwards.
  int detach();
  uint8_t dgst() const { return qpair_.options().dgst; }
  uint8_t cpda() const { return qpair_.options().cpda; }
  const std::string& name() const { return name_; }

 private:
  void connect();
  void exchange(int64_t deadline_ns, const std::string& what);
  void wait(short events, int64_t deadline_ns, const std::string& what);
  [[noreturn]] void fail(const std::string& why, int error = 0) const;

  const Options options_;
  const std::string name_;
  int fd_ = -1;
  Qpair qpair_;
};

}  // namespace headrace::fabric
