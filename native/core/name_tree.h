// NameTree: the sorted, front-coded names of a segment, searched in place.
//
// Level 0 holds all names in blocks of 16; each level above holds the first name of each block
// below. A look-up scans one block per level. Scanning never rebuilds a name: it carries only the
// length of the prefix that the query shares with the name before. Bulk look-ups go level by level
// over a group of queries with prefetching, so that cache misses overlap.
//
// All bytes are untrusted: bounds are checked in every step and contradictions throw
// Error(kCorruptStore). Format: docs/format.md, "The name tree".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/column.h"

namespace headrace {

inline constexpr uint64_t kNamesPerBlock = 16;
inline constexpr uint64_t kNameBytesMax = 65535;
inline constexpr unsigned kNameLevelsMax = 16;

struct NameLevel {
  Column offsets;            // blocks + 1 elements
  uint64_t blob_offset = 0;  // in the file
  uint64_t blob_bytes = 0;
  uint64_t names = 0;
};

class NameTree {
 public:
  NameTree() = default;
  // REQUIRES: levels.size() >= 1 unless there are no names; counts agree level by level.
  NameTree(const CheckedFile* file, std::vector<NameLevel> levels);

  // ranks[i] = the rank of queries[i] among the sorted names, or -1.
  void find(std::span<const std::string_view> queries, std::span<int64_t> ranks) const;

  // The first rank whose name is not less than `key`; the number of names where all are less.
  uint64_t lower_bound(std::string_view key) const;

  // Appends the name of `rank` to `*name` after clearing it. REQUIRES: rank < names.
  void name(uint64_t rank, std::string* name) const;

 private:
  struct Block {
    const std::byte* begin;
    const std::byte* end;
    uint64_t names;
  };
  Block block(const NameLevel& level, uint64_t index) const;
  [[noreturn]] void fail(const char* what, const std::byte* where) const;
  uint64_t varint(const std::byte*& p, const std::byte* end) const;
  struct Found {
    int64_t position;  // the last name <= query, or -1
    bool exact;
  };
  Found scan(const Block& block, std::string_view query) const;

  const CheckedFile* file_ = nullptr;
  std::vector<NameLevel> levels_;
};

// What a writer needs: the sorted order and the levels' sections.
struct BuiltLevel {
  std::vector<uint64_t> offsets;
  std::vector<uint8_t> blob;
};
struct BuiltNames {
  std::vector<int64_t> rank_to_index;  // empty: the names came sorted
  std::vector<BuiltLevel> levels;
};

// Builds the tree of `names`. Throws Error(kInvalidArgument) for a name that is too long or
// appears twice.
BuiltNames build_names(std::span<const uint8_t> blob, std::span<const uint64_t> offsets);

}  // namespace headrace
