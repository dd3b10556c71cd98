#include "fabric/lost_queues.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace headrace::fabric {

LostQueues::LostQueues() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_ < 0) throw std::system_error(errno, std::generic_category(), "NVMe/TCP initiator");
}

LostQueues::~LostQueues() { ::close(event_); }

void LostQueues::put(LostQueue lost) {
  {
    const std::lock_guard lock(mutex_);
    lost_.push_back(std::move(lost));
  }
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(event_, &one, sizeof(one));
}

std::vector<LostQueue> LostQueues::take() {
  uint64_t ignored;
  [[maybe_unused]] const ssize_t read = ::read(event_, &ignored, sizeof(ignored));
  const std::lock_guard lock(mutex_);
  return std::exchange(lost_, {});
}

}  // namespace headrace::fabric
