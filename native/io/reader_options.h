// ReaderOptions: how batches are read. None of it changes what is delivered.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "core/arena.h"
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
  // Batches lie in memory that other processes may map: see `Arena`.
  Memory buffers = Memory::kPrivate;
  // A gap up to this many bytes between two extents is read rather than skipped: on an NVMe device
  // a request costs about as much as 16 KiB of bandwidth.
  uint64_t coalesce_gap_bytes = 16 << 10;
  // Runs are cut into requests of at most this size.
  uint64_t request_bytes_max = 512 << 10;
  // Remote volumes: no gap above this is read, however much room the next bound leaves. At the
  // 80 MB/s that a connection moves it is 1.6 ms, a fraction of the 10 to 100 ms of a request.
  uint64_t remote_gap_bytes = 128 << 10;
  // Up to this a gap costs no more than the heads of the request and the answer that it saves.
  uint64_t remote_free_gap_bytes = 4 << 10;
  // The other gaps that are read through in a batch are at most this share of the bytes it wants:
  // reads of remote volumes in random order fetched 3.2 times their bytes when every gap under 1
  // MiB was read. Zero: none of them is.
  double remote_overshoot = 0.25;
  uint64_t remote_request_bytes_max = 8 << 20;
  // A remote read that has no answer so long after its batch was begun is given up (ETIMEDOUT).
  double remote_deadline_s = 300;
  // What reads remote volumes. Null: the catalog's.
  std::shared_ptr<RemoteEngine> remote = nullptr;
  // Makes the engine instead of `engine`: tests hand over one that fails.
  std::function<std::unique_ptr<Engine>(const EngineOptions&)> make_engine = nullptr;
  // An eventfd that is rung whenever a batch is done, for who waits for many. The reader keeps a
  // duplicate. -1: none.
  int done_fd = -1;
  // Every read takes as long as this model says, and nothing is gathered from the page cache.
  std::shared_ptr<SlowModel> slow = nullptr;
};

}  // namespace headrace::io
