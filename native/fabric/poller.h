// Poller: what a loop thread waits on: its sockets, by number, and other threads that wake it.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <span>

namespace headrace::fabric {

class Poller {
 public:
  // The event of `wake`; sockets have other numbers.
  static constexpr uint64_t kWoken = 0;

  // Throws std::system_error, with `whose` in its text.
  explicit Poller(const char* whose);
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Makes the socket non-blocking and waits until it can be read. A closed one is gone by itself.
  bool add(int fd, uint64_t id);
  // Waits until it can be read, or written to as well.
  void listen(int fd, uint64_t id, bool to_write);
  // Thread-safe: ends the wait under way, or the next.
  void wake();
  // What is ready, none after `timeout_ms`; -1 waits for ever. Valid until the next call.
  std::span<const epoll_event> wait(int timeout_ms);

 private:
  int epoll_ = -1;
  int event_ = -1;
  std::array<epoll_event, 64> ready_;
};

}  // namespace headrace::fabric
