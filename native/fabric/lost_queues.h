// LostQueues: the list of queues that ended, for the control path, which waits on its event.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace headrace::fabric {

struct LostQueue {
  uint64_t target = 0;
  uint16_t label = 0;
  std::string reason;
};

// Thread-safe.
class LostQueues {
 public:
  LostQueues();  // throws std::system_error
  ~LostQueues();
  LostQueues(const LostQueues&) = delete;
  LostQueues& operator=(const LostQueues&) = delete;

  void put(LostQueue lost);
  std::vector<LostQueue> take();
  // A descriptor that is readable while there are some.
  int event() const { return event_; }

 private:
  const int event_;
  std::mutex mutex_;
  std::vector<LostQueue> lost_;
};

}  // namespace headrace::fabric
