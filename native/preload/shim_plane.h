// The plane as one process sees it: the board and the ring of the epoch that the run page names.
//
// Found at the first call that asks, and again when the epoch changes. Earlier ones stay mapped for
// a while: copies that were opened by them may be open still. Works in threads, in signal handlers,
// after fork and in a child of vfork: a call that cannot have the plane at once goes without it.
#pragma once

#include <atomic>
#include <cstdint>

#include "preload/board_view.h"
#include "preload/ring_layout.h"
#include "preload/shim_calls.h"
#include "preload/slow_state.h"

namespace headrace::preload::shim {

constexpr uint32_t kNotMapped = uint32_t{1} << 31;  // of a plane's users

struct Plane {
  BoardView board;
  void* board_memory = nullptr;
  uint64_t board_nbytes = 0;
  uint64_t board_inode = 0;
  void* ring = nullptr;
  uint64_t ring_nbytes = 0;
  uint64_t ring_inode = 0;
  uint64_t ring_capacity = 0;
  uint32_t process = 0;  // the daemon
  std::atomic<uint32_t> users{kNotMapped};

  // False: it is not mapped, or just being unmapped.
  bool enter();
  void leave() { users.fetch_sub(1, std::memory_order_release); }
  void report(int64_t file, Opened what) const;
  // The user's word that nothing changes, where paths lead where they do for the launcher.
  bool immutable() const;
};

// The plane, held while it lives; none when there is no daemon, no run, or no way to find out.
class Held {
 public:
  Held();
  ~Held() {
    if (plane_ != nullptr) plane_->leave();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  explicit operator bool() const { return plane_ != nullptr; }
  const Plane* operator->() const { return plane_; }
  const Plane& operator*() const { return *plane_; }

 protected:
  explicit Held(Plane* plane) : plane_(plane) {}
  Plane* plane_;
};

// A copy that somebody has open, known by its identity, and the plane that placed it, held: also
// one whose daemon or board is gone. None (false): that is no copy.
class OpenCopy : public Held {
 public:
  OpenCopy(uint64_t device, uint64_t inode);
  const BoardFile& file() const { return plane_->board.file(number_); }
  // The original's path; null: its entry makes no sense.
  const char* name(uint32_t* bytes) const { return plane_->board.name(number_, bytes); }
  // Whether there is any: none where all files lie on a local disk.
  static bool possible();

 private:
  int64_t number_ = -1;
};

// Paths lead elsewhere from now on: nothing is known of them without a look.
void look_elsewhere();

// Waits as long as the simulated storage takes to give a whole file of `bytes`; returns at once
// where none is simulated.
void simulate_whole_file(uint64_t bytes);
bool simulating();

}  // namespace headrace::preload::shim
