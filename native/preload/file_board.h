// FileBoard: the daemon's side of a board: made once from the list of files, then told where copies
// are. Readers in other processes see each change whole or not at all.
//
// The board holds no copies and no descriptors: whoever places a copy keeps it until it is
// withdrawn. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "preload/board_view.h"
#include "preload/shared_memory.h"

namespace headrace::preload {

// What the original is, as `stat` says.
struct FileFigures {
  int64_t device, inode, size, mtime_ns, atime_ns, ctime_ns, blocks;
  uint32_t mode, links, uid, gid, block_bytes;
  bool is_link;  // the path is a symbolic link to it
};

struct BoardOptions {
  // (as programs may spell it, what stands for it on the board)
  std::vector<std::pair<std::string, std::string>> roots;
  std::vector<std::string> tiers;  // folders that hold copies
  bool immutable = false;
};

class FileBoard {
 public:
  // `figures` of each path. Throws Error(kInvalidArgument) for paths that are not absolute, too
  // long or there twice, and for too many roots or tiers.
  FileBoard(std::span<const std::string_view> paths, std::span<const FileFigures> figures,
            const BoardOptions& options);
  ~FileBoard();
  FileBoard(const FileBoard&) = delete;
  FileBoard& operator=(const FileBoard&) = delete;

  // The copy is the memfd `fd` of this process, which stays open until `withdraw`. Throws
  // Error(kInvalidArgument) if it is no file, or not of the original's size.
  void place(int64_t file, int fd);
  // The copy is a file below one of the tiers.
  void place_path(int64_t file, const std::string& path);
  // Before the copy is closed or removed. Those who have it open keep it.
  void withdraw(int64_t file);
  bool placed(int64_t file) const;

  int64_t find(std::string_view path) const { return view_.find(path.data(), path.size()); }
  uint64_t files() const { return files_; }
  uint64_t nbytes() const { return memory_.nbytes(); }
  int fd() const { return memory_.fd(); }
  uint64_t inode() const { return memory_.inode(); }

 private:
  struct Target;
  BoardHeader& header() { return *reinterpret_cast<BoardHeader*>(memory_.data()); }
  BoardFile& entry(int64_t file);
  void publish(int64_t file, const Target& target);
  void add_device(uint64_t device);
  void map_copy(int64_t file, uint64_t device, uint64_t inode);
  void unmap_copy(int64_t file);

  const uint64_t files_;
  SharedMemory memory_;
  BoardView view_;
  mutable std::mutex mutex_;
};

}  // namespace headrace::preload
