// The mmap engine: a gather from the page cache.
//
// One copy per read, checksummed in the same pass, with the next sources prefetched: at a few
// kilobytes a sample the cost is cache and TLB misses, and several of them overlap this way.
#include <cerrno>
#include <cstring>

#include "core/crc32c.h"
#include "io/engine.h"

namespace headrace::io {
namespace {

// How far ahead of the copy the first lines of a source are asked for, in reads.
constexpr size_t kPrefetchDistance = 8;
// Asked for per source. What counts is that its page is in the TLB when the copy begins; the
// hardware follows the stream from there. 1 KiB cost a tenth more than 128 bytes.
constexpr size_t kPrefetchBytesMax = 128;
constexpr size_t kLineBytes = 64;

class MmapEngine final : public Engine {
 public:
  const char* name() const override { return "mmap"; }

  void read(std::span<Read> reads, const OnDone& on_done) override {
    for (size_t i = 0; i < std::min(kPrefetchDistance, reads.size()); ++i) prefetch(reads[i]);
    for (size_t i = 0; i < reads.size(); ++i) {
      if (i + kPrefetchDistance < reads.size()) prefetch(reads[i + kPrefetchDistance]);
      copy(reads[i]);
      on_done(reads[i]);
    }
  }

 private:
  static void prefetch(const Read& read) {
    if (read.mapping == nullptr || read.offset >= read.mapping->size()) return;
    const std::byte* from = read.mapping->data() + read.offset;
    const size_t bytes = std::min(read.length, kPrefetchBytesMax);
    for (size_t at = 0; at < bytes; at += kLineBytes) __builtin_prefetch(from + at);
  }

  static void copy(Read& read) {
    if (read.mapping == nullptr) {
      read.error = EBADF;
      return;
    }
    const size_t size = read.mapping->size();
    const size_t length = read.offset >= size ? 0 : std::min(read.length, size - read.offset);
    const std::byte* from = read.mapping->data() + read.offset;
    if (read.want_crc) {
      read.crc = crc32c_copy(0, read.dest, from, length);
      read.crc_done = true;
    } else {
      std::memcpy(read.dest, from, length);
    }
    read.done = length;
    // Damage of another thread or an earlier batch counts too: the lost pages read as zeros from
    // then on. The reader then tries again by pread and learns the truth.
    if (read.mapping->damaged() != 0) read.error = EIO;
  }
};

}  // namespace

std::unique_ptr<Engine> make_mmap_engine() { return std::make_unique<MmapEngine>(); }

}  // namespace headrace::io
