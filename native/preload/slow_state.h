// A simulated storage as unmodified programs feel it: the state that all processes of a run share,
// and what an open of a file costs there. docs/preload.md says what is simulated.
//
// Figures and tables are filled in by the launcher. The queues are plain atomics: a process that is
// killed here leaves nothing locked.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace::preload {

inline constexpr uint64_t kSlowMagic = 0x31776f6c'73647268;  // "hrdslow1"
inline constexpr uint32_t kQuantiles = 1024;
inline constexpr uint32_t kServersMax = 4096;
inline constexpr uint64_t kSlowRequestMax = 1 << 20;

struct SlowState {
  uint64_t magic;
  uint64_t seed;
  uint32_t servers;  // 0: unbounded
  uint32_t unused;
  uint64_t link_bytes_per_s;    // 0: unbounded
  uint64_t stream_bytes_per_s;  // 0: unbounded
  // Times in nanoseconds, by how many of a thousand are shorter.
  int64_t open_ns[kQuantiles];
  int64_t read_ns[kQuantiles];
  std::atomic<uint64_t> draws;
  std::atomic<int64_t> link_free_ns;
  std::atomic<int64_t> server_free_ns[kServersMax];
};

inline uint64_t slow_random(SlowState& s) {
  uint64_t z = s.seed + (s.draws.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

// Nanoseconds that `bytes` take; no division by what others may have written as 0.
inline int64_t slow_transfer_ns(uint64_t bytes, uint64_t bytes_per_s) {
  if (bytes_per_s == 0) return 0;
  const unsigned __int128 ns = static_cast<unsigned __int128>(bytes) * 1'000'000'000 / bytes_per_s;
  return ns > INT64_MAX / 4 ? INT64_MAX / 4 : static_cast<int64_t>(ns);
}

// When a request that begins at `now` is done: it waits for a server, then for the link behind all
// earlier transfers, then its latency passes. As SlowModel serves them (native/io/slow_model.h).
inline int64_t slow_serve(SlowState& s, int64_t now, int64_t latency_ns, uint64_t bytes) {
  std::atomic<int64_t>* server = nullptr;
  int64_t start = now;
  const uint32_t servers = s.servers < kServersMax ? s.servers : kServersMax;
  if (servers > 0) {
    // The first that is free; else the one that will be soonest.
    uint32_t soonest = 0;
    for (uint32_t i = 0; i < servers; ++i) {
      const int64_t free_ns = s.server_free_ns[i].load(std::memory_order_relaxed);
      if (free_ns < s.server_free_ns[soonest].load(std::memory_order_relaxed)) soonest = i;
      if (free_ns <= now) break;
    }
    server = &s.server_free_ns[soonest];
    const int64_t free_ns = server->load(std::memory_order_relaxed);
    if (free_ns > start) start = free_ns;
  }
  int64_t sent = start;
  if (const int64_t transfer = slow_transfer_ns(bytes, s.link_bytes_per_s); transfer > 0) {
    int64_t free_ns = s.link_free_ns.load(std::memory_order_relaxed);
    do {
      sent = (free_ns > start ? free_ns : start) + transfer;
    } while (!s.link_free_ns.compare_exchange_weak(free_ns, sent, std::memory_order_relaxed));
  }
  const int64_t streamed = start + slow_transfer_ns(bytes, s.stream_bytes_per_s);
  if (streamed > sent) sent = streamed;
  const int64_t due = sent + latency_ns;
  if (server != nullptr) server->store(due, std::memory_order_relaxed);
  return due;
}

// When a file of `bytes` that is opened at `now` has been read as a whole.
inline int64_t slow_whole_file(SlowState& s, int64_t now, uint64_t bytes) {
  int64_t due = slow_serve(s, now, s.open_ns[slow_random(s) % kQuantiles], 0);
  while (bytes > 0) {
    const uint64_t part = bytes < kSlowRequestMax ? bytes : kSlowRequestMax;
    due = slow_serve(s, due, s.read_ns[slow_random(s) % kQuantiles], part);
    bytes -= part;
  }
  return due;
}

}  // namespace headrace::preload
