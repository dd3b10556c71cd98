#include "capi/source_reads.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <numeric>
#include <vector>

#include "capi/mounted.h"
#include "core/error.h"

namespace headrace::capi {
namespace {

constexpr double kCloseSeconds = 5;

// Where a sample's last byte ends; 0 for one that lies nowhere: it counts with those before.
uint64_t end_of(const Directory& directory, uint64_t sample) {
  const auto [first, last] = directory.extents_of(sample);
  uint64_t end = 0;
  for (uint64_t e = first; e < last; ++e) {
    const Extent extent = directory.extent(e);
    end = std::max(end, extent.offset + extent.length);
  }
  return end;
}

// The first sample whose last byte lies behind `offset`. Shares are laid in the order of samples.
uint64_t first_behind(const Directory& directory, uint64_t offset) {
  uint64_t low = 0, high = directory.samples();
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    end_of(directory, middle) > offset ? high = middle : low = middle + 1;
  }
  return low;
}

}  // namespace

SourceReads::SourceReads(std::string listing, double timeout_s)
    : listing_(std::move(listing)), timeout_s_(timeout_s) {}

SourceReads::~SourceReads() {
  if (reader_ != nullptr) reader_->close(kCloseSeconds);
}

void SourceReads::add_volume(const std::string& name, std::shared_ptr<Directory> directory,
                             uint64_t base) {
  shares_[name] = {std::move(directory), base};
}

void SourceReads::open() {
  if (reader_ != nullptr) return;
  const auto source = mount(listing_, {});
  std::vector<int> parts(source->catalog->part_names().size());
  std::iota(parts.begin(), parts.end(), 0);
  reader_ = io::Reader::make(source->catalog, {}, std::move(parts));
  source_ = source;
}

void SourceReads::read(std::shared_ptr<io::RemoteRequests> requests) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < requests->requests().size(); ++i) {
    if (!requests->open(i)) continue;
    const io::RemoteRequest& request = requests->requests()[i];
    int error = EIO;
    try {
      open();
      const auto it = shares_.find(requests->path(i));
      if (it != shares_.end()) error = fill(it->second, request);
    } catch (const Error& e) {
      error = e.system_errno != 0 ? e.system_errno : EIO;
    } catch (const std::exception&) {
      // A source that cannot be opened has nothing.
    }
    requests->finish(i, error == 0 ? request.length : 0, error);
  }
}

// Lays the samples of a range where the directory says; returns 0 or an errno value.
int SourceReads::fill(const Share& share, const io::RemoteRequest& request) {
  std::memset(request.dest, 0, request.length);  // header page, gaps, padding: no sample's
  const uint64_t begin = request.offset, end = request.offset + request.length;
  const uint64_t first = first_behind(*share.directory, begin);
  const uint64_t last =
      std::min(first_behind(*share.directory, end - 1) + 1, share.directory->samples());
  if (first >= last) return 0;
  std::vector<int64_t> indices(last - first);
  std::iota(indices.begin(), indices.end(), static_cast<int64_t>(share.base + first));
  const auto batch = reader_->submit(std::move(indices))->wait(timeout_s_);
  if (batch == nullptr) return ETIMEDOUT;
  if (!batch->failures.empty()) {
    const int error = batch->failures.front().system_errno;
    return error != 0 ? error : EIO;
  }
  for (uint64_t sample = first; sample < last; ++sample) {
    const auto [extent_first, extent_last] = share.directory->extents_of(sample);
    for (uint64_t e = extent_first; e < extent_last; ++e) {
      const Extent extent = share.directory->extent(e);
      const uint64_t from = std::max(extent.offset, begin);
      const uint64_t to = std::min(extent.offset + extent.length, end);
      const uint64_t part = share.directory->part(e);
      if (from >= to) continue;
      const uint64_t slot = (sample - first) * batch->parts + part;
      if (part >= batch->parts || batch->lengths[slot] != static_cast<int64_t>(extent.length)) {
        return ESTALE;  // the source is not what was staged
      }
      std::memcpy(request.dest + (from - begin),
                  batch->buffer->data + batch->offsets[slot] + (from - extent.offset), to - from);
    }
  }
  return 0;
}

}  // namespace headrace::capi
