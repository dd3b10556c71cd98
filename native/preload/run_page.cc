#include "preload/run_page.h"

namespace headrace::preload {

RunPageWriter::RunPageWriter(int slow_fd, uint64_t slow_inode)
    : memory_("headrace-run", sizeof(RunPage), SharedMemory::Others::kReadOnly) {
  page().version = kRunVersion;
  page().slow_fd = slow_fd < 0 ? ~uint32_t{0} : static_cast<uint32_t>(slow_fd);
  page().slow_inode = slow_inode;
  page().magic = kRunMagic;
}

void RunPageWriter::publish(uint32_t process, int board_fd, uint64_t board_inode, int ring_fd,
                            uint64_t ring_inode) {
  RunPage& p = page();
  const uint32_t epoch = p.epoch.load(std::memory_order_relaxed);
  p.epoch.store(epoch + 1, std::memory_order_relaxed);
  p.process.store(process, std::memory_order_release);
  p.board_fd.store(static_cast<uint32_t>(board_fd), std::memory_order_release);
  p.ring_fd.store(static_cast<uint32_t>(ring_fd), std::memory_order_release);
  p.board_inode.store(board_inode, std::memory_order_release);
  p.ring_inode.store(ring_inode, std::memory_order_release);
  p.epoch.store(epoch + 2, std::memory_order_release);
}

}  // namespace headrace::preload
