// What mounts over the fabric have in common: connections as the options say, and ranges that are
// read at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "capi/manifest.h"
#include "capi/mounted.h"
#include "core/directory.h"
#include "fabric/connections.h"

namespace headrace::capi {

// The options of a mount in the words of connections.
fabric::ConnectionsOptions connection_options(const MountOptions& options);

// Reads `dest.size()` bytes at `offset` of a volume. Throws Failure(HR_ERR_FABRIC, HR_ERR_TIMEOUT).
void read_range(const std::shared_ptr<io::RemoteEngine>& engine, const std::string& name,
                uint64_t offset, std::span<std::byte> dest, double timeout_s);

// Fetches a segment's directory into a file in memory, and opens it.
std::shared_ptr<Directory> fetch_directory(const std::shared_ptr<io::RemoteEngine>& engine,
                                           const std::string& name, const SegmentEntry& entry,
                                           double timeout_s);

}  // namespace headrace::capi
