// ReaderOptions: how batches are read. None of it changes what is delivered.
#pragma once

#include <cstdint>
#include <memory>

#include "io/engine.h"
#include "io/remote_engine.h"
#include "io/slow_model.h"

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
  // The same for remote volumes: a request to an object store costs 10 to 100 ms and money, and a
  // connection moves some 80 MB/s.
  uint64_t remote_gap_bytes = 1 << 20;
  uint64_t remote_request_bytes_max = 8 << 20;
  // A remote read that has no answer so long after its batch was begun is given up (ETIMEDOUT).
  double remote_deadline_s = 300;
  // What reads remote volumes. Null: the catalog's.
  std::shared_ptr<RemoteEngine> remote = nullptr;
  // Every read takes as long as this model says, and nothing is gathered from the page cache.
  std::shared_ptr<SlowModel> slow = nullptr;
};

}  // namespace headrace::io
