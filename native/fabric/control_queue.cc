#include "fabric/control_queue.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "fabric/socket_mover.h"

namespace headrace::fabric {
namespace {

constexpr uint16_t kEntries = 32;

int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

QpairOptions qpair_options(const ControlQueue::Options& options) {
  QpairOptions out;
  out.entries = kEntries;
  out.established = false;
  out.dgst = options.dgst;
  // An I/O queue's answer to Connect may say that flow control is off: then SQHD means nothing.
  out.sq_flow_control = options.admin;
  out.data_max = ControlQueue::kDataMax;
  out.capsule_data_max = ControlQueue::kCapsuleDataMax;
  return out;
}

// The specification's names of what targets refuse hosts with.
std::string status_text(uint16_t status) {
  const uint16_t code = status & 0x7FF;
  static constexpr std::pair<uint16_t, const char*> kNames[] = {
      {0x001, "invalid opcode"},
      {0x002, "invalid field"},
      {0x006, "internal error"},
      {0x00B, "invalid namespace"},
      {0x00C, "command sequence error"},
      {0x018, "host identifier inconsistent"},
      {0x022, "transient transport error"},
      {0x180, "connect incompatible format"},
      {0x181, "connect controller busy"},
      {0x182, "connect invalid parameters"},
      {0x184, "connect invalid host"},
      {0x191, "authentication required"},
  };
  char numbers[40];
  std::snprintf(numbers, sizeof numbers, " (type %d, code 0x%02x)", code >> 8, code & 0xFF);
  for (const auto& [known, name] : kNames) {
    if (known == code) return name + std::string(numbers);
  }
  return "status" + std::string(numbers);
}

}  // namespace

ControlQueue::ControlQueue(const Options& options)
    : options_(options),
      name_("NVMe/TCP target " + options.host + ":" + std::to_string(options.port)),
      qpair_(qpair_options(options)) {
  const int64_t deadline_ns = now_ns() + static_cast<int64_t>(options_.timeout_s * 1e9);
  try {
    connect();
    while (qpair_.state() == Qpair::State::kOpening) exchange(deadline_ns, "ICReq");
    if (qpair_.state() != Qpair::State::kReady) exchange(deadline_ns, "ICReq");
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
}

ControlQueue::~ControlQueue() {
  if (fd_ >= 0) ::close(fd_);
}

int ControlQueue::detach() { return std::exchange(fd_, -1); }

void ControlQueue::fail(const std::string& why, int error) const {
  throw HostError(name_ + ": " + why + ".", error);
}

// Tries the host's addresses one after the other.
void ControlQueue::connect() {
  const int64_t deadline_ns = now_ns() + static_cast<int64_t>(options_.timeout_s * 1e9);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int unknown =
      ::getaddrinfo(options_.host.c_str(), std::to_string(options_.port).c_str(), &hints, &found);
  if (unknown != 0) fail(std::string("its name is not known: ") + ::gai_strerror(unknown));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  int error = EHOSTUNREACH;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    fd_ = ::socket(each->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd_ < 0) fail(strerror(errno), errno);
    error = ::connect(fd_, each->ai_addr, each->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      wait(POLLOUT, deadline_ns, "connecting");
      socklen_t size = sizeof error;
      ::getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) {
      const int one = 1;
      ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      return;
    }
    ::close(std::exchange(fd_, -1));
  }
  fail(std::string(strerror(error)) + ". Is the target running, and the port open", error);
}

void ControlQueue::wait(short events, int64_t deadline_ns, const std::string& what) {
  while (true) {
    const int64_t left_ms = (deadline_ns - now_ns() + 999'999) / 1'000'000;
    if (left_ms <= 0) fail(what + " was not answered in time", ETIMEDOUT);
    pollfd polled[2] = {{fd_, events, 0}, {options_.stop_fd, POLLIN, 0}};
    const int ready = ::poll(polled, 2, static_cast<int>(std::min<int64_t>(left_ms, 1 << 30)));
    if (ready < 0 && errno != EINTR) fail(strerror(errno), errno);
    if (ready <= 0) continue;
    if (polled[1].revents != 0) fail("closing", ECANCELED);
    return;
  }
}

// Sends what is there and takes what comes, once.
void ControlQueue::exchange(int64_t deadline_ns, const std::string& what) {
  const bool sent = transmit(fd_, &qpair_) != Moved::kEnded;
  if (sent && qpair_.state() < Qpair::State::kTerminating) {
    const bool more = qpair_.outgoing_bytes() > 0;
    wait(static_cast<short>(POLLIN | (more ? POLLOUT : 0)), deadline_ns, what);
    if (receive(fd_, &qpair_) != Moved::kEnded && qpair_.state() < Qpair::State::kTerminating) {
      return;
    }
  }
  if (const auto& notice = qpair_.notice()) {
    fail(std::string("ended the connection: ") + name_of(notice->status) + ", " +
             std::to_string(notice->info),
         EPROTO);
  }
  if (qpair_.state() == Qpair::State::kTerminating) {
    const Fault fault = qpair_.fault();
    static_cast<void>(transmit(fd_, &qpair_));
    fail(std::string("broke the protocol: ") + name_of(fault.status) + ": " + fault.what, EPROTO);
  }
  fail("closed the connection", ECONNRESET);
}

Completion ControlQueue::command(Sqe sqe, std::span<const std::byte> data,
                                 std::span<std::byte> dest, const std::string& what) {
  const int64_t deadline_ns = now_ns() + static_cast<int64_t>(options_.timeout_s * 1e9);
  Command command;
  command.sqe = sqe;
  command.sqe.flags = kSglFlags;
  command.sqe.sgl_type = data.empty() ? kSglTransport : kSglInCapsule;
  command.sqe.sgl_length = static_cast<uint32_t>(data.empty() ? dest.size() : data.size());
  command.capsule_data = data;
  command.data_bytes = static_cast<uint32_t>(dest.size());
  command.place = {0, dest};
  if (!qpair_.submit(command)) fail(what + ": the queue is full");
  std::vector<Completion> completions;
  while (true) {
    qpair_.take_completions(&completions);
    if (!completions.empty()) break;
    exchange(deadline_ns, what);
  }
  const Completion& answer = completions.front();
  if (answer.outcome != Outcome::kAnswered) fail(what + ": the connection ended", ECONNRESET);
  if (answer.status != kSuccess) fail(what + " failed: " + status_text(answer.status), EPROTO);
  return answer;
}

}  // namespace headrace::fabric
