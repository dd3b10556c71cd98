#include "capi/sample.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "capi/failure.h"
#include "capi/read_failure.h"
#include "io/catalog.h"

namespace headrace::capi {
namespace {

// Up to this a range is cut from the whole sample, so that its checksum is checked.
constexpr uint64_t kCheckedRangeBytes = 4 << 20;

}  // namespace

uint64_t find_sample(const Mounted& mounted, std::string_view name) {
  for (const io::Segment& segment : mounted.catalog->segments()) {
    int64_t found = -1;
    segment.directory->find({&name, 1}, {&found, 1});
    if (found >= 0) return segment.base + static_cast<uint64_t>(found);
  }
  throw Failure(HR_ERR_NO_SAMPLE, mounted.where + ": there is no sample named '" +
                                      std::string(name.substr(0, 500)) +
                                      "'. headrace ls lists the names.");
}

Sample::Sample(std::shared_ptr<Mounted> mounted, uint64_t index)
    : mounted_(std::move(mounted)), index_(index) {
  const io::Catalog& catalog = *mounted_->catalog;
  if (index > INT64_MAX) refuse("the index is " + std::to_string(index) + ", expected less");
  catalog.check_index(static_cast<int64_t>(index));
  const io::Segment& segment = catalog.segment_of(index);
  const uint64_t local = index - segment.base;
  const auto [first, last] = segment.directory->extents_of(local);
  if (first < last) {
    const Extent extent = segment.directory->extent(first);
    segment.directory->assert_whole();
    catalog.check_extent(segment, local, extent);
    bytes_ = extent.length;
  }
  label_ = segment.directory->label(local);
}

std::shared_ptr<io::Batch> Sample::fetch(uint64_t start, int64_t size) const {
  mounted_->refuse_foreign();
  auto batch = mounted_->catalog->read_one(*mounted_->arena, static_cast<int64_t>(index_), -1,
                                           start, size, true);
  if (!batch->failures.empty()) {
    fail_read(*mounted_, static_cast<int64_t>(index_), batch->failures.front());
  }
  return batch;
}

size_t Sample::read(uint64_t offset, std::byte* dest, size_t size) {
  if (offset >= bytes_ || size == 0) return 0;
  const uint64_t wanted = std::min<uint64_t>(size, bytes_ - offset);
  const std::lock_guard lock(mutex_);
  if (bytes_ <= kCheckedRangeBytes) {
    if (whole_ == nullptr) whole_ = fetch(0, -1);
    std::memcpy(dest, whole_->buffer->data + offset, wanted);
  } else {
    const auto batch = fetch(offset, static_cast<int64_t>(wanted));
    std::memcpy(dest, batch->buffer->data, wanted);
  }
  return wanted;
}

}  // namespace headrace::capi
