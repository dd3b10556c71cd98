// The plane as one process sees it: the board and the ring of the epoch that the run page names.
//
// Found at the first call that asks, again when the epoch changes, and given up when nobody of this
// process is inside. Works in threads, in signal handlers, after fork and in a child of vfork: a
// call that cannot have the plane at once goes without it.
#pragma once

#include <atomic>
#include <cstdint>

#include "preload/board_view.h"
#include "preload/ring_layout.h"
#include "preload/shim_calls.h"
#include "preload/slow_state.h"

namespace headrace::preload::shim {

struct Plane {
  BoardView board;
  void* board_memory = nullptr;
  uint64_t board_nbytes = 0;
  void* ring = nullptr;
  uint64_t ring_nbytes = 0;
  uint64_t ring_capacity = 0;
  uint32_t process = 0;  // the daemon
  std::atomic<uint32_t> users{0};

  void report(int64_t file, Opened what) const;
  // The user's word that nothing changes, where paths lead where they do for the launcher.
  bool immutable() const;
};

// The plane, held while it lives; none when there is no daemon, no run, or no way to find out.
class Held {
 public:
  Held();
  ~Held() {
    if (plane_ != nullptr) plane_->users.fetch_sub(1, std::memory_order_release);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  explicit operator bool() const { return plane_ != nullptr; }
  const Plane* operator->() const { return plane_; }
  const Plane& operator*() const { return *plane_; }

 private:
  Plane* plane_;
};

// Paths lead elsewhere from now on: nothing is known of them without a look.
void look_elsewhere();

// Waits as long as the simulated storage takes to give a whole file of `bytes`; returns at once
// where none is simulated.
void simulate_whole_file(uint64_t bytes);
bool simulating();

}  // namespace headrace::preload::shim
