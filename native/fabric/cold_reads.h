// ColdReads: threads that read what is not in the page cache, and may block, for the loops of a
// target.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/exports.h"

namespace headrace::fabric {

// Memory of a read, at a page: recycled by its loop, since fresh pages cost more than the copy.
struct FreeBuffer {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Buffer = std::unique_ptr<std::byte[], FreeBuffer>;
Buffer make_buffer(size_t bytes);  // a multiple of kBufferAlignment
inline constexpr size_t kBufferAlignment = 4096;

// Reads a whole range; what lies behind the file's end is zeros. 0 or an errno value.
int read_range(const Export& source, uint64_t offset, std::span<std::byte> dest, int flags);

// The same of a range that is not in the page cache, past it where `direct` and the file allow it.
int read_cold(const Export& source, uint64_t offset, std::span<std::byte> dest, bool direct);

// A read that went to the threads, and came back.
struct ColdRead {
  uint64_t queue = 0;
  uint16_t cid = 0;
  Judgement range;
  Buffer buffer;
  bool direct = false;
  int error = 0;
};

class ColdReads {
 public:
  using Done = std::function<void(ColdRead)>;

  explicit ColdReads(unsigned threads_max);
  ~ColdReads();  // joins them; what waits is dropped
  ColdReads(const ColdReads&) = delete;
  ColdReads& operator=(const ColdReads&) = delete;

  // Threads are made when there is work for them. `done` is called in one of them.
  void put(ColdRead read, Done done);

 private:
  void run();

  const unsigned threads_max_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::pair<ColdRead, Done>> work_;
  size_t idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headrace::fabric
