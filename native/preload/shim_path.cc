#include "preload/shim_path.h"

#include <fcntl.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace headrace::preload::shim {
namespace {

// A path that grows part by part.
class Absolute {
 public:
  bool sure = true;

  // Begins at the folder, as the kernel knows it: no links are left in that. False: unknown.
  bool begin(int folder) {
    if (folder == AT_FDCWD) {
      const long bytes = syscall(SYS_getcwd, text_, sizeof text_);
      if (bytes <= 1 || text_[0] != '/') return false;
      used_ = static_cast<uint64_t>(bytes) - 1;
    } else {
      char link[32] = "/proc/self/fd/";
      char* at = link + strlen(link);
      if (folder < 0) return false;
      char digits[10];
      int count = 0;
      for (int value = folder; count == 0 || value != 0; value /= 10) {
        digits[count++] = static_cast<char>('0' + value % 10);
      }
      while (count > 0) *at++ = digits[--count];
      *at = '\0';
      const long bytes = syscall(SYS_readlinkat, AT_FDCWD, link, text_, sizeof text_);
      if (bytes <= 0 || bytes == static_cast<long>(sizeof text_) || text_[0] != '/') return false;
      used_ = static_cast<uint64_t>(bytes);
      sure = false;  // " (deleted)" may stand behind it
    }
    if (used_ == 1) used_ = 0;  // "/"
    return true;
  }

  bool add(const char* part, uint64_t bytes) {
    if (bytes == 0 || (bytes == 1 && part[0] == '.')) return true;
    if (bytes == 2 && part[0] == '.' && part[1] == '.') {
      if (named_) sure = false;
      while (used_ > 0 && text_[--used_] != '/') {
      }
      return true;
    }
    if (bytes > kShimPathBytesMax - used_ - 1) return false;
    text_[used_++] = '/';
    memcpy(text_ + used_, part, bytes);
    used_ += bytes;
    named_ = true;
    return true;
  }

  // What begins with one root's spelling begins with its name on the board instead.
  bool respell(const BoardView& board, int root) {
    uint32_t spelled_bytes;
    uint32_t stands_bytes;
    const char* spelled = board.spelled(root, &spelled_bytes);
    const char* stands = board.stands(root, &stands_bytes);
    if (spelled_bytes == stands_bytes && memcmp(spelled, stands, stands_bytes) == 0) return true;
    const uint64_t rest = used_ - spelled_bytes;
    if (stands_bytes + rest > kShimPathBytesMax) return false;
    memmove(text_ + stands_bytes, text_ + spelled_bytes, rest);
    memcpy(text_, stands, stands_bytes);
    used_ = stands_bytes + rest;
    return true;
  }

  const char* text() const { return text_; }
  uint64_t bytes() const { return used_; }

 private:
  char text_[kShimPathBytesMax];
  uint64_t used_ = 0;
  bool named_ = false;  // a part of the program's own words stands in it
};

}  // namespace

Named name_of(const BoardView& board, int folder, const char* path) {
  Named named;
  if (path == nullptr || path[0] == '\0') return named;
  Absolute absolute;
  if (path[0] != '/' && !absolute.begin(folder)) return named;
  const char* at = path;
  for (;;) {
    const char* end = at;
    while (*end != '/' && *end != '\0') {
      if (static_cast<uint64_t>(++end - at) > kShimPathBytesMax) return named;
    }
    const auto bytes = static_cast<uint64_t>(end - at);
    const bool last = *end == '\0';
    // "name/", "name/." and "name/..": folders, or an error that the kernel knows best.
    if (last && (bytes == 0 || (at[0] == '.' && (bytes == 1 || (bytes == 2 && at[1] == '.'))))) {
      return named;
    }
    if (!absolute.add(at, bytes)) return named;
    if (last) break;
    at = end + 1;
  }
  const int root = board.root_of(absolute.text(), absolute.bytes());
  if (root < 0) return named;
  if (!absolute.respell(board, root)) return named;
  named.below_root = true;
  named.sure = absolute.sure;
  named.file = board.find(absolute.text(), absolute.bytes());
  return named;
}

}  // namespace headrace::preload::shim
