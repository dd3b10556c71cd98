#include "preload/board_view.h"

#include <cstring>

namespace headrace::preload {

bool BoardView::within(uint64_t offset, uint64_t count, uint64_t size) const {
  return offset % 8 == 0 && offset >= sizeof(BoardHeader) && offset <= nbytes_ &&
         count <= (nbytes_ - offset) / size;
}

bool BoardView::check(const void* memory, uint64_t nbytes) {
  base_ = nullptr;
  nbytes_ = nbytes;
  if (nbytes < sizeof(BoardHeader)) return false;
  const auto& h = *static_cast<const BoardHeader*>(memory);
  const auto is_power = [](uint64_t n) { return n != 0 && (n & (n - 1)) == 0; };
  if (h.magic != kBoardMagic || h.version != kBoardVersion || h.nbytes > nbytes) return false;
  if (h.files > kFilesMax || !is_power(h.slots) || !is_power(h.copy_slots)) return false;
  if (h.slots <= h.files || h.root_count > kRootsMax || h.tier_count > kTiersMax) return false;
  if (!within(h.files_offset, h.files, sizeof(BoardFile)) ||
      !within(h.slots_offset, h.slots, sizeof(uint64_t)) ||
      !within(h.copies_offset, h.copy_slots, sizeof(uint32_t)) ||
      !within(h.names_offset, h.names_bytes, 1) ||
      !within(h.tier_names_offset, h.files, kTierNameBytes)) {
    return false;
  }
  base_ = static_cast<const char*>(memory);
  const auto sound = [&](const BoardRoot& root) {
    return root.spelled_bytes <= kPathBytesMax && root.stands_bytes <= kPathBytesMax &&
           text(root.spelled_offset, root.spelled_bytes) != nullptr &&
           text(root.stands_offset, root.stands_bytes) != nullptr;
  };
  for (uint32_t i = 0; i < h.root_count; ++i) {
    if (!sound(h.roots[i])) base_ = nullptr;
    if (base_ == nullptr) return false;
  }
  for (uint32_t i = 0; i < h.tier_count; ++i) {
    if (!sound(h.tiers[i])) base_ = nullptr;
    if (base_ == nullptr) return false;
  }
  return true;
}

const char* BoardView::text(uint64_t offset, uint32_t bytes) const {
  const BoardHeader& h = header();
  if (offset > h.names_bytes || bytes > h.names_bytes - offset) return nullptr;
  return base_ + h.names_offset + offset;
}

const char* BoardView::name(int64_t number, uint32_t* bytes) const {
  const BoardFile& f = file(number);
  *bytes = f.name_bytes;
  return text(f.name_offset, f.name_bytes);
}

int64_t BoardView::find(const char* path, uint64_t bytes) const {
  const BoardHeader& h = header();
  const uint64_t hash = path_hash(path, bytes);
  const auto* slots = reinterpret_cast<const uint64_t*>(base_ + h.slots_offset);
  const uint64_t mask = h.slots - 1;
  uint64_t at = hash & mask;
  for (uint64_t probes = 0; probes <= mask; ++probes, at = (at + 1) & mask) {
    const uint64_t slot = slots[at];
    if (slot == 0) return -1;
    if (slot >> 32 != hash >> 32) continue;
    const auto number = static_cast<int64_t>(slot & 0xffffffff) - 1;
    if (number < 0 || static_cast<uint64_t>(number) >= h.files) return -1;
    uint32_t name_bytes;
    const char* found = name(number, &name_bytes);
    if (found != nullptr && name_bytes == bytes && memcmp(found, path, bytes) == 0) return number;
  }
  return -1;
}

int BoardView::root_of(const char* path, uint64_t bytes) const {
  const BoardHeader& h = header();
  for (uint32_t i = 0; i < h.root_count; ++i) {
    const BoardRoot& root = h.roots[i];
    if (bytes < root.spelled_bytes) continue;
    if (memcmp(path, text(root.spelled_offset, root.spelled_bytes), root.spelled_bytes) != 0) {
      continue;
    }
    if (bytes == root.spelled_bytes || path[root.spelled_bytes] == '/') return static_cast<int>(i);
  }
  return -1;
}

const char* BoardView::spelled(int root, uint32_t* bytes) const {
  *bytes = header().roots[root].spelled_bytes;
  return text(header().roots[root].spelled_offset, *bytes);
}

const char* BoardView::stands(int root, uint32_t* bytes) const {
  *bytes = header().roots[root].stands_bytes;
  return text(header().roots[root].stands_offset, *bytes);
}

CopyPlace BoardView::place(int64_t number) const {
  const BoardFile& f = file(number);
  CopyPlace place{};
  place.generation = f.generation.load(std::memory_order_acquire);
  if (place.generation % 2 != 0) return place;
  // Acquire: none of these is read after the generation below.
  const uint32_t copy = f.copy.load(std::memory_order_acquire);
  place.where = f.where.load(std::memory_order_acquire);
  place.device = f.copy_device.load(std::memory_order_acquire);
  place.inode = f.copy_inode.load(std::memory_order_acquire);
  if (copy > static_cast<uint32_t>(Copy::kTier) || !still(number, place.generation)) return place;
  place.copy = static_cast<Copy>(copy);
  return place;
}

bool BoardView::tier_path(int64_t number, uint32_t tier, char* out, uint64_t out_bytes) const {
  const BoardHeader& h = header();
  if (tier >= h.tier_count) return false;
  const BoardRoot& folder = h.tiers[tier];
  const auto* words = reinterpret_cast<const TierName*>(base_ + h.tier_names_offset)[number].words;
  char name[kTierNameBytes];
  for (uint32_t i = 0; i < kTierNameBytes / 8; ++i) {
    const uint64_t word = words[i].load(std::memory_order_acquire);
    memcpy(name + i * 8, &word, 8);
  }
  const uint64_t name_bytes = strnlen(name, kTierNameBytes);
  if (name_bytes == 0 || name_bytes == kTierNameBytes) return false;
  if (folder.spelled_bytes + 1 + name_bytes + 1 > out_bytes) return false;
  memcpy(out, text(folder.spelled_offset, folder.spelled_bytes), folder.spelled_bytes);
  out[folder.spelled_bytes] = '/';
  memcpy(out + folder.spelled_bytes + 1, name, name_bytes);
  out[folder.spelled_bytes + 1 + name_bytes] = '\0';
  return true;
}

bool BoardView::has_device(uint64_t device) const {
  const BoardHeader& h = header();
  uint32_t count = h.device_count.load(std::memory_order_acquire);
  if (count > kTiersMax + 1) count = kTiersMax + 1;
  for (uint32_t i = 0; i < count; ++i) {
    if (h.devices[i].load(std::memory_order_relaxed) == device) return true;
  }
  return false;
}

int64_t BoardView::find_copy(uint64_t device, uint64_t inode) const {
  const BoardHeader& h = header();
  const auto* slots = reinterpret_cast<const std::atomic<uint32_t>*>(base_ + h.copies_offset);
  const uint64_t mask = h.copy_slots - 1;
  uint64_t at = copy_hash(device, inode) & mask;
  for (uint64_t probes = 0; probes < kCopyProbesMax; ++probes, at = (at + 1) & mask) {
    const uint32_t slot = slots[at].load(std::memory_order_acquire);
    if (slot == 0) return -1;
    if (slot == kWasUsed || slot > h.files) continue;
    const BoardFile& f = file(slot - 1);
    if (f.copy_inode.load(std::memory_order_relaxed) == inode &&
        f.copy_device.load(std::memory_order_relaxed) == device) {
      return slot - 1;
    }
  }
  return -1;
}

}  // namespace headrace::preload
