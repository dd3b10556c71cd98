// Volume: bytes that can be read at an offset: a file, a folder whose files are samples, or
// something remote that only a RemoteEngine can read.
//
// A file volume opens its descriptors (buffered, and O_DIRECT where the file system has it) and its
// mapping when they are first needed and keeps them. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "core/mapping.h"
#include "io/engine.h"

namespace headrace::io {

enum class VolumeKind {
  kFile,
  kTree,
  kRemote,  // read by a RemoteEngine; the path is a URL, and there is no descriptor
};

class Volume {
 public:
  // `bytes` is what the size must be; ignored for a tree. `mtime_ns` -1: not checked.
  Volume(VolumeKind kind, std::string path, uint64_t bytes, int64_t mtime_ns);
  ~Volume();
  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;

  VolumeKind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  uint64_t bytes() const { return bytes_; }
  int64_t mtime_ns() const { return mtime_ns_; }

  // The buffered descriptor (of the file, or of the tree's folder). Opens on first use and checks
  // size and mtime. Throws Error(kVolume), Error(kCorruptStore) (wrong size) or
  // Error(kSourceChanged).
  int fd();
  // The O_DIRECT descriptor, or -1 where direct reads are not possible.
  int direct_fd();
  // Offsets, lengths and addresses of direct reads must be multiples of this. Valid after
  // `direct_fd`. A power of two.
  uint32_t alignment() const { return alignment_; }
  // The whole file mapped, or null where it cannot be or pages of the mapping were lost. Damage
  // that comes later is the caller's to look at.
  const Mapping* mapping();

  // Whether the byte range lies in the page cache as a whole. Tree volumes: false.
  bool resident(uint64_t offset, uint64_t length);

 private:
  void open_locked();
  void open_direct_locked();

  const VolumeKind kind_;
  const std::string path_;
  const uint64_t bytes_;
  const int64_t mtime_ns_;
  std::mutex mutex_;
  std::atomic<int> fd_{-1};
  std::atomic<int> direct_fd_{-2};  // -2: not tried
  uint32_t alignment_ = 4096;
  std::unique_ptr<Mapping> mapping_;
  std::atomic<const Mapping*> mapping_seen_{nullptr};
  std::atomic<bool> mapping_failed_{false};
};

}  // namespace headrace::io
