// Manifest: `store.json`, which segments and volumes make up a store. The same document, checks and
// words as src/headrace/store/manifest.py.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "capi/json.h"

namespace headrace::capi {

struct VolumeEntry {
  enum class Kind { kPacked, kFile, kTree, kObject };
  Kind kind = Kind::kPacked;
  std::string path;       // bytes of a file's name, absolute or relative to the store; a URL
  uint64_t bytes = 0;     // not of a tree
  int64_t mtime_ns = -1;  // of a file
  std::string uuid;       // 32 hexadecimal digits, of a packed volume
};

struct SegmentEntry {
  std::string directory;
  uint64_t directory_bytes = 0;
  std::string uuid;
  uint64_t samples = 0;
  uint64_t extents = 0;
  std::vector<VolumeEntry> volumes;
};

struct Manifest {
  std::string fingerprint;
  std::vector<SegmentEntry> segments;
};

inline constexpr uint64_t kSegmentsMax = 10'000;

// Both throw Error(kCorruptStore).
Manifest parse_manifest(std::string_view text, const std::string& path);
// One entry of its `segments`. `where` names it in messages about `path`.
SegmentEntry parse_segment(const Json& entry, const std::string& path, const std::string& where);

[[noreturn]] void fail_manifest(const std::string& path, const std::string& what, const Json* found,
                                const std::string& expected);

}  // namespace headrace::capi
