// Fuzzes the daemon's end of an open ring, whose memory any program may have written: what is taken
// ends, is no more than the ring holds, and says only what a report may say.
//
// The input is a list of changes to the ring's memory, each (where, what) of 2 + 8 bytes; between
// any two, reports are taken.
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "preload/open_ring.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace headrace::preload;
  OpenRing ring(64);
  struct stat status;
  require(fstat(ring.fd(), &status) == 0, "a ring has a size");
  const auto nbytes = static_cast<size_t>(status.st_size);
  for (; size >= 10; data += 10, size -= 10) {
    const size_t at = static_cast<size_t>(data[0] | data[1] << 8) % (nbytes - 8);
    std::memcpy(ring.data() + at, data + 2, 8);
    const auto reports = ring.take(0);
    require(reports.size() <= ring.capacity(), "no more reports than there is room for");
    for (const OpenReport& report : reports) {
      require(report.what >= 0 && report.what < static_cast<int64_t>(kOpenedKinds), "a kind");
      require(report.file >= -1, "a file's number");
    }
  }
  ring.totals();
  return 0;
}
