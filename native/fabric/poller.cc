#include "fabric/poller.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace headrace::fabric {

Poller::Poller(const char* whose)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event wanted{.events = EPOLLIN, .data = {.u64 = kWoken}};
  if (epoll_ >= 0 && event_ >= 0 && ::epoll_ctl(epoll_, EPOLL_CTL_ADD, event_, &wanted) == 0)
    return;
  const int error = errno;
  if (event_ >= 0) ::close(event_);
  if (epoll_ >= 0) ::close(epoll_);
  throw std::system_error(error, std::generic_category(), whose);
}

Poller::~Poller() {
  ::close(event_);
  ::close(epoll_);
}

bool Poller::add(int fd, uint64_t id) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  epoll_event wanted{.events = EPOLLIN, .data = {.u64 = id}};
  return ::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &wanted) == 0;
}

void Poller::listen(int fd, uint64_t id, bool to_write) {
  epoll_event wanted{.events = EPOLLIN | (to_write ? uint32_t{EPOLLOUT} : 0u), .data = {.u64 = id}};
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, fd, &wanted);
}

void Poller::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(event_, &one, sizeof(one));
}

std::span<const epoll_event> Poller::wait(int timeout_ms) {
  const int count = ::epoll_wait(epoll_, ready_.data(), ready_.size(), timeout_ms);
  const std::span<const epoll_event> ready(ready_.data(),
                                           count > 0 ? static_cast<size_t>(count) : 0);
  for (const epoll_event& event : ready) {
    uint64_t ignored;
    if (event.data.u64 != kWoken) continue;
    [[maybe_unused]] const ssize_t read = ::read(event_, &ignored, sizeof(ignored));
  }
  return ready;
}

}  // namespace headrace::fabric
