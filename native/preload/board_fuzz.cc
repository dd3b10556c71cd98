// Fuzzes the readers of a file board with memory that a good board was changed into: whatever is in
// it, no look-up leaves the mapping, and a copy that is found has a number and a name.
//
// The input is a list of changes, each (where, what) of 3 + 4 bytes, after a byte that says how
// much of the board is cut off.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "preload/file_board.h"

namespace {

using namespace headrace::preload;

constexpr int kFiles = 40;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

std::string path_of(int i) {
  return "/data/set/" + std::to_string(i % 4) + "/" + std::to_string(i) + ".jpg";
}

// The bytes of a board with two spellings of its root, and a copy on a tier for every other file.
std::vector<std::byte> good_board() {
  std::vector<std::string> paths;
  std::vector<FileFigures> figures;
  for (int i = 0; i < kFiles; ++i) {
    paths.push_back(path_of(i));
    figures.push_back({7, 1000 + i, 10, 5, 6, 7, 8, S_IFREG | 0644, 1, 2, 3, 4096, i == 3});
  }
  const std::vector<std::string_view> views(paths.begin(), paths.end());
  FileBoard board(views, figures, {.roots = {{"/data", "/data"}, {"/link", "/data"}}});
  std::vector<std::byte> bytes(board.nbytes());
  require(pread(board.fd(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()),
          "a board can be read");
  return bytes;
}

void look_everything_up(const BoardView& view) {
  char text[256];
  uint32_t bytes = 0;
  for (int i = 0; i < kFiles; ++i) {
    const std::string path = path_of(i);
    const int64_t number = view.find(path.data(), path.size());
    require(number >= -1 && number < static_cast<int64_t>(view.header().files), "a file's number");
    if (number < 0) continue;
    require(view.name(number, &bytes) != nullptr, "a file that was found has a name");
    const CopyPlace place = view.place(number);
    if (view.tier_path(number, place.where, text, sizeof text)) {
      require(std::memchr(text, 0, sizeof text) != nullptr, "a path that ends");
    }
    view.still(number, place.generation);
    view.find_copy(place.device, place.inode);
  }
  for (const char* path : {"/data/set", "/link/set/1", "/", "/datax"}) {
    const int root = view.root_of(path, std::strlen(path));
    if (root < 0) continue;
    for (const char* text_of : {view.spelled(root, &bytes), view.stands(root, &bytes)}) {
      if (text_of == nullptr) continue;
      for (uint32_t at = 0; at < bytes; ++at) static_cast<void>(*(text_of + at) == '/');
    }
  }
  view.has_device(7);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::vector<std::byte> good = good_board();
  if (size == 0) return 0;
  // On the heap and of the exact size, so that the sanitizer sees each byte beyond it.
  const size_t nbytes = data[0] == 0 ? good.size() : good.size() * data[0] / 256;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64));
  const std::unique_ptr<std::byte, decltype(&std::free)> owner(memory, &std::free);
  std::memcpy(memory, good.data(), nbytes);
  for (++data, --size; size >= 7 && nbytes >= 4; data += 7, size -= 7) {
    const size_t at = (data[0] | data[1] << 8 | data[2] << 16) % (nbytes - 3);
    std::memcpy(memory + at, data + 3, 4);
  }
  BoardView view;
  if (view.check(memory, nbytes)) look_everything_up(view);
  return 0;
}
