// RegisteredBuffers: the arena's buffers, by id, and which slot of the ring's table holds each.
//
// Remembers what should be registered and applies it to a ring when it is told to, since only the
// ring's own thread may, and a new ring begins with an empty table. A buffer that has no slot left,
// or that the kernel will not pin, is simply not registered. Owns no memory.
//
// Invariant: `slot_for` names only memory that the current ring has pinned under that id.
#pragma once

#if HEADRACE_HAVE_URING
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "io/ring.h"

namespace headrace::io {

class RegisteredBuffers {
 public:
  static constexpr int kNone = -1;

  void know(uint64_t id, std::span<std::byte> memory) {
    forget(id);
    for (Entry& entry : entries_) {
      if (entry.id != 0) continue;
      entry.id = id;
      entry.memory = memory;
      entry.state = State::kToSet;
      changed_ = true;
      return;
    }
  }

  void forget(uint64_t id) {
    if (id == 0) return;
    for (Entry& entry : entries_) {
      if (entry.id != id) continue;
      entry.id = 0;
      entry.memory = {};
      entry.state = entry.pinned ? State::kToClear : State::kSettled;
      changed_ = true;
    }
    last_ = kNone;
  }

  // A new ring has an empty table.
  void moved_to_new_ring() {
    for (Entry& entry : entries_) {
      entry.pinned = false;
      entry.state = entry.id != 0 ? State::kToSet : State::kSettled;
    }
    changed_ = true;
  }

  void apply(Ring& ring) {
    if (!changed_) return;
    changed_ = false;
    for (unsigned slot = 0; slot < entries_.size(); ++slot) {
      Entry& entry = entries_[slot];
      if (entry.state == State::kSettled) continue;
      if (entry.pinned) ring.clear_buffer(slot);
      entry.pinned = entry.state == State::kToSet && ring.set_buffer(slot, entry.memory);
      entry.state = State::kSettled;
    }
  }

  // The table's slot that holds all of [dest, dest + length), or kNone. A batch reads into one
  // buffer, so the last answer is nearly always right.
  int slot_for(uint64_t id, const std::byte* dest, size_t length) {
    if (id == 0) return kNone;
    if (last_ == kNone || entries_[last_].id != id) {
      const auto found = std::find_if(entries_.begin(), entries_.end(),
                                      [id](const Entry& entry) { return entry.id == id; });
      if (found == entries_.end()) return kNone;
      last_ = static_cast<int>(found - entries_.begin());
    }
    const Entry& entry = entries_[last_];
    const bool inside = dest >= entry.memory.data() && length <= entry.memory.size() &&
                        dest + length <= entry.memory.data() + entry.memory.size();
    return entry.pinned && inside ? last_ : kNone;
  }

 private:
  enum class State { kSettled, kToSet, kToClear };
  struct Entry {
    uint64_t id = 0;
    std::span<std::byte> memory;
    bool pinned = false;  // the ring's table holds it
    State state = State::kSettled;
  };
  std::array<Entry, Ring::kBuffersMax> entries_;
  int last_ = kNone;
  bool changed_ = false;
};

}  // namespace headrace::io
#endif
