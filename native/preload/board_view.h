// BoardView: a board as readers see it, who may have been given anything.
//
// `check` holds every offset and count against the size of the mapping, once; what can change later
// (and every offset inside a file's entry) is checked when it is used. No allocation, no exception,
// no lock: it is called inside open(2) of other people's programs, also in signal handlers.
#pragma once

#include <cstdint>

#include "preload/board_layout.h"

namespace headrace::preload {

// A copy that a reader may open: as of generation `generation`.
struct CopyPlace {
  Copy copy;
  uint32_t where;
  uint32_t generation;
  uint64_t device;
  uint64_t inode;
};

class BoardView {
 public:
  // The first `nbytes` of memory at `memory`; false: that is no board.
  bool check(const void* memory, uint64_t nbytes);
  bool valid() const { return base_ != nullptr; }
  const BoardHeader& header() const { return *reinterpret_cast<const BoardHeader*>(base_); }
  bool open() const { return header().closed.load(std::memory_order_relaxed) == 0; }
  bool immutable() const { return (header().flags & kImmutable) != 0; }

  // The file of an absolute path without empty, `.` and `..` parts; -1: none.
  int64_t find(const char* path, uint64_t bytes) const;
  // The number of the root whose spelling `path` begins with; -1: none.
  int root_of(const char* path, uint64_t bytes) const;
  const char* spelled(int root, uint32_t* bytes) const;
  const char* stands(int root, uint32_t* bytes) const;

  const BoardFile& file(int64_t number) const {
    return reinterpret_cast<const BoardFile*>(base_ + header().files_offset)[number];
  }
  // The path on the board; null when the entry makes no sense.
  const char* name(int64_t number, uint32_t* bytes) const;
  // Where the file's copy is, with a generation that `still` can be asked about later.
  CopyPlace place(int64_t number) const;
  bool still(int64_t number, uint32_t generation) const {
    return file(number).generation.load(std::memory_order_acquire) == generation;
  }
  // The path of a copy on a tier, 0-terminated; false when it makes no sense.
  bool tier_path(int64_t number, uint32_t tier, char* out, uint64_t out_bytes) const;

  // Whether copies lie on this device at all.
  bool has_device(uint64_t device) const;
  // Whether a copy was ever placed: files of a local disk have none.
  bool has_copies() const { return header().device_count.load(std::memory_order_relaxed) != 0; }
  // The file whose copy has this identity; -1: none.
  int64_t find_copy(uint64_t device, uint64_t inode) const;

 private:
  bool within(uint64_t offset, uint64_t count, uint64_t size) const;
  const char* text(uint64_t offset, uint32_t bytes) const;

  const char* base_ = nullptr;
  uint64_t nbytes_ = 0;
};

}  // namespace headrace::preload
