// Ring: one io_uring and its table of registered buffers. Knows nothing of reads.
//
// Set up with the best flags that the kernel takes and proven by a real read before it is handed
// out, because a set-up that succeeds does not mean that reads are allowed. Belongs to the thread
// that opened it: with SINGLE_ISSUER the kernel refuses every other.
#pragma once

#if HEADRACE_HAVE_URING
#include <liburing.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace headrace::io {

class Ring {
 public:
  struct Options {
    unsigned entries = 64;
    bool single_issuer = true;  // faster, and only for the thread that opens it
    bool registered_buffers = true;
  };

  // Null where io_uring may not be used, with the reason and what would help in `*reason`.
  static std::unique_ptr<Ring> open(const Options& options, std::string* reason);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  io_uring* get() { return &ring_; }
  bool is_single_issuer() const;
  // The descriptor was closed by somebody else, and its number may be another file's by now: the
  // ring's memory is given back, the number is not touched.
  void descriptor_is_gone() { ring_.ring_fd = ring_.enter_ring_fd = -1; }

  // Slots of the registered-buffer table: an arena has a handful of buffers, and a slot costs 16
  // bytes. Buffers beyond it are read into unregistered.
  static constexpr unsigned kBuffersMax = 64;
  // False where the kernel or RLIMIT_MEMLOCK refuses: the slot stays empty.
  bool set_buffer(unsigned slot, std::span<std::byte> memory);
  void clear_buffer(unsigned slot);

 private:
  Ring() = default;
  int set_up(const Options& options);
  int prove();

  io_uring ring_{};
  bool is_set_up_ = false;
  bool has_table_ = false;
};

}  // namespace headrace::io
#endif
