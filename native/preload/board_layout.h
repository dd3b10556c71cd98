// The file board as it lies in shared memory: which files there are below the roots, and where each
// can be opened fastest. docs/preload.md draws it.
//
// Written by the daemon alone; whoever else maps it does so read-only, and believes nothing in it
// before `BoardView` has checked it. What never changes stands in plain members; what changes while
// others look is atomic, guarded by a generation (a sequence lock with one writer).
//
// Used by the daemon and by the preload shim, so: no libstdc++ beyond headers, no exceptions.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace::preload {

inline constexpr uint64_t kBoardMagic = 0x31647261'6f627268;  // "hrboard1"
inline constexpr uint32_t kBoardVersion = 1;
inline constexpr uint64_t kFilesMax = uint64_t{1} << 31;
inline constexpr uint64_t kPathBytesMax = 4095;
inline constexpr uint32_t kRootsMax = 64;
inline constexpr uint32_t kTiersMax = 16;
// What follows a tier's folder in the path of a copy.
inline constexpr uint32_t kTierNameBytes = 64;

static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

enum class Copy : uint32_t {
  kNone = 0,    // open the original
  kMemory = 1,  // descriptor `where` of the daemon: a sealed memfd
  kTier = 2,    // a file of local tier number `where`, named in the tier names
};

// Flags of a board. The user's word: nothing below the roots changes, so nobody need look.
inline constexpr uint32_t kImmutable = 1;

// Flags of a file. The path is a symbolic link; the figures are its target's.
inline constexpr uint32_t kIsLink = 1;

struct BoardFile {
  // What the original is.
  int64_t device;
  int64_t inode;
  int64_t size;
  int64_t mtime_ns;
  int64_t atime_ns;
  int64_t ctime_ns;
  int64_t blocks;
  uint64_t name_offset;  // into the names
  uint32_t name_bytes;
  uint32_t flags;  // kIsLink
  uint32_t mode;
  uint32_t links;
  uint32_t uid;
  uint32_t gid;
  uint32_t block_bytes;
  // Where its copy is. Odd: being written; a reader that meets that opens the original.
  std::atomic<uint32_t> generation;
  std::atomic<uint32_t> copy;   // Copy
  std::atomic<uint32_t> where;  // see Copy
  std::atomic<uint64_t> copy_device;
  std::atomic<uint64_t> copy_inode;
};
static_assert(sizeof(BoardFile) == 120);

// The end of the path of a copy on a tier, padded with zeros: at least one.
struct TierName {
  std::atomic<uint64_t> words[kTierNameBytes / 8];
};

// A prefix that programs may write, and what stands in its place on the board.
struct BoardRoot {
  uint64_t spelled_offset;  // into the names
  uint64_t stands_offset;
  uint32_t spelled_bytes;
  uint32_t stands_bytes;
};

// Offsets are from the start of the memory and are multiples of 8.
struct BoardHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t flags;  // kImmutable
  uint64_t nbytes;
  uint64_t files;
  uint64_t slots;         // of the table of paths: a power of two
  uint64_t copy_slots;    // of the table of copies: likewise
  uint64_t files_offset;  // BoardFile[files]
  // uint64_t[slots]: upper half of the path's hash, file + 1; 0: free. Linear probing.
  uint64_t slots_offset;
  uint64_t copies_offset;  // std::atomic<uint32_t>[copy_slots]: file + 1; 0: free; ~0: was used
  uint64_t names_offset;   // the paths
  uint64_t names_bytes;
  uint64_t tier_names_offset;  // TierName[files]
  BoardRoot roots[kRootsMax];
  BoardRoot tiers[kTiersMax];  // `spelled` is the folder
  uint32_t root_count;
  uint32_t tier_count;
  std::atomic<uint32_t> closed;  // 1: the daemon has let go of it
  // Devices on which copies lie: so few that a `stat` of anything else is told apart at once.
  std::atomic<uint32_t> device_count;
  std::atomic<uint64_t> devices[kTiersMax + 1];
};

inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Of a path. Not keyed: whoever chooses the names chooses the collisions, and waits for them.
inline uint64_t path_hash(const char* path, uint64_t bytes) {
  uint64_t hash = bytes * 0x9e3779b97f4a7c15;
  while (bytes >= 8) {
    uint64_t word;
    __builtin_memcpy(&word, path, 8);
    hash = mix(hash ^ word, 0xa0761d6478bd642f);
    path += 8;
    bytes -= 8;
  }
  uint64_t word = 0;
  for (uint64_t i = 0; i < bytes; ++i) {
    word |= static_cast<uint64_t>(static_cast<unsigned char>(path[i])) << (8 * i);
  }
  return mix(hash ^ word ^ 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3);
}

inline uint64_t copy_hash(uint64_t device, uint64_t inode) {
  return mix(inode ^ 0xe7037ed1a0b428db, device ^ 0x8ebc6af09c88c6e3);
}

// Copies of one board found by (device, inode): entries are looked for this far from their place.
inline constexpr uint64_t kCopyProbesMax = 128;
inline constexpr uint32_t kWasUsed = ~uint32_t{0};

}  // namespace headrace::preload
