#include "fabric/receiver.h"

#include <algorithm>
#include <cassert>

#include "core/crc32c.h"

namespace headrace::fabric {
namespace {

// Many small PDUs should come with one system call, and be copied once; of large ones little more
// than the next header, so that the data goes to its place uncopied.
constexpr size_t kStagingBytes = 64 << 10;
constexpr size_t kStagingForLarge = 2 << 10;
constexpr uint32_t kLargeData = 16 << 10;

}  // namespace

Receiver::Receiver(PduSink* sink, const PduRules& rules)
    : sink_(sink),
      rules_(rules),
      staging_window_(kStagingBytes),
      staging_(std::make_unique_for_overwrite<std::byte[]>(kStagingBytes)) {}

// The rest of the data that has a place and can be read there at once.
std::span<std::byte> Receiver::direct() const {
  if (part_ != Part::kData || part_done_ < place_.skip) return {};
  const size_t at = part_done_ - place_.skip;
  return at < place_.dest.size() ? place_.dest.subspan(at) : std::span<std::byte>{};
}

std::array<std::span<std::byte>, 2> Receiver::want() {
  return {direct(), std::span(staging_.get(), staging_window_)};
}

Fault Receiver::advance(size_t count) {
  const std::span<std::byte> dest = direct();
  const size_t placed = std::min(count, dest.size());
  if (placed > 0) {
    if (layout_.ddgst) crc_ = crc32c(crc_, dest.data(), placed);
    took_data(placed);
  }
  assert(count - placed <= staging_window_);
  return feed({staging_.get(), count - placed});
}

Fault Receiver::feed(std::span<const std::byte> bytes) {
  while (!bytes.empty() && part_ != Part::kDead) bytes = bytes.subspan(consume(bytes));
  return fault_;
}

// Takes bytes of the current part; returns how many.
size_t Receiver::consume(std::span<const std::byte> bytes) {
  switch (part_) {
    case Part::kCommon: {
      const size_t count = std::min(bytes.size(), kCommonBytes - header_filled_);
      collect_header(bytes.first(count), kCommonBytes);
      return count;
    }
    case Part::kHeader: {
      const size_t count = std::min(bytes.size(), layout_.header_bytes - header_filled_);
      collect_header(bytes.first(count), layout_.header_bytes);
      return count;
    }
    case Part::kPad: {
      const size_t count = std::min(bytes.size(), layout_.pad_bytes - part_done_);
      part_done_ += count;
      if (part_done_ == layout_.pad_bytes) {
        part_ = Part::kData;
        part_done_ = 0;
      }
      return count;
    }
    case Part::kData:
      return take_data(bytes);
    case Part::kDigest: {
      const size_t count = std::min(bytes.size(), kDigestBytes - part_done_);
      std::copy_n(bytes.begin(), count, digest_.begin() + static_cast<ptrdiff_t>(part_done_));
      part_done_ += count;
      if (part_done_ == kDigestBytes) end(wire_cast<uint32_t>(digest_) == crc_);
      return count;
    }
    case Part::kDead:
      break;
  }
  return bytes.size();
}

void Receiver::collect_header(std::span<const std::byte> bytes, size_t until) {
  std::copy(bytes.begin(), bytes.end(), header_.begin() + static_cast<ptrdiff_t>(header_filled_));
  header_filled_ += bytes.size();
  if (header_filled_ < until) return;
  part_ == Part::kCommon ? common_done() : header_done();
}

void Receiver::common_done() {
  if (const Fault fault = check_common(wire_cast<CommonHeader>(header_), rules_, &layout_)) {
    fail(fault);
    return;
  }
  part_ = Part::kHeader;  // no header is 8 bytes alone
}

void Receiver::header_done() {
  if (const Fault fault = check_header_digest(header(), layout_)) {
    fail(fault);
    return;
  }
  place_ = {};
  if (const Fault fault = sink_->on_header(layout_, header(), &place_)) {
    fail(fault);
    return;
  }
  assert(place_.skip + place_.dest.size() <= layout_.data_bytes);
  part_done_ = 0;
  crc_ = 0;
  if (layout_.data_bytes == 0) {
    end(true);
    return;
  }
  staging_window_ = layout_.data_bytes >= kLargeData ? kStagingForLarge : kStagingBytes;
  part_ = layout_.pad_bytes > 0 ? Part::kPad : Part::kData;
}

size_t Receiver::take_data(std::span<const std::byte> bytes) {
  size_t count = std::min<size_t>(bytes.size(), layout_.data_bytes - part_done_);
  if (part_done_ < place_.skip) count = std::min(count, place_.skip - part_done_);
  const std::span<std::byte> dest = direct();
  if (!dest.empty()) {
    count = std::min(count, dest.size());
    if (layout_.ddgst) {
      crc_ = crc32c_copy(crc_, dest.data(), bytes.data(), count);
    } else {
      std::copy_n(bytes.begin(), count, dest.begin());
    }
  } else if (layout_.ddgst) {
    crc_ = crc32c(crc_, bytes.data(), count);
  }
  took_data(count);
  return count;
}

void Receiver::took_data(size_t count) {
  part_done_ += count;
  if (part_done_ < layout_.data_bytes) return;
  part_done_ = 0;
  if (layout_.ddgst) {
    part_ = Part::kDigest;
  } else {
    end(true);
  }
}

void Receiver::end(bool intact) {
  if (const Fault fault = sink_->on_end(layout_, intact)) {
    fail(fault);
    return;
  }
  part_ = Part::kCommon;
  part_done_ = 0;
  header_filled_ = 0;
  place_ = {};
}

void Receiver::fail(const Fault& fault) {
  fault_ = fault;
  part_ = Part::kDead;
  place_ = {};
}

}  // namespace headrace::fabric
