// Socket mover: moves a queue pair's bytes over a connected, non-blocking socket, for the loops of
// both ends. Knows readv, sendmsg and sendfile, and nothing of what the bytes mean.
#pragma once

#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <span>

#include "fabric/outgoing.h"

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

// Payload that lies in a file goes from the page cache to the socket uncopied. 0: the file has
// shrunk, and what was promised cannot be sent.
inline ssize_t send_file(int fd, const FileRange& range) {
  auto offset = static_cast<off_t>(range.offset);
  return ::sendfile(fd, range.fd, &offset, range.bytes);
}

template <class Queue>
ssize_t send_some(int fd, const Queue& queue) {
  if constexpr (requires { queue.outgoing_file(); }) {
    if (const FileRange file = queue.outgoing_file(); file.bytes > 0) return send_file(fd, file);
  }
  std::array<iovec, kPartsPerSend> parts;
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = queue.outgoing(parts);
  size_t bytes = 0;
  for (const iovec& part : std::span(parts).first(message.msg_iovlen)) bytes += part.iov_len;
  // What follows at once shall not begin a segment of its own.
  const int more = bytes < queue.outgoing_bytes() ? MSG_MORE : 0;
  return ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT | more);
}

// REQUIRES: SIGPIPE blocked or ignored, where payload may lie in files.
template <class Queue>
Moved transmit(int fd, Queue* queue) {
  while (queue->outgoing_bytes() > 0) {
    const ssize_t count = send_some(fd, *queue);
    if (count == 0) return Moved::kEnded;
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN ? Moved::kBlocked : Moved::kEnded;
    }
    queue->sent(static_cast<size_t>(count));
  }
  return Moved::kAll;
}

}  // namespace headrace::fabric
