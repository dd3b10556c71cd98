#include "core/directory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <thread>

#include "core/crc32c.h"
#include "core/error.h"

namespace headrace {
namespace {

constexpr char kMagic[8] = {'H', 'R', 'D', 'I', 'R', '\0', '\r', '\n'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 4096;
constexpr uint64_t kSectionTableOffset = 128;
constexpr uint64_t kSectionEntryBytes = 64;
constexpr uint32_t kSectionsMax = 60;
constexpr uint32_t kBlockBytes = 65536;
constexpr uint64_t kSamplesMax = uint64_t{1} << 48;
constexpr uint64_t kColumnPadding = 8;
constexpr uint64_t kStringsMax = 10'000'000;

// Bulk look-ups of names are shared out among threads; starting one costs what 100 look-ups do.
constexpr unsigned kFindThreadsMax = 8;
constexpr size_t kFindQueriesPerThread = 16384;

enum SectionKind : uint32_t {
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

template <class T>
T field(const std::byte* page, uint64_t offset) {
  T value;
  std::memcpy(&value, page + offset, sizeof value);
  return value;
}

}  // namespace

struct Directory::Section {
  uint32_t kind;
  uint32_t width;
  uint64_t offset;
  uint64_t bytes;
  uint64_t count;
  uint8_t parameters[8];
  char name[24];
  uint64_t entry_offset;  // of the entry itself, for messages
};

std::shared_ptr<Directory> Directory::open(int fd, const std::string& path) {
  struct stat status;
  if (fstat(fd, &status) != 0) {
    throw Error(ErrorKind::kVolume, path + ": " + strerror(errno), path, -1, errno);
  }
  const auto size = static_cast<uint64_t>(status.st_size);
  if (size < kHeaderBytes) {
    throw Error(ErrorKind::kCorruptStore,
                path + ": " + std::to_string(size) +
                    " bytes, a sample directory has at least 4096. The file was truncated or is "
                    "not a sample directory; pack or index again.",
                path, 0);
  }
  std::shared_ptr<Directory> directory(new Directory(Mapping::of_file(fd, size, path), path));
  directory->read_header();
  const auto sections = directory->read_sections();
  directory->use_sections(sections);
  directory->use_names(sections);
  directory->assert_whole();
  return directory;
}

Directory::Directory(std::unique_ptr<Mapping> mapping, const std::string& path)
    : file_(std::move(mapping), path) {}

void Directory::fail(const std::string& what, uint64_t offset) const {
  throw Error(ErrorKind::kCorruptStore,
              path() + ": " + what + " (offset " + std::to_string(offset) +
                  "). The file is damaged or was not written by headrace; pack or index again.",
              path(), static_cast<int64_t>(offset));
}

void Directory::read_header() {
  const std::byte* page = file_.data();
  if (std::memcmp(page, kMagic, sizeof kMagic) != 0) {
    fail("the first 8 bytes are not those of a sample directory", 0);
  }
  if (const auto version = field<uint32_t>(page, 8); version != kVersion) {
    fail("format version " + std::to_string(version) + ", this headrace reads version 1", 8);
  }
  const auto stored = field<uint32_t>(page, 12);
  const std::byte zeros[4] = {};
  uint32_t crc = crc32c(0, page, 12);
  crc = crc32c(crc, zeros, 4);
  crc = crc32c(crc, page + 16, kHeaderBytes - 16);
  if (crc != stored) fail("the header does not match its checksum", 12);

  samples_ = field<uint64_t>(page, 24);
  extents_ = field<uint64_t>(page, 32);
  section_count_ = field<uint32_t>(page, 40);
  parts_ = field<uint32_t>(page, 68);
  payload_offset_ = field<uint64_t>(page, 72);
  const auto file_bytes = field<uint64_t>(page, 16);
  if (file_bytes != file_.size()) {
    fail("the file has " + std::to_string(file_.size()) + " bytes, its header says " +
             std::to_string(file_bytes),
         16);
  }
  if (samples_ > kSamplesMax || extents_ < samples_ || extents_ > file_bytes ||
      section_count_ > kSectionsMax || parts_ == 0 || parts_ > 65535) {
    fail("impossible counts in the header", 24);
  }
  const auto block_bytes = field<uint32_t>(page, 44);
  const auto checksums_offset = field<uint64_t>(page, 48);
  const auto checksums = field<uint64_t>(page, 56);
  if (block_bytes != kBlockBytes || checksums_offset != kHeaderBytes ||
      payload_offset_ % kHeaderBytes != 0 || payload_offset_ < kHeaderBytes ||
      payload_offset_ > file_bytes ||
      checksums != (file_bytes - payload_offset_ + kBlockBytes - 1) / kBlockBytes ||
      checksums > (payload_offset_ - kHeaderBytes) / 4) {
    fail("the page checksums contradict the file's size", 44);
  }
  if (crc32c(0, page + kHeaderBytes, 4 * checksums) != field<uint32_t>(page, 64)) {
    fail("the page checksums do not match their checksum", kHeaderBytes);
  }
  file_.set_checksums(payload_offset_, kHeaderBytes, kBlockBytes);
}

std::vector<Directory::Section> Directory::read_sections() const {
  std::vector<Section> sections(section_count_);
  for (uint32_t i = 0; i < section_count_; ++i) {
    const uint64_t at = kSectionTableOffset + i * kSectionEntryBytes;
    const std::byte* entry = file_.data() + at;
    Section& s = sections[i];
    s.kind = field<uint32_t>(entry, 0);
    s.width = field<uint32_t>(entry, 4);
    s.offset = field<uint64_t>(entry, 8);
    s.bytes = field<uint64_t>(entry, 16);
    s.count = field<uint64_t>(entry, 24);
    std::memcpy(s.parameters, entry + 32, sizeof s.parameters);
    std::memcpy(s.name, entry + 40, sizeof s.name);
    s.entry_offset = at;
    const uint64_t padding = s.width == 0 ? 0 : kColumnPadding;
    if (s.offset % 64 != 0 || s.offset < payload_offset_ || s.offset > file_.size() ||
        s.bytes > file_.size() - s.offset || padding > file_.size() - s.offset - s.bytes) {
      fail("section " + std::to_string(i) + " leaves the file", at);
    }
    if (s.width > 64 || (s.width != 0 && (s.count > s.bytes || s.count * s.width != s.bytes))) {
      fail("section " + std::to_string(i) + " has a size that contradicts its count", at);
    }
    if (s.kind < kExtentRows || s.kind > kIndexToRank) {
      fail("section " + std::to_string(i) + " has the unknown kind " + std::to_string(s.kind), at);
    }
  }
  auto by_offset = sections;
  std::sort(by_offset.begin(), by_offset.end(),
            [](const Section& a, const Section& b) { return a.offset < b.offset; });
  for (size_t i = 1; i < by_offset.size(); ++i) {
    if (by_offset[i - 1].offset + by_offset[i - 1].bytes > by_offset[i].offset) {
      fail("sections overlap", by_offset[i].entry_offset);
    }
  }
  return sections;
}

Column Directory::index_column(const Section& s, uint64_t count, const char* what) const {
  if (s.count != count || s.width < 1 || s.width > 8) {
    fail(std::string("the section '") + what + "' has " + std::to_string(s.count) +
             " elements of " + std::to_string(s.width) + " bytes, expected " +
             std::to_string(count) + " of 1 to 8",
         s.entry_offset);
  }
  return {&file_, s.offset, s.count, s.width};
}

void Directory::use_rows(const Section& s) {
  row_ = {s.parameters[0], s.parameters[1], s.parameters[2], s.parameters[3], s.parameters[4], 0};
  row_.bytes = row_.volume + row_.offset + row_.length + row_.crc + row_.mtime;
  if (row_.volume > 4 || row_.offset > 8 || row_.length > 8 || (row_.crc != 0 && row_.crc != 4) ||
      (row_.mtime != 0 && row_.mtime != 8) || row_.bytes != s.width || s.count != extents_ ||
      row_.bytes == 0) {
    fail("the extent rows contradict the header", s.entry_offset);
  }
  rows_offset_ = s.offset;
}

void Directory::use_label(const Section& s) {
  if (s.count != samples_ || (s.width != 1 && s.width != 2 && s.width != 4 && s.width != 8)) {
    fail("the label column contradicts the header", s.entry_offset);
  }
  label_ = {"label", 'i', s.width, s.offset, s.count, true};
  columns_.push_back(label_);
}

void Directory::use_user_column(const Section& s) {
  const char kind = static_cast<char>(s.parameters[0]);
  const bool width_ok = s.width == 1 || s.width == 2 || s.width == 4 || s.width == 8;
  const bool kind_ok = kind == 'i' || kind == 'u' || (kind == 'f' && s.width != 1);
  if (s.count != samples_ || !width_ok || !kind_ok || s.name[0] == '\0') {
    fail("a user column contradicts the header", s.entry_offset);
  }
  const std::string name(s.name, strnlen(s.name, sizeof s.name));
  for (const ColumnInfo& other : columns_) {
    if (!other.label && other.name == name) {
      fail("two user columns have the same name", s.entry_offset);
    }
  }
  columns_.push_back({name, kind, s.width, s.offset, s.count, false});
}

std::vector<std::string> Directory::strings(const Section& s) const {
  if (s.count > kStringsMax || s.count * 2 > s.bytes || s.width != 0) {
    fail("a list of strings is longer than its section", s.entry_offset);
  }
  const std::byte* p = file_.at(s.offset, s.bytes);
  const std::byte* end = p + s.bytes;
  std::vector<std::string> list;
  list.reserve(s.count);
  for (uint64_t i = 0; i < s.count; ++i) {
    if (end - p < 2) fail("a list of strings ends early", s.entry_offset);
    const auto length = field<uint16_t>(p, 0);
    p += 2;
    if (end - p < length) fail("a string leaves its section", s.entry_offset);
    list.emplace_back(reinterpret_cast<const char*>(p), length);
    p += length;
  }
  return list;
}

void Directory::use_sections(const std::vector<Section>& sections) {
  uint64_t seen = 0;
  for (const Section& s : sections) {
    const bool repeatable = s.kind == kUserColumn || s.kind == kNameOffsets || s.kind == kNameBlob;
    if (!repeatable && (seen >> s.kind & 1)) fail("a section appears twice", s.entry_offset);
    seen |= uint64_t{1} << s.kind;
    switch (s.kind) {
      case kExtentRows:
        use_rows(s);
        break;
      case kFirstExtent:
        first_extent_ = index_column(s, samples_ + 1, "first extent");
        break;
      case kPart:
        part_ = index_column(s, extents_, "part");
        if (s.width > 2) fail("the part column is wider than a part number", s.entry_offset);
        break;
      case kPartNames:
        part_names_ = strings(s);
        break;
      case kLabel:
        use_label(s);
        break;
      case kClassNames:
        class_names_ = strings(s);
        break;
      case kUserColumn:
        use_user_column(s);
        break;
      case kRankToIndex:
        rank_to_index_ = index_column(s, samples_, "rank to index");
        break;
      case kIndexToRank:
        index_to_rank_ = index_column(s, samples_, "index to rank");
        break;
      default:
        break;
    }
  }
  if (samples_ != 0 && row_.bytes == 0) fail("there are no extent rows", 24);
  if (extents_ != samples_ && !first_extent_) fail("the section 'first extent' is missing", 32);
  if (part_names_.size() != parts_ || (parts_ > 1 && !part_)) {
    fail("the part names contradict the header", 68);
  }
  if (static_cast<bool>(rank_to_index_) != static_cast<bool>(index_to_rank_)) {
    fail("one of the two name order columns is missing", 24);
  }
}

void Directory::use_names(const std::vector<Section>& sections) {
  std::vector<NameLevel> levels;
  for (uint64_t names = samples_; names != 0;) {
    const auto number = levels.size();
    const uint64_t blocks = (names + kNamesPerBlock - 1) / kNamesPerBlock;
    NameLevel level;
    level.names = names;
    bool blob = false;
    for (const Section& s : sections) {
      if (s.kind == kNameOffsets && s.parameters[0] == number) {
        if (level.offsets) fail("a name level appears twice", s.entry_offset);
        level.offsets = index_column(s, blocks + 1, "name block offsets");
      } else if (s.kind == kNameBlob && s.parameters[0] == number) {
        if (blob) fail("a name level appears twice", s.entry_offset);
        if (s.count != names || s.width != 0) {
          fail("a name level has the wrong count or width", s.entry_offset);
        }
        level.blob_offset = s.offset;
        level.blob_bytes = s.bytes;
        blob = true;
      }
    }
    if (!level.offsets || !blob || number >= kNameLevelsMax) {
      fail("name level " + std::to_string(number) + " is missing", kSectionTableOffset);
    }
    levels.push_back(level);
    if (blocks == 1) break;
    names = blocks;
  }
  for (const Section& s : sections) {
    if ((s.kind == kNameOffsets || s.kind == kNameBlob) && s.parameters[0] >= levels.size()) {
      fail("there are more name levels than names", s.entry_offset);
    }
  }
  names_ = NameTree(&file_, std::move(levels));
}

Extent Directory::extent(uint64_t extent) const {
  const std::byte* p = file_.at(rows_offset_ + extent * row_.bytes, row_.bytes + kColumnPadding);
  Extent e;
  if (row_.volume != 0) e.volume = static_cast<uint32_t>(load_uint(p, row_.volume));
  p += row_.volume;
  if (row_.offset != 0) e.offset = load_uint(p, row_.offset);
  p += row_.offset;
  if (row_.length != 0) e.length = load_uint(p, row_.length);
  p += row_.length;
  if (row_.crc != 0) e.crc = field<uint32_t>(p, 0);
  p += row_.crc;
  if (row_.mtime != 0) e.mtime_ns = field<int64_t>(p, 0);
  return e;
}

std::pair<uint64_t, uint64_t> Directory::extents_of(uint64_t sample) const {
  if (!first_extent_) return {sample, sample + 1};
  const uint64_t first = first_extent_[sample];
  const uint64_t last = first_extent_[sample + 1];
  if (first >= last || last > extents_) {
    fail("sample " + std::to_string(sample) + " owns impossible extents",
         first_extent_.offset + sample * first_extent_.width);
  }
  return {first, last};
}

void Directory::prefetch_sample(uint64_t sample) const {
  if (first_extent_) {
    first_extent_.prefetch(sample);
  } else {
    prefetch_extent(sample);
  }
  if (label_.width != 0) __builtin_prefetch(file_.data() + label_.offset + sample * label_.width);
}

int64_t Directory::label(uint64_t sample) const {
  if (label_.width == 0) return -1;
  const std::byte* p = file_.at(label_.offset + sample * label_.width, label_.width);
  switch (label_.width) {
    case 1:
      return field<int8_t>(p, 0);
    case 2:
      return field<int16_t>(p, 0);
    case 4:
      return field<int32_t>(p, 0);
    default:
      return field<int64_t>(p, 0);
  }
}

void Directory::find(std::span<const std::string_view> queries, std::span<int64_t> indices) const {
  size_t threads = queries.size() / kFindQueriesPerThread;
  if (threads <= 1) return find_some(queries, indices);
  // Asked only here: the answer costs the reading of a file of the kernel's.
  const size_t cores = std::clamp(std::thread::hardware_concurrency(), 1u, kFindThreadsMax);
  threads = std::min(threads, cores);
  const size_t share = (queries.size() + threads - 1) / threads;
  std::vector<std::future<void>> others;
  for (size_t begin = share; begin < queries.size(); begin += share) {
    const size_t count = std::min(share, queries.size() - begin);
    others.push_back(std::async(std::launch::async, [=, this] {
      find_some(queries.subspan(begin, count), indices.subspan(begin, count));
    }));
  }
  const size_t first = std::min(share, queries.size());
  find_some(queries.first(first), indices.first(first));
  for (auto& other : others) other.get();
}

void Directory::find_some(std::span<const std::string_view> queries,
                          std::span<int64_t> indices) const {
  names_.find(queries, indices);
  if (!rank_to_index_) return;
  for (int64_t& index : indices) {
    if (index >= 0) index = static_cast<int64_t>(index_at_rank(static_cast<uint64_t>(index)));
  }
}

void Directory::name(uint64_t sample, std::string* name) const {
  uint64_t rank = sample;
  if (index_to_rank_) {
    rank = index_to_rank_[sample];
    if (rank >= samples_) {
      fail("sample " + std::to_string(sample) + " has an impossible name rank",
           index_to_rank_.offset + sample * index_to_rank_.width);
    }
  }
  names_.name(rank, name);
}

std::vector<Child> Directory::children(std::string_view prefix, uint64_t first_rank,
                                       uint64_t limit) const {
  std::vector<Child> found;
  std::string name, following;
  uint64_t rank = std::max(first_rank, names_.lower_bound(prefix));
  if (rank < samples_) names_.name(rank, &name);
  while (rank < samples_ && found.size() < limit && name.starts_with(prefix)) {
    const size_t slash = name.find('/', prefix.size());
    const bool folder = slash != std::string::npos;
    uint64_t next = rank + 1;
    if (folder) {
      // Behind "a/..." comes nothing before "a0". Damaged names must not lead back.
      std::string end = name.substr(0, slash);
      end += '/' + 1;
      next = std::max(next, names_.lower_bound(end));
    }
    following.clear();
    if (next < samples_) names_.name(next, &following);
    Child::Kind kind = Child::kFolder;
    if (!folder) kind = following.starts_with(name) ? Child::kFilePrefix : Child::kFile;
    if (next >= samples_ && !folder) kind = Child::kFile;  // `following` is no name
    found.push_back({name.substr(prefix.size(), folder ? slash - prefix.size() : slash),
                     index_at_rank(rank), next, kind});
    rank = next;
    name.swap(following);
  }
  return found;
}

std::pair<int64_t, int64_t> Directory::lookup(std::string_view path) const {
  int64_t file = -1;
  uint64_t rank = names_.lower_bound(path);
  std::string name;
  if (rank < samples_) names_.name(rank, &name);
  if (rank < samples_ && name == path) {
    file = static_cast<int64_t>(index_at_rank(rank));
    if (++rank < samples_) names_.name(rank, &name);
  }
  if (rank >= samples_ || !name.starts_with(path)) return {file, -1};
  const std::string prefix = std::string(path) + '/';
  rank = names_.lower_bound(prefix);
  if (rank < samples_) names_.name(rank, &name);
  if (rank >= samples_ || !name.starts_with(prefix)) return {file, -1};
  return {file, static_cast<int64_t>(index_at_rank(rank))};
}

uint64_t Directory::index_at_rank(uint64_t rank) const {
  if (!rank_to_index_) return rank;
  const uint64_t index = rank_to_index_[rank];
  if (index >= samples_) {
    fail("name rank " + std::to_string(rank) + " belongs to an impossible sample",
         rank_to_index_.offset + rank * rank_to_index_.width);
  }
  return index;
}

}  // namespace headrace
