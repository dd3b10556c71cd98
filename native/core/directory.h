// Directory: the sample directory of one segment, mapped from its `.hrd` file.
//
// Maps names to indices and indices to extents, labels and other columns, reading the file in
// place. Opening checks the header, the section table and the sizes that follow from them; each
// page is checked when first touched. Thread-safe, immutable. Format: docs/format.md.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/checked_file.h"
#include "core/column.h"
#include "core/name_tree.h"

namespace headrace {

struct Extent {
  uint32_t volume = 0;  // within the segment
  uint64_t offset = 0;
  uint64_t length = 0;
  uint32_t crc = 0;
  int64_t mtime_ns = -1;
};

// A section that is handed out as it lies in the file (labels, user columns).
struct ColumnInfo {
  std::string name;  // "label" or the user's name
  char kind = 'i';   // numpy kind: i, u, f
  unsigned width = 0;
  uint64_t offset = 0;
  uint64_t count = 0;
  bool label = false;
};

// Shared from itself: bindings must hand out plain native ownership, since readers let go of
// directories in threads that must not need Python.
// One entry of a folder: what names have between two slashes.
struct Child {
  enum Kind : uint8_t {
    kFile = 0,
    kFolder = 1,
    kFilePrefix = 2,  // a file, and other names begin with its whole name: perhaps a folder too
  };
  std::string name;
  uint64_t sample = 0;     // the file's, or the first one in the folder
  uint64_t next_rank = 0;  // where the listing goes on behind this entry
  Kind kind = kFile;
};

class Directory : public std::enable_shared_from_this<Directory> {
 public:
  // `fd` stays the caller's. Throws Error(kCorruptStore) or Error(kVolume).
  static std::shared_ptr<Directory> open(int fd, const std::string& path);

  uint64_t samples() const { return samples_; }
  uint64_t extents() const { return extents_; }
  const std::string& path() const { return file_.path(); }
  std::span<const uint8_t, 16> uuid() const {
    return std::span<const uint8_t, 16>(reinterpret_cast<const uint8_t*>(file_.data()) + 80, 16);
  }
  std::span<const std::byte> header() const { return {file_.data(), 4096}; }

  bool has_crc() const { return row_.crc != 0; }
  bool has_mtime() const { return row_.mtime != 0; }
  bool has_labels() const { return label_.width != 0; }

  // REQUIRES: extent < extents().
  Extent extent(uint64_t extent) const;
  void prefetch_extent(uint64_t extent) const {
    __builtin_prefetch(file_.data() + rows_offset_ + extent * row_.bytes);
  }
  // The extents of a sample: [first, last). REQUIRES: sample < samples().
  std::pair<uint64_t, uint64_t> extents_of(uint64_t sample) const;
  void prefetch_sample(uint64_t sample) const;
  uint32_t part(uint64_t extent) const { return part_ ? static_cast<uint32_t>(part_[extent]) : 0; }
  const std::vector<std::string>& part_names() const { return part_names_; }
  const std::vector<std::string>& class_names() const { return class_names_; }

  // -1 where there is none. REQUIRES: sample < samples().
  int64_t label(uint64_t sample) const;
  const std::vector<ColumnInfo>& columns() const { return columns_; }
  // The bytes of a column, checked. They live as long as the directory.
  const std::byte* column_bytes(const ColumnInfo& column) const {
    return file_.at(column.offset, column.count * column.width);
  }

  // indices[i] = the sample named queries[i], or -1. Large requests use several threads.
  void find(std::span<const std::string_view> queries, std::span<int64_t> indices) const;
  // REQUIRES: sample < samples().
  void name(uint64_t sample, std::string* name) const;
  // The sample at `rank` in sorted name order. REQUIRES: rank < samples().
  uint64_t index_at_rank(uint64_t rank) const;

  // At most `limit` entries of the folder whose names begin with `prefix` ("" or "a/b/"), from
  // `first_rank` on. Folders are stepped over: the cost follows from what is listed.
  std::vector<Child> children(std::string_view prefix, uint64_t first_rank, uint64_t limit) const;
  // The first rank whose name is not less than `key`; samples() where all are less.
  uint64_t seek(std::string_view key) const { return names_.lower_bound(key); }
  // The sample of this name, and the first one whose name goes on with a slash; -1 for none.
  std::pair<int64_t, int64_t> lookup(std::string_view path) const;

  std::vector<uint64_t> damaged_blocks() const { return file_.damaged_blocks(); }
  void assert_whole() const { file_.assert_whole(); }

 private:
  struct Section;
  struct Row {
    unsigned volume = 0, offset = 0, length = 0, crc = 0, mtime = 0, bytes = 0;
  };
  Directory(std::unique_ptr<Mapping> mapping, const std::string& path);
  void read_header();
  std::vector<Section> read_sections() const;
  void use_sections(const std::vector<Section>& sections);
  void use_rows(const Section& section);
  void use_label(const Section& section);
  void use_user_column(const Section& section);
  void use_names(const std::vector<Section>& sections);
  void find_some(std::span<const std::string_view> queries, std::span<int64_t> indices) const;
  Column index_column(const Section& section, uint64_t count, const char* what) const;
  std::vector<std::string> strings(const Section& section) const;
  [[noreturn]] void fail(const std::string& what, uint64_t offset) const;

  CheckedFile file_;
  uint64_t samples_ = 0;
  uint64_t extents_ = 0;
  uint32_t parts_ = 1;
  uint32_t section_count_ = 0;
  uint64_t payload_offset_ = 0;
  Row row_;
  uint64_t rows_offset_ = 0;
  Column first_extent_;
  Column part_;
  Column rank_to_index_;
  Column index_to_rank_;
  ColumnInfo label_;
  std::vector<ColumnInfo> columns_;
  std::vector<std::string> part_names_{""};
  std::vector<std::string> class_names_;
  NameTree names_;
};

}  // namespace headrace
