// What all mounts do with a segment, wherever its files lie: open the directory, check that it and
// its packed volumes are the ones that the manifest means.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "capi/manifest.h"
#include "core/directory.h"

namespace headrace::capi {

inline constexpr size_t kPageBytes = 4096;

// `fd` holds the directory; it stays the caller's.
std::shared_ptr<Directory> open_directory(int fd, const SegmentEntry& entry,
                                          const std::string& path);
// The header page of a packed volume: number `number` of the segment.
void check_volume_page(std::span<const std::byte> page, const SegmentEntry& entry, size_t number,
                       const std::string& path);
// Of the directories' header pages, in order.
std::string fingerprint_of(const std::vector<std::shared_ptr<Directory>>& directories);
void check_fingerprint(const std::string& found, const std::string& expected,
                       const std::string& path);

[[noreturn]] void fail_corrupt(const std::string& path, const std::string& what,
                               const std::string& found, const std::string& expected);

}  // namespace headrace::capi
