// The run page: where the programs of one `headrace run` find the board and the ring, as it lies in
// shared memory. Written by the launcher alone; programs find it by HEADRACE_RUN in their
// environment: "/proc/LAUNCHER/fd/N:INODE".
//
// It outlives daemons: when one dies the launcher says so here, and again when another serves. Each
// change raises the epoch, so that programs need not look further than that.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace::preload {

inline constexpr uint64_t kRunMagic = 0x31706e75'72726468;  // "hdrrunp1"
inline constexpr uint32_t kRunVersion = 1;

struct RunPage {
  uint64_t magic;
  uint32_t version;
  // The simulated storage's state: descriptor of the launcher; ~0: none is simulated.
  uint32_t slow_fd;
  uint64_t slow_inode;
  std::atomic<uint32_t> epoch;     // of what follows; odd: being written
  std::atomic<uint32_t> process;   // whose descriptors the board's copies are; 0: no board
  std::atomic<uint32_t> board_fd;  // descriptors of the launcher
  std::atomic<uint32_t> ring_fd;
  std::atomic<uint64_t> board_inode;
  std::atomic<uint64_t> ring_inode;
};

}  // namespace headrace::preload
