// ReaderOptions: how batches are read. None of it changes what is delivered.
#pragma once

#include <cstdint>

#include "io/engine.h"

namespace headrace::io {

enum class EngineChoice { kAuto, kUring, kThreads, kMmap };
enum class DirectReads { kAuto, kAlways, kNever };

struct ReaderOptions {
  EngineChoice engine = EngineChoice::kAuto;
  DirectReads direct = DirectReads::kAuto;
  EngineOptions engine_options;  // the reader sets `in_flight`
  // Workers at first. More are started when `reads_in_flight` cannot be reached with them.
  unsigned workers = 2;
  // Reads in flight of all workers together. 0: each worker's engine as many as its own depth.
  unsigned reads_in_flight = 0;
  uint64_t budget_bytes = 64 << 20;
  bool verify = true;
  // A gap up to this many bytes between two extents is read rather than skipped: on an NVMe device
  // a request costs about as much as 16 KiB of bandwidth.
  uint64_t coalesce_gap_bytes = 16 << 10;
  // Runs are cut into requests of at most this size.
  uint64_t request_bytes_max = 512 << 10;
};

}  // namespace headrace::io
