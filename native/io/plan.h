// Plan: how one batch is read: where each slot's bytes lie, how they are reached, and where in the
// buffer they go. Lives as long as its batch is being read.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "io/batch.h"
#include "io/engine.h"

namespace headrace::io {

enum class Route : uint8_t {
  kNone,      // nothing to read: an empty sample or a missing part
  kGather,    // copy from the mapping
  kDirect,    // O_DIRECT, coalesced into runs
  kBuffered,  // through the page cache, coalesced into runs
  kPath,      // open, read, close
  kRemote,    // by the remote engine, coalesced into runs
};

inline bool is_run(Route route) {
  return route == Route::kDirect || route == Route::kBuffered || route == Route::kRemote;
}

// One selected part of one sample.
struct Slot {
  uint64_t offset = 0;  // in the volume
  uint64_t length = 0;
  int64_t mtime_ns = -1;
  uint64_t dest = 0;    // in the buffer
  uint64_t sample = 0;  // within its segment
  uint32_t volume = 0;  // in the catalog
  uint32_t segment = 0;
  uint32_t crc = 0;
  bool has_crc = false;
  Route route = Route::kNone;
  bool ok = true;
  bool timed_out = false;  // a second try would wait as long again
};

// Neighbouring slots of one volume that are read as one range.
struct Run {
  uint32_t volume = 0;
  Route route = Route::kDirect;
  uint64_t begin = 0;  // aligned offsets in the volume
  uint64_t end = 0;
  uint64_t dest = 0;
  uint32_t first = 0;  // positions in Plan::sorted
  uint32_t last = 0;
  std::atomic<uint32_t> requests_left{0};
  std::atomic<int> error{0};
  std::atomic<uint64_t> missing_from{UINT64_MAX};  // volume offset where data ended early

  Run() = default;
  Run(Run&& other) noexcept
      : volume(other.volume),
        route(other.route),
        begin(other.begin),
        end(other.end),
        dest(other.dest),
        first(other.first),
        last(other.last) {}
};

struct Plan {
  std::shared_ptr<Batch> batch;
  std::vector<Range> ranges;  // one per sample where ranges are read, else none
  std::vector<Slot> slots;
  std::vector<uint32_t> sorted;  // slots of the run routes by volume and offset
  std::vector<Run> runs;
  std::vector<Read> gathers;
  std::vector<Read> requests;
  std::vector<Read> remote;       // the same for remote volumes
  std::deque<std::string> paths;  // stable addresses for Read::path
  std::atomic<uint64_t> requests_done{0};
  uint64_t sample_bytes = 0;    // of all slots, counted when the plan was carried out
  uint64_t gathered_bytes = 0;  // of these from the page cache
  uint64_t resident_bytes = 0;  // likewise, of files that were read by their paths
  std::byte* data = nullptr;
};

}  // namespace headrace::io
