// Socket mover: moves a queue pair's bytes over a connected, non-blocking socket, for the loops of
// both ends. Knows readv and sendmsg, and nothing of what the bytes mean.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstddef>

namespace headrace::fabric {

enum class Moved {
  kAll,      // nothing is left to move
  kBlocked,  // the socket takes or has no more now
  kMore,     // stopped for fairness: more may be there
  kEnded,    // the peer closed, or the socket failed
};

// So that one busy connection does not keep its loop from the others.
inline constexpr int kReadsPerTurn = 16;
inline constexpr size_t kPartsPerSend = 64;

template <class Queue>
Moved receive(int fd, Queue* queue) {
  for (int i = 0; i < kReadsPerTurn; ++i) {
    const auto wanted = queue->want();
    iovec parts[2];
    int used = 0;
    size_t room = 0;
    for (const auto& part : wanted) {
      if (part.empty()) continue;
      parts[used++] = {part.data(), part.size()};
      room += part.size();
    }
    const ssize_t count = ::readv(fd, parts, used);
    if (count == 0) return Moved::kEnded;
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN ? Moved::kBlocked : Moved::kEnded;
    }
    queue->advance(static_cast<size_t>(count));
    // A short read has emptied the socket: the next would only say so.
    if (static_cast<size_t>(count) < room) return Moved::kBlocked;
  }
  return Moved::kMore;
}

template <class Queue>
Moved transmit(int fd, Queue* queue) {
  std::array<iovec, kPartsPerSend> parts;
  while (queue->outgoing_bytes() > 0) {
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = queue->outgoing(parts);
    const ssize_t count = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN ? Moved::kBlocked : Moved::kEnded;
    }
    queue->sent(static_cast<size_t>(count));
  }
  return Moved::kAll;
}

}  // namespace headrace::fabric
