// Exports: the namespaces that a target's queues read from, and what a read of one answers.
//
// A namespace is a file or block device, opened read-only by whoever adds it and kept open until
// its last read is done, also after `remove`. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "fabric/command.h"

namespace headrace::fabric {

struct Export {
  Export(int fd, int direct_fd, uint64_t bytes, uint32_t block_bytes)
      : fd(fd), direct_fd(direct_fd), bytes(bytes), block_bytes(block_bytes) {}
  ~Export();
  Export(const Export&) = delete;
  Export& operator=(const Export&) = delete;

  const int fd;
  const int direct_fd;   // the same with O_DIRECT; -1 where that cannot be had
  const uint64_t bytes;  // the last block is filled up with zeros
  const uint32_t block_bytes;
  // What lies behind is not there yet: reads of it are answered with kUnwrittenBlock.
  mutable std::atomic<uint64_t> written = UINT64_MAX;
};

// Shared from itself, so that bindings hand loops a pointer that needs no interpreter.
class Exports : public std::enable_shared_from_this<Exports> {
 public:
  // Keeps a duplicate of `fd`. Throws Error(kInvalidArgument) for an NSID that is taken.
  void add(uint32_t nsid, int fd, uint64_t bytes, uint32_t block_bytes);
  void remove(uint32_t nsid);
  // Only the first `bytes` of a namespace are there, until the next call. Throws
  // Error(kInvalidArgument) for an NSID that is not exported.
  void set_written(uint32_t nsid, uint64_t bytes);
  std::shared_ptr<const Export> find(uint32_t nsid) const;
  // Of all namespaces together.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  mutable std::mutex mutex_;
  std::map<uint32_t, std::shared_ptr<const Export>> exports_;
  std::atomic<uint64_t> bytes_ = 0;
};

// What an I/O command comes to before any byte is read: a status, or a range of a namespace.
struct Judgement {
  uint16_t status = kSuccess;
  std::shared_ptr<const Export> source;  // of a Read that is right
  uint64_t offset = 0;
  uint32_t bytes = 0;
};
// `transfer_max`: MDTS in bytes.
Judgement judge_command(const Sqe& sqe, const Exports& exports, uint32_t transfer_max);

}  // namespace headrace::fabric
