#include "preload/file_board.h"

#include <sys/stat.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace headrace::preload {
namespace {

uint64_t align_up(uint64_t value) { return (value + 63) / 64 * 64; }

[[noreturn]] void refuse(std::string message) {
  throw Error(ErrorKind::kInvalidArgument, std::move(message));
}

void check_path(std::string_view path, const char* what) {
  if (!path.starts_with('/') || path.size() > kPathBytesMax ||
      path.find('\0') != std::string_view::npos) {
    refuse(std::string(what) + " is '" + std::string(path.substr(0, 200)) +
           "', expected an absolute path of at most " + std::to_string(kPathBytesMax) + " bytes");
  }
}

// Where each part of the board lies.
struct Plan {
  uint64_t slots, copy_slots, files, slots_at, copies, names, names_bytes, tier_names, nbytes;
};

Plan plan_of(std::span<const std::string_view> paths, const BoardOptions& options) {
  if (paths.size() >= kFilesMax) refuse(std::to_string(paths.size()) + " files on one board");
  if (options.roots.size() > kRootsMax) {
    refuse(std::to_string(options.roots.size()) + " spellings of roots, expected at most " +
           std::to_string(kRootsMax));
  }
  if (options.tiers.size() > kTiersMax) {
    refuse(std::to_string(options.tiers.size()) + " tiers, expected at most " +
           std::to_string(kTiersMax));
  }
  Plan plan{};
  for (const std::string_view path : paths) {
    check_path(path, "a path");
    plan.names_bytes += path.size();
  }
  for (const auto& [spelled, stands] : options.roots) {
    check_path(spelled, "a root");
    check_path(stands, "a root");
    plan.names_bytes += spelled.size() + stands.size();
  }
  for (const std::string& tier : options.tiers) {
    check_path(tier, "a tier");
    plan.names_bytes += tier.size();
  }
  plan.slots = std::bit_ceil(paths.size() * 2 + 2);
  plan.copy_slots = std::bit_ceil(paths.size() * 2 + kCopyProbesMax);
  plan.files = align_up(sizeof(BoardHeader));
  plan.slots_at = align_up(plan.files + paths.size() * sizeof(BoardFile));
  plan.copies = align_up(plan.slots_at + plan.slots * sizeof(uint64_t));
  plan.names = align_up(plan.copies + plan.copy_slots * sizeof(uint32_t));
  plan.tier_names = align_up(plan.names + plan.names_bytes);
  plan.nbytes = align_up(plan.tier_names + paths.size() * sizeof(TierName));
  return plan;
}

// Appends to the names, and says where.
class Names {
 public:
  explicit Names(char* begin) : begin_(begin) {}
  uint64_t add(std::string_view text) {
    memcpy(begin_ + used_, text.data(), text.size());
    used_ += text.size();
    return used_ - text.size();
  }

 private:
  char* begin_;
  uint64_t used_ = 0;
};

// A root of "/" is spelled "", so that what follows a root always begins with a slash.
std::string_view without_slash(std::string_view path) {
  while (path.ends_with('/')) path.remove_suffix(1);
  return path;
}

}  // namespace

struct FileBoard::Target {
  Copy copy;
  uint32_t where;
  uint64_t device, inode;
  std::string_view tier_name;
};

FileBoard::FileBoard(std::span<const std::string_view> paths, std::span<const FileFigures> figures,
                     const BoardOptions& options)
    : files_(paths.size()),
      memory_("headrace-board", plan_of(paths, options).nbytes, SharedMemory::Others::kReadOnly) {
  if (figures.size() != paths.size()) {
    refuse(std::to_string(figures.size()) + " figures for " + std::to_string(paths.size()) +
           " paths");
  }
  const Plan plan = plan_of(paths, options);
  BoardHeader& h = header();
  h.version = kBoardVersion;
  h.flags = options.immutable ? kImmutable : 0;
  h.nbytes = plan.nbytes;
  h.files = files_;
  h.slots = plan.slots;
  h.copy_slots = plan.copy_slots;
  h.files_offset = plan.files;
  h.slots_offset = plan.slots_at;
  h.copies_offset = plan.copies;
  h.names_offset = plan.names;
  h.names_bytes = plan.names_bytes;
  h.tier_names_offset = plan.tier_names;
  Names names(reinterpret_cast<char*>(memory_.data() + plan.names));
  const auto root_of = [&](std::string_view spelled, std::string_view stands) {
    spelled = without_slash(spelled);
    stands = without_slash(stands);
    BoardRoot root{};
    root.spelled_offset = names.add(spelled);
    root.spelled_bytes = static_cast<uint32_t>(spelled.size());
    root.stands_offset = names.add(stands);
    root.stands_bytes = static_cast<uint32_t>(stands.size());
    return root;
  };
  for (const auto& [spelled, stands] : options.roots) {
    h.roots[h.root_count++] = root_of(spelled, stands);
  }
  for (const std::string& tier : options.tiers) h.tiers[h.tier_count++] = root_of(tier, {});
  auto* slots = reinterpret_cast<uint64_t*>(memory_.data() + plan.slots_at);
  auto* entries = reinterpret_cast<BoardFile*>(memory_.data() + plan.files);
  for (uint64_t i = 0; i < files_; ++i) {
    const FileFigures& from = figures[i];
    BoardFile& to = entries[i];
    to.device = from.device;
    to.inode = from.inode;
    to.size = from.size;
    to.mtime_ns = from.mtime_ns;
    to.atime_ns = from.atime_ns;
    to.ctime_ns = from.ctime_ns;
    to.blocks = from.blocks;
    to.name_offset = names.add(paths[i]);
    to.name_bytes = static_cast<uint32_t>(paths[i].size());
    to.flags = from.is_link ? kIsLink : 0;
    to.mode = from.mode;
    to.links = from.links;
    to.uid = from.uid;
    to.gid = from.gid;
    to.block_bytes = from.block_bytes;
    const uint64_t hash = path_hash(paths[i].data(), paths[i].size());
    uint64_t at = hash & (plan.slots - 1);
    while (slots[at] != 0) {
      const uint64_t other = (slots[at] & 0xffffffff) - 1;
      if (paths[other] == paths[i]) refuse("there twice: " + std::string(paths[i]));
      at = (at + 1) & (plan.slots - 1);
    }
    slots[at] = (hash >> 32 << 32) | (i + 1);
  }
  h.magic = kBoardMagic;
  if (!view_.check(memory_.data(), memory_.nbytes())) refuse("the board contradicts itself");
}

FileBoard::~FileBoard() { header().closed.store(1, std::memory_order_release); }

BoardFile& FileBoard::entry(int64_t file) {
  if (file < 0 || static_cast<uint64_t>(file) >= files_) {
    refuse("file is " + std::to_string(file) + ", expected 0 to " + std::to_string(files_) +
           " - 1");
  }
  return reinterpret_cast<BoardFile*>(memory_.data() + header().files_offset)[file];
}

void FileBoard::place(int64_t file, int fd) {
  const BoardFile& original = entry(file);
  struct stat status;
  if (fstat(fd, &status) != 0) {
    throw Error(ErrorKind::kVolume, "a copy cannot be looked at", {}, -1, errno);
  }
  if (!S_ISREG(status.st_mode) || status.st_size != original.size) {
    refuse("the copy has " + std::to_string(status.st_size) + " bytes, expected a file of " +
           std::to_string(original.size));
  }
  publish(file, {Copy::kMemory, static_cast<uint32_t>(fd), status.st_dev, status.st_ino, {}});
}

void FileBoard::place_path(int64_t file, const std::string& path) {
  const BoardFile& original = entry(file);
  uint32_t tier = 0;
  uint32_t bytes = 0;
  for (;; ++tier) {
    if (tier == header().tier_count) refuse(path + " lies below none of the board's tiers");
    bytes = header().tiers[tier].spelled_bytes;
    const char* folder = reinterpret_cast<const char*>(memory_.data()) + header().names_offset +
                         header().tiers[tier].spelled_offset;
    if (path.size() > bytes + 1 && path[bytes] == '/' && memcmp(path.data(), folder, bytes) == 0) {
      break;
    }
  }
  const std::string_view name = std::string_view(path).substr(bytes + 1);
  if (name.size() >= kTierNameBytes || name.find('\0') != std::string_view::npos) {
    refuse(std::string(name) + ": expected at most " + std::to_string(kTierNameBytes - 1) +
           " bytes behind the tier's folder");
  }
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) {
    throw Error(ErrorKind::kVolume, path + ": a copy cannot be looked at", path, -1, errno);
  }
  if (!S_ISREG(status.st_mode) || status.st_size != original.size) {
    refuse(path + " has " + std::to_string(status.st_size) + " bytes, expected a file of " +
           std::to_string(original.size));
  }
  publish(file, {Copy::kTier, tier, status.st_dev, status.st_ino, name});
}

// The generation is odd while the entry changes; release: no reader sees the change before that.
void FileBoard::publish(int64_t file, const Target& target) {
  std::lock_guard lock(mutex_);
  BoardFile& e = entry(file);
  const uint32_t generation = e.generation.load(std::memory_order_relaxed);
  e.generation.store(generation + 1, std::memory_order_relaxed);
  e.copy.store(static_cast<uint32_t>(Copy::kNone), std::memory_order_release);
  unmap_copy(file);
  if (target.copy == Copy::kTier) {
    uint64_t words[kTierNameBytes / 8] = {};
    memcpy(words, target.tier_name.data(), target.tier_name.size());
    auto& name = reinterpret_cast<TierName*>(memory_.data() + header().tier_names_offset)[file];
    for (uint32_t i = 0; i < kTierNameBytes / 8; ++i) {
      name.words[i].store(words[i], std::memory_order_release);
    }
  }
  e.where.store(target.where, std::memory_order_release);
  e.copy_device.store(target.device, std::memory_order_release);
  e.copy_inode.store(target.inode, std::memory_order_release);
  add_device(target.device);
  map_copy(file, target.device, target.inode);
  e.copy.store(static_cast<uint32_t>(target.copy), std::memory_order_release);
  e.generation.store(generation + 2, std::memory_order_release);
}

// The identity of a memfd stays known, for those who have it open: it is never used again. That of
// a file may be.
void FileBoard::withdraw(int64_t file) {
  std::lock_guard lock(mutex_);
  BoardFile& e = entry(file);
  const uint32_t copy = e.copy.load(std::memory_order_relaxed);
  if (copy == static_cast<uint32_t>(Copy::kNone)) return;
  const uint32_t generation = e.generation.load(std::memory_order_relaxed);
  e.generation.store(generation + 1, std::memory_order_relaxed);
  e.copy.store(static_cast<uint32_t>(Copy::kNone), std::memory_order_release);
  if (copy == static_cast<uint32_t>(Copy::kTier)) unmap_copy(file);
  e.generation.store(generation + 2, std::memory_order_release);
}

bool FileBoard::placed(int64_t file) const {
  const_cast<FileBoard*>(this)->entry(file);  // checks the number
  return view_.place(file).copy != Copy::kNone;
}

void FileBoard::add_device(uint64_t device) {
  BoardHeader& h = header();
  const uint32_t count = h.device_count.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < count; ++i) {
    if (h.devices[i].load(std::memory_order_relaxed) == device) return;
  }
  if (count > kTiersMax) return;  // copies on more devices show their own figures
  h.devices[count].store(device, std::memory_order_relaxed);
  h.device_count.store(count + 1, std::memory_order_release);
}

void FileBoard::map_copy(int64_t file, uint64_t device, uint64_t inode) {
  auto* slots = reinterpret_cast<std::atomic<uint32_t>*>(memory_.data() + header().copies_offset);
  const uint64_t mask = header().copy_slots - 1;
  uint64_t at = copy_hash(device, inode) & mask;
  for (uint64_t probes = 0; probes < kCopyProbesMax; ++probes, at = (at + 1) & mask) {
    const uint32_t slot = slots[at].load(std::memory_order_relaxed);
    if (slot != 0 && slot != kWasUsed) continue;
    slots[at].store(static_cast<uint32_t>(file + 1), std::memory_order_release);
    return;
  }
  // No place near: this copy shows its own figures. Its bytes are right all the same.
}

void FileBoard::unmap_copy(int64_t file) {
  const BoardFile& e = entry(file);
  const uint64_t inode = e.copy_inode.load(std::memory_order_relaxed);
  if (inode == 0) return;
  auto* slots = reinterpret_cast<std::atomic<uint32_t>*>(memory_.data() + header().copies_offset);
  const uint64_t mask = header().copy_slots - 1;
  uint64_t at = copy_hash(e.copy_device.load(std::memory_order_relaxed), inode) & mask;
  for (uint64_t probes = 0; probes < kCopyProbesMax; ++probes, at = (at + 1) & mask) {
    const uint32_t slot = slots[at].load(std::memory_order_relaxed);
    if (slot == 0) return;
    if (slot != static_cast<uint32_t>(file + 1)) continue;
    // At the end of a run of places nobody looks further: they become free again.
    const bool last = slots[(at + 1) & mask].load(std::memory_order_relaxed) == 0;
    slots[at].store(last ? 0 : kWasUsed, std::memory_order_release);
    while (last && slots[at = (at - 1) & mask].load(std::memory_order_relaxed) == kWasUsed) {
      slots[at].store(0, std::memory_order_release);
    }
    return;
  }
}

}  // namespace headrace::preload
