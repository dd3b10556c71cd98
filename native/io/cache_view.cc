#include "io/cache_view.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace headrace::io {

CacheView::CacheView(std::span<const std::byte> words, std::shared_ptr<const void> owner,
                     uint64_t samples, uint64_t parts)
    : index_(words.data(), samples), index_owner_(std::move(owner)), parts_(parts) {
  if (parts == 0 || samples > words.size() / sizeof(uint64_t)) {
    throw Error(ErrorKind::kInvalidArgument, "an index of " + std::to_string(words.size()) +
                                                 " bytes for " + std::to_string(samples) +
                                                 " samples of " + std::to_string(parts) + " parts");
  }
}

std::shared_ptr<CacheView> CacheView::of(int fd, uint64_t bytes, uint64_t samples, uint64_t parts) {
  auto mapping = SharedMapping::of(fd, bytes);
  const auto words = mapping->bytes();
  return std::make_shared<CacheView>(words, std::move(mapping), samples, parts);
}

void CacheView::add_slab(uint32_t number, int fd, uint64_t bytes) {
  auto mapping = SharedMapping::of(fd, bytes);
  const auto memory = mapping->bytes();
  add_slab(number, memory, std::move(mapping));
}

void CacheView::add_slab(uint32_t number, std::span<const std::byte> memory,
                         std::shared_ptr<const void> owner) {
  std::lock_guard lock(mutex_);
  if (number == 0 || slabs_.contains(number)) {
    throw Error(ErrorKind::kInvalidArgument,
                "slab " + std::to_string(number) + " came twice, or is none");
  }
  slabs_[number] = SlabView{memory.data(), memory.size(), std::move(owner)};
}

void CacheView::drop_slab(uint32_t number) {
  std::shared_ptr<const void> owner;  // unmapped without the lock
  std::lock_guard lock(mutex_);
  const auto found = slabs_.find(number);
  if (found == slabs_.end()) return;
  owner = std::move(found->second.owner);
  slabs_.erase(found);
}

std::shared_ptr<Hits> CacheView::look_up(std::span<const int64_t> indices) const {
  std::lock_guard lock(mutex_);
  return io::look_up(index_, parts_, indices, ++look_ups_, [&](uint32_t number) {
    const auto found = slabs_.find(number);
    return found == slabs_.end() ? nullptr : &found->second;
  });
}

uint64_t CacheView::mapped_bytes() const {
  std::lock_guard lock(mutex_);
  uint64_t bytes = index_.samples() * sizeof(uint64_t);
  for (const auto& [number, slab] : slabs_) bytes += slab.size;
  return bytes;
}

}  // namespace headrace::io
