#include "core/name_tree.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"

namespace headrace {
namespace {

// Queries that walk the tree together. 16 overlaps enough misses; 32 measured the same.
constexpr size_t kGroup = 16;

uint64_t common_prefix(const char* a, const char* b, uint64_t limit) {
  uint64_t i = 0;
  for (; i + 8 <= limit; i += 8) {
    uint64_t x, y;
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    if (x != y) return i + static_cast<uint64_t>(__builtin_ctzll(x ^ y)) / 8;
  }
  while (i < limit && a[i] == b[i]) ++i;
  return i;
}

}  // namespace

NameTree::NameTree(const CheckedFile* file, std::vector<NameLevel> levels)
    : file_(file), levels_(std::move(levels)) {}

void NameTree::fail(const char* what, const std::byte* where) const {
  const auto offset = static_cast<int64_t>(where - file_->data());
  throw Error(ErrorKind::kCorruptStore,
              file_->path() + ": the name tree " + what + " (offset " + std::to_string(offset) +
                  "). The file is damaged or was not written by headrace; pack or index again.",
              file_->path(), offset);
}

inline uint64_t NameTree::varint(const std::byte*& p, const std::byte* end) const {
  if (p < end && (static_cast<uint8_t>(*p) & 0x80) == 0) return static_cast<uint8_t>(*p++);
  uint64_t value = 0;
  for (unsigned shift = 0; shift < 21; shift += 7) {  // three bytes hold any name length
    if (p >= end) fail("ends inside a number", p);
    const auto byte = static_cast<uint8_t>(*p++);
    value |= uint64_t{byte & 0x7fu} << shift;
    if ((byte & 0x80) == 0) return value;
  }
  fail("holds a length over 2097151", p);
}

inline NameTree::Block NameTree::block(const NameLevel& level, uint64_t index) const {
  const uint64_t begin = level.offsets[index];
  const uint64_t end = level.offsets[index + 1];
  if (begin >= end || end > level.blob_bytes) {
    fail("has a block outside its section",
         file_->data() + level.offsets.offset + index * level.offsets.width);
  }
  const std::byte* bytes = file_->at(level.blob_offset + begin, end - begin);
  const uint64_t names = std::min(kNamesPerBlock, level.names - index * kNamesPerBlock);
  return {bytes, bytes + (end - begin), names};
}

NameTree::Found NameTree::scan(const Block& block, std::string_view query) const {
  const std::byte* p = block.begin;
  uint64_t length = varint(p, block.end);
  if (length > kNameBytesMax || length > static_cast<uint64_t>(block.end - p)) {
    fail("has a name that leaves its block", p);
  }
  // Invariant below: the name before is smaller than the query and shares `matched` bytes with it.
  uint64_t matched = common_prefix(reinterpret_cast<const char*>(p), query.data(),
                                   std::min<uint64_t>(length, query.size()));
  if (matched == length && matched == query.size()) return {0, true};
  const bool smaller = matched == length ||
                       (matched < query.size() &&
                        static_cast<uint8_t>(p[matched]) < static_cast<uint8_t>(query[matched]));
  if (!smaller) return {-1, false};
  p += length;
  for (uint64_t i = 1; i < block.names; ++i) {
    uint64_t lcp, suffix;
    if (block.end - p >= 2 && ((static_cast<uint8_t>(p[0]) | static_cast<uint8_t>(p[1])) < 0x80)) {
      lcp = static_cast<uint8_t>(p[0]);  // both numbers fit a byte: nearly always
      suffix = static_cast<uint8_t>(p[1]);
      p += 2;
    } else {
      lcp = varint(p, block.end);
      suffix = varint(p, block.end);
    }
    if (lcp > length || suffix > static_cast<uint64_t>(block.end - p) ||
        lcp + suffix > kNameBytesMax) {
      fail("has a name that contradicts the one before it", p);
    }
    length = lcp + suffix;
    if (lcp < matched) return {static_cast<int64_t>(i) - 1, false};
    // Most names that share exactly `matched` bytes differ in the next one already.
    if (lcp == matched && (suffix == 0 || matched == query.size() ||
                           static_cast<uint8_t>(*p) >= static_cast<uint8_t>(query[matched]))) {
      const uint64_t more = common_prefix(reinterpret_cast<const char*>(p), query.data() + matched,
                                          std::min<uint64_t>(suffix, query.size() - matched));
      const bool name_ends = more == suffix;
      const bool query_ends = matched + more == query.size();
      if (name_ends && query_ends) return {static_cast<int64_t>(i), true};
      if (query_ends || (!name_ends && static_cast<uint8_t>(p[more]) >
                                           static_cast<uint8_t>(query[matched + more]))) {
        return {static_cast<int64_t>(i) - 1, false};
      }
      matched += more;
    }
    p += suffix;
  }
  return {static_cast<int64_t>(block.names) - 1, false};
}

void NameTree::find(std::span<const std::string_view> queries, std::span<int64_t> ranks) const {
  if (levels_.empty()) {
    std::fill(ranks.begin(), ranks.end(), -1);
    return;
  }
  for (size_t start = 0; start < queries.size(); start += kGroup) {
    const size_t count = std::min(kGroup, queries.size() - start);
    std::array<int64_t, kGroup> at{};  // block to scan next, or -1
    std::array<bool, kGroup> exact{};
    for (size_t depth = levels_.size(); depth-- > 0;) {
      const NameLevel& level = levels_[depth];
      for (size_t i = 0; i < count; ++i) {
        if (at[i] >= 0) level.offsets.prefetch(static_cast<uint64_t>(at[i]));
      }
      for (size_t i = 0; i < count; ++i) {
        if (at[i] < 0) continue;
        const uint64_t begin = level.offsets[static_cast<uint64_t>(at[i])];
        if (begin >= level.blob_bytes) continue;  // `block` below reports it
        const std::byte* bytes = file_->data() + level.blob_offset + begin;
        for (int line = 0; line < 4; ++line) __builtin_prefetch(bytes + 64 * line);
      }
      for (size_t i = 0; i < count; ++i) {
        if (at[i] < 0) continue;
        const auto index = static_cast<uint64_t>(at[i]);
        const Found found = scan(block(level, index), queries[start + i]);
        exact[i] = found.exact;
        at[i] =
            found.position < 0 ? -1 : static_cast<int64_t>(index * kNamesPerBlock) + found.position;
      }
    }
    for (size_t i = 0; i < count; ++i) ranks[start + i] = exact[i] ? at[i] : -1;
  }
}

uint64_t NameTree::lower_bound(std::string_view key) const {
  uint64_t at = 0;
  for (size_t depth = levels_.size(); depth-- > 0;) {
    const Found found = scan(block(levels_[depth], at), key);
    if (found.position < 0) return 0;  // less than the first name of all
    at = at * kNamesPerBlock + static_cast<uint64_t>(found.position);
    if (depth == 0 && !found.exact) ++at;
  }
  return at;
}

void NameTree::name(uint64_t rank, std::string* name) const {
  const Block b = block(levels_[0], rank / kNamesPerBlock);
  const std::byte* p = b.begin;
  name->clear();
  for (uint64_t i = 0; i <= rank % kNamesPerBlock; ++i) {
    const uint64_t lcp = i == 0 ? 0 : varint(p, b.end);
    const uint64_t suffix = varint(p, b.end);
    if (lcp > name->size() || suffix > static_cast<uint64_t>(b.end - p) ||
        lcp + suffix > kNameBytesMax) {
      fail("has a name that contradicts the one before it", p);
    }
    name->resize(lcp);
    name->append(reinterpret_cast<const char*>(p), suffix);
    p += suffix;
  }
}

namespace {

void put_varint(std::vector<uint8_t>* out, uint64_t value) {
  while (value >= 0x80) {
    out->push_back(static_cast<uint8_t>(value | 0x80));
    value >>= 7;
  }
  out->push_back(static_cast<uint8_t>(value));
}

// Sorting moves 16 bytes per name: the first 8 bytes of the name as a number, and its index.
struct SortKey {
  uint64_t prefix;
  uint64_t index;
};

class Names {
 public:
  Names(std::span<const uint8_t> blob, std::span<const uint64_t> offsets)
      : blob_(reinterpret_cast<const char*>(blob.data())), offsets_(offsets) {
    for (size_t i = 0; i + 1 < offsets.size(); ++i) {
      if (offsets[i + 1] < offsets[i] || offsets[i + 1] > blob.size()) {
        throw Error(ErrorKind::kInvalidArgument,
                    "name offsets are not ascending within the blob at name " + std::to_string(i));
      }
      if (offsets[i + 1] - offsets[i] > kNameBytesMax) {
        throw Error(ErrorKind::kInvalidArgument, "name " + std::to_string(i) + " has " +
                                                     std::to_string(offsets[i + 1] - offsets[i]) +
                                                     " bytes, at most 65535 fit");
      }
    }
  }
  size_t size() const { return offsets_.size() - 1; }
  std::string_view operator[](size_t i) const {
    return {blob_ + offsets_[i], offsets_[i + 1] - offsets_[i]};
  }

 private:
  const char* blob_;
  std::span<const uint64_t> offsets_;
};

std::vector<int64_t> sorted_order(const Names& names) {
  std::vector<SortKey> keys(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    unsigned char bytes[8] = {};
    const std::string_view name = names[i];
    if (!name.empty()) std::memcpy(bytes, name.data(), std::min<size_t>(8, name.size()));
    uint64_t prefix = 0;
    for (const unsigned char byte : bytes) prefix = prefix << 8 | byte;
    keys[i] = {prefix, i};
  }
  std::sort(keys.begin(), keys.end(), [&](const SortKey& a, const SortKey& b) {
    if (a.prefix != b.prefix) return a.prefix < b.prefix;
    return names[a.index] < names[b.index];
  });
  std::vector<int64_t> order(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) order[i] = static_cast<int64_t>(keys[i].index);
  return order;
}

}  // namespace

BuiltNames build_names(std::span<const uint8_t> blob, std::span<const uint64_t> offsets) {
  BuiltNames built;
  if (offsets.empty()) {
    throw Error(ErrorKind::kInvalidArgument, "name offsets are empty, expected n + 1 of them");
  }
  const Names names(blob, offsets);
  bool sorted = true;
  for (size_t i = 1; i < names.size() && sorted; ++i) sorted = names[i - 1] < names[i];
  if (!sorted) built.rank_to_index = sorted_order(names);
  const auto index_of = [&](uint64_t rank) {
    return sorted ? rank : static_cast<uint64_t>(built.rank_to_index[rank]);
  };
  uint64_t stride = 1;  // level j holds the names of rank 0, 16^j, 2 * 16^j, ...
  for (uint64_t left = names.size(); left != 0; stride *= kNamesPerBlock) {
    BuiltLevel level;
    level.offsets.reserve(left / kNamesPerBlock + 2);
    std::string_view previous;
    for (uint64_t i = 0; i < left; ++i) {
      const std::string_view name = names[index_of(i * stride)];
      if (i > 0 && name == previous) {
        throw Error(ErrorKind::kInvalidArgument,
                    "two samples are named '" + std::string(name) + "'; names must be unique");
      }
      uint64_t lcp = 0;
      if (i % kNamesPerBlock == 0) {
        level.offsets.push_back(level.blob.size());
      } else {
        lcp = common_prefix(previous.data(), name.data(), std::min(previous.size(), name.size()));
        put_varint(&level.blob, lcp);
      }
      put_varint(&level.blob, name.size() - lcp);
      level.blob.insert(level.blob.end(), name.begin() + static_cast<int64_t>(lcp), name.end());
      previous = name;
    }
    level.offsets.push_back(level.blob.size());
    level.blob.shrink_to_fit();
    built.levels.push_back(std::move(level));
    if (left <= kNamesPerBlock) break;
    left = (left + kNamesPerBlock - 1) / kNamesPerBlock;
  }
  return built;
}

}  // namespace headrace
