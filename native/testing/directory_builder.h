// Writes the bytes of a sample directory (.hrd) for tests, straight from docs/format.md.
//
// A second, plain implementation of the format: it shares with the product only the checksum and
// `build_names`. An image can be damaged on purpose and sealed again, so that a test reaches the
// checks that lie behind the checksums. For tests only: it trusts its caller.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "core/crc32c.h"
#include "core/directory.h"
#include "core/name_tree.h"

namespace headrace::testing {

enum Kind : uint32_t {
  kExtentRows = 1,
  kFirstExtent = 2,
  kPart = 3,
  kPartNames = 4,
  kLabel = 5,
  kClassNames = 6,
  kUserColumn = 7,
  kNameOffsets = 8,
  kNameBlob = 9,
  kRankToIndex = 10,
  kIndexToRank = 11,
};

struct ExtentSpec {
  uint32_t volume = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint32_t crc = 0;
  int64_t mtime_ns = -1;
  uint32_t part = 0;
};

struct UserColumnSpec {
  std::string name;
  char kind = 'i';
  unsigned width = 8;
  std::vector<uint8_t> bytes;
};

struct DirectorySpec {
  std::vector<std::string> names;                // one per sample
  std::vector<std::vector<ExtentSpec>> extents;  // one list per sample
  std::vector<std::string> part_names{""};
  std::vector<int64_t> labels;  // empty: no section
  std::vector<std::string> class_names;
  std::vector<UserColumnSpec> columns;
  bool crc = true;
  bool mtime = false;
  unsigned volume_width = 2;
  unsigned offset_width = 5;
  unsigned length_width = 4;
  unsigned label_width = 4;
  unsigned index_width = 3;  // of first extent, rank columns and name offsets
};

class DirectoryImage {
 public:
  std::vector<std::byte> bytes;

  template <class T>
  T get(uint64_t offset) const {
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
  }
  template <class T>
  void put(uint64_t offset, T value) {
    std::memcpy(bytes.data() + offset, &value, sizeof value);
  }

  uint64_t payload() const { return get<uint64_t>(72); }
  uint32_t sections() const { return get<uint32_t>(40); }

  // Where the table entry of a section lies; `level` for the name sections.
  uint64_t entry(uint32_t kind, unsigned level = 0) const {
    for (uint32_t i = 0; i < sections(); ++i) {
      const uint64_t at = 128 + 64 * i;
      const bool leveled = kind == kNameOffsets || kind == kNameBlob;
      if (get<uint32_t>(at) == kind && (!leveled || get<uint8_t>(at + 32) == level)) return at;
    }
    throw std::logic_error("the image has no section of this kind");
  }
  uint64_t section(uint32_t kind, unsigned level = 0) const {
    return get<uint64_t>(entry(kind, level) + 8);
  }

  // Makes all checksums agree with the bytes again. False: the header's sizes make no sense.
  bool seal() {
    const uint64_t start = payload();
    const uint64_t count = get<uint64_t>(56);
    if (start > bytes.size() || count > (bytes.size() - start + 65535) / 65536 ||
        4096 + 4 * count > start) {
      return false;
    }
    for (uint64_t block = 0; block < count; ++block) {
      const uint64_t at = start + block * 65536;
      put(4096 + 4 * block,
          crc32c(0, bytes.data() + at, std::min<uint64_t>(65536, bytes.size() - at)));
    }
    put(64, crc32c(0, bytes.data() + 4096, 4 * count));
    seal_header();
    return true;
  }
  void seal_header() {
    put<uint32_t>(12, 0);
    put(12, crc32c(0, bytes.data(), 4096));
  }
};

// A memory file with these bytes; the caller closes it.
inline int memory_file(std::span<const std::byte> bytes) {
  const int fd = memfd_create("headrace-test", MFD_CLOEXEC);
  if (fd < 0 || pwrite(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("cannot write a memory file");
  }
  return fd;
}

inline std::shared_ptr<Directory> open_image(const DirectoryImage& image,
                                             const std::string& path = "image.hrd") {
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } file{memory_file(image.bytes)};
  return Directory::open(file.fd, path);
}

class DirectoryBuilder {
 public:
  explicit DirectoryBuilder(const DirectorySpec& spec) : spec_(spec) {}

  DirectoryImage build() {
    add_rows();
    if (spec_.part_names.size() > 1 || !spec_.part_names[0].empty()) {
      add(kPartNames, 0, strings(spec_.part_names), spec_.part_names.size());
    }
    if (!spec_.labels.empty()) {
      std::vector<uint64_t> values(spec_.labels.begin(), spec_.labels.end());
      add(kLabel, spec_.label_width, integers(values, spec_.label_width), values.size());
    }
    if (!spec_.class_names.empty()) {
      add(kClassNames, 0, strings(spec_.class_names), spec_.class_names.size());
    }
    for (const UserColumnSpec& column : spec_.columns) {
      Entry& e = add(kUserColumn, column.width, column.bytes, column.bytes.size() / column.width);
      e.parameters[0] = static_cast<uint8_t>(column.kind);
      e.name = column.name;
    }
    add_names();
    return write();
  }

 private:
  struct Entry {
    uint32_t kind, width;
    std::vector<uint8_t> bytes;
    uint64_t count;
    uint8_t parameters[8];
    std::string name;
  };

  Entry& add(uint32_t kind, uint32_t width, std::vector<uint8_t> bytes, uint64_t count) {
    entries_.push_back({kind, width, std::move(bytes), count, {}, {}});
    return entries_.back();
  }

  static void append(std::vector<uint8_t>* out, uint64_t value, unsigned width) {
    for (unsigned i = 0; i < width; ++i) out->push_back(static_cast<uint8_t>(value >> (8 * i)));
  }
  static std::vector<uint8_t> integers(const std::vector<uint64_t>& values, unsigned width) {
    std::vector<uint8_t> out;
    for (const uint64_t value : values) append(&out, value, width);
    return out;
  }
  static std::vector<uint8_t> strings(const std::vector<std::string>& list) {
    std::vector<uint8_t> out;
    for (const std::string& s : list) {
      append(&out, s.size(), 2);
      out.insert(out.end(), s.begin(), s.end());
    }
    return out;
  }

  void add_rows() {
    std::vector<uint8_t> rows;
    std::vector<uint64_t> first, part;
    for (const auto& sample : spec_.extents) {
      first.push_back(part.size());
      for (const ExtentSpec& e : sample) {
        append(&rows, e.volume, spec_.volume_width);
        append(&rows, e.offset, spec_.offset_width);
        append(&rows, e.length, spec_.length_width);
        append(&rows, e.crc, spec_.crc ? 4 : 0);
        append(&rows, static_cast<uint64_t>(e.mtime_ns), spec_.mtime ? 8 : 0);
        part.push_back(e.part);
      }
    }
    first.push_back(part.size());
    extents_ = part.size();
    const unsigned width = spec_.volume_width + spec_.offset_width + spec_.length_width +
                           (spec_.crc ? 4 : 0) + (spec_.mtime ? 8 : 0);
    Entry& e = add(kExtentRows, width, rows, extents_);
    e.parameters[0] = static_cast<uint8_t>(spec_.volume_width);
    e.parameters[1] = static_cast<uint8_t>(spec_.offset_width);
    e.parameters[2] = static_cast<uint8_t>(spec_.length_width);
    e.parameters[3] = spec_.crc ? 4 : 0;
    e.parameters[4] = spec_.mtime ? 8 : 0;
    if (extents_ != spec_.extents.size()) {
      add(kFirstExtent, spec_.index_width, integers(first, spec_.index_width), first.size());
    }
    if (spec_.part_names.size() > 1) add(kPart, 2, integers(part, 2), part.size());
  }

  void add_names() {
    std::vector<uint8_t> blob;
    std::vector<uint64_t> offsets{0};
    for (const std::string& name : spec_.names) {
      blob.insert(blob.end(), name.begin(), name.end());
      offsets.push_back(blob.size());
    }
    const BuiltNames built = build_names(blob, offsets);
    for (size_t level = 0; level < built.levels.size(); ++level) {
      const BuiltLevel& l = built.levels[level];
      const uint64_t names = level == 0 ? spec_.names.size()  //
                                        : built.levels[level - 1].offsets.size() - 1;
      add(kNameOffsets, spec_.index_width, integers(l.offsets, spec_.index_width), l.offsets.size())
          .parameters[0] = static_cast<uint8_t>(level);
      add(kNameBlob, 0, l.blob, names).parameters[0] = static_cast<uint8_t>(level);
    }
    if (built.rank_to_index.empty()) return;
    std::vector<uint64_t> forward(built.rank_to_index.begin(), built.rank_to_index.end());
    std::vector<uint64_t> back(forward.size());
    for (uint64_t rank = 0; rank < forward.size(); ++rank) back[forward[rank]] = rank;
    add(kRankToIndex, spec_.index_width, integers(forward, spec_.index_width), forward.size());
    add(kIndexToRank, spec_.index_width, integers(back, spec_.index_width), back.size());
  }

  DirectoryImage write() {
    // Where the payload starts depends on the number of checksums, which depends on its size.
    uint64_t payload_bytes = 0;
    for (const Entry& e : entries_) {
      payload_bytes = (payload_bytes + 63) / 64 * 64 + e.bytes.size() + (e.width == 0 ? 0 : 8);
    }
    const uint64_t checksums = (payload_bytes + 65535) / 65536;
    const uint64_t payload = 4096 + (4 * checksums + 4095) / 4096 * 4096;
    DirectoryImage image;
    image.bytes.resize(payload + payload_bytes);
    std::memcpy(image.bytes.data(), "HRDIR\0\r\n", 8);
    image.put<uint32_t>(8, 1);
    image.put<uint64_t>(16, image.bytes.size());
    image.put<uint64_t>(24, spec_.names.size());
    image.put<uint64_t>(32, extents_);
    image.put<uint32_t>(40, static_cast<uint32_t>(entries_.size()));
    image.put<uint32_t>(44, 65536);
    image.put<uint64_t>(48, 4096);
    image.put<uint64_t>(56, checksums);
    image.put<uint32_t>(68, static_cast<uint32_t>(spec_.part_names.size()));
    image.put<uint64_t>(72, payload);
    for (uint8_t i = 0; i < 16; ++i) image.put<uint8_t>(80 + i, 0xa0 + i);
    uint64_t at = payload;
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& e = entries_[i];
      at = (at + 63) / 64 * 64;
      const uint64_t row = 128 + 64 * i;
      image.put(row, e.kind);
      image.put(row + 4, e.width);
      image.put(row + 8, at);
      image.put<uint64_t>(row + 16, e.bytes.size());
      image.put(row + 24, e.count);
      std::memcpy(image.bytes.data() + row + 32, e.parameters, 8);
      std::memcpy(image.bytes.data() + row + 40, e.name.data(),
                  std::min<size_t>(24, e.name.size()));
      if (!e.bytes.empty()) std::memcpy(image.bytes.data() + at, e.bytes.data(), e.bytes.size());
      at += e.bytes.size() + (e.width == 0 ? 0 : 8);
    }
    image.seal();
    return image;
  }

  DirectorySpec spec_;
  std::vector<Entry> entries_;
  uint64_t extents_ = 0;
};

inline DirectoryImage build_directory(const DirectorySpec& spec) {
  return DirectoryBuilder(spec).build();
}

// `n` samples with one extent each, named s00000000, s00000001, ... and back to back in volume 0.
inline DirectorySpec plain_spec(size_t n, uint64_t length = 100) {
  DirectorySpec spec;
  for (size_t i = 0; i < n; ++i) {
    std::string digits = std::to_string(i);
    spec.names.push_back("s" + std::string(8 - digits.size(), '0') + digits);
    spec.extents.push_back({{0, i * length, length, 0, -1, 0}});
  }
  return spec;
}

// Every optional section at once: several parts, labels, class names, user columns, names that are
// not in index order, checksums and times.
inline DirectorySpec full_spec(size_t n) {
  DirectorySpec spec;
  spec.part_names = {"jpg", "json", "txt"};
  spec.class_names = {"cat", "dog", ""};
  spec.mtime = true;
  UserColumnSpec weight{"weight", 'f', 4, {}}, flag{"flag", 'u', 1, {}};
  for (size_t i = 0; i < n; ++i) {
    spec.names.push_back("folder/" + std::to_string((i * 7919) % 1000003) + ".x");
    std::vector<ExtentSpec> extents;
    for (uint32_t part = 0; part < 3; ++part) {
      if (part != 0 && (i + part) % 3 == 0) continue;
      const auto salt = static_cast<uint32_t>(3 * i + part);
      extents.push_back({salt % 5, uint64_t{salt} * 1000, salt % 977, salt * 2654435761u,
                         int64_t{1700000000} * 1000000000 + salt, part});
    }
    spec.extents.push_back(std::move(extents));
    spec.labels.push_back(static_cast<int64_t>(i % 4) - 1);
    const float value = static_cast<float>(i) / 4;
    const auto* raw = reinterpret_cast<const uint8_t*>(&value);
    weight.bytes.insert(weight.bytes.end(), raw, raw + 4);
    flag.bytes.push_back(static_cast<uint8_t>(i));
  }
  spec.columns = {weight, flag};
  return spec;
}

}  // namespace headrace::testing
