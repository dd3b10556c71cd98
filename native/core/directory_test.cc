// The sample directory: everything that was written is read back, and every damage is an error.
#include "core/directory.h"

#include <doctest/doctest.h>

#include <functional>
#include <random>

#include "core/crc32c.h"
#include "core/error.h"
#include "testing/directory_builder.h"

using namespace headrace;
using headrace::testing::DirectoryImage;
using headrace::testing::DirectorySpec;

namespace {

// Opens the image and touches everything; the error it meets, if any.
std::unique_ptr<Error> use(const DirectoryImage& image) {
  try {
    const auto d = open_image(image);
    std::string name;
    std::vector<std::string> names;
    for (uint64_t i = 0; i < d->samples(); ++i) {
      const auto [first, last] = d->extents_of(i);
      for (uint64_t e = first; e < last; ++e) {
        d->extent(e);
        d->part(e);
      }
      d->label(i);
      d->index_at_rank(i);
      d->name(i, &name);
      names.push_back(name);
    }
    const std::vector<std::string_view> queries(names.begin(), names.end());
    std::vector<int64_t> found(names.size());
    d->find(queries, found);
    for (const ColumnInfo& column : d->columns()) d->column_bytes(column);
  } catch (const Error& error) {
    return std::make_unique<Error>(error);
  }
  return nullptr;
}

void check_everything(const DirectorySpec& spec) {
  const auto d = open_image(testing::build_directory(spec));
  REQUIRE(d->samples() == spec.names.size());
  CHECK(d->has_crc() == spec.crc);
  CHECK(d->has_mtime() == spec.mtime);
  CHECK(d->has_labels() == !spec.labels.empty());
  CHECK(d->part_names() == spec.part_names);
  CHECK(d->class_names() == spec.class_names);
  CHECK(d->uuid()[0] == 0xa0);
  CHECK(d->uuid()[15] == 0xaf);
  uint64_t at = 0;
  std::string name;
  for (size_t i = 0; i < spec.names.size(); ++i) {
    const auto [first, last] = d->extents_of(i);
    REQUIRE(first == at);
    REQUIRE(last == at + spec.extents[i].size());
    for (const testing::ExtentSpec& expected : spec.extents[i]) {
      const Extent e = d->extent(at);
      d->prefetch_extent(at);
      REQUIRE(d->part(at++) == expected.part);
      REQUIRE(e.volume == expected.volume);
      REQUIRE(e.offset == expected.offset);
      REQUIRE(e.length == expected.length);
      REQUIRE(e.crc == (spec.crc ? expected.crc : 0));
      REQUIRE(e.mtime_ns == (spec.mtime ? expected.mtime_ns : -1));
    }
    d->prefetch_sample(i);
    REQUIRE(d->label(i) == (spec.labels.empty() ? -1 : spec.labels[i]));
    d->name(i, &name);
    REQUIRE(name == spec.names[i]);
    const std::string_view query = spec.names[i];
    int64_t found = -2;
    d->find({&query, 1}, {&found, 1});
    REQUIRE(found == static_cast<int64_t>(i));
  }
  CHECK(d->extents() == at);
  size_t user = 0;
  for (const ColumnInfo& column : d->columns()) {
    if (column.label) continue;
    const auto& expected = spec.columns[user++];
    CHECK(column.name == expected.name);
    CHECK(column.kind == expected.kind);
    REQUIRE(column.count * column.width == expected.bytes.size());
    const std::byte* bytes = d->column_bytes(column);
    CHECK((expected.bytes.empty() ||
           std::memcmp(bytes, expected.bytes.data(), expected.bytes.size()) == 0));
  }
  CHECK(user == spec.columns.size());
  CHECK(d->damaged_blocks().empty());
}

}  // namespace

TEST_CASE("every section is read back, at every count and width") {
  for (const size_t n : {0, 1, 2, 16, 17, 300, 4000}) {
    CAPTURE(n);
    check_everything(testing::plain_spec(n));
    check_everything(testing::full_spec(n));
  }
  for (unsigned width = 2; width <= 8; ++width) {
    CAPTURE(width);
    DirectorySpec spec = testing::full_spec(100);
    spec.index_width = width;
    spec.offset_width = std::max(width, 3u);
    spec.length_width = width;
    spec.volume_width = std::min(width, 4u);
    spec.label_width = width < 4 ? 2 : width < 8 ? 4 : 8;
    check_everything(spec);
  }
}

TEST_CASE("one-byte labels and absent row fields are read back") {
  DirectorySpec spec = testing::plain_spec(200, 0);
  spec.volume_width = 0;
  spec.length_width = 0;
  spec.label_width = 1;
  for (int i = 0; i < 200; ++i) spec.labels.push_back(i % 128 - 1);
  spec.crc = false;
  check_everything(spec);
}

TEST_CASE("the largest offsets, lengths and times survive") {
  DirectorySpec spec = testing::plain_spec(1);
  spec.offset_width = spec.length_width = 8;
  spec.volume_width = 4;
  spec.mtime = true;
  spec.extents[0][0] = {UINT32_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX, INT64_MIN, 0};
  check_everything(spec);
}

TEST_CASE("each single mistake is a corrupt store, with path and offset") {
  struct Mistake {
    const char* what;
    std::function<void(DirectoryImage&)> make;
    bool seal = true;
  };
  const auto set64 = [](uint32_t kind, uint64_t field, uint64_t value) {
    return [=](DirectoryImage& i) { i.put<uint64_t>(i.entry(kind) + field, value); };
  };
  const auto set32 = [](uint32_t kind, uint64_t field, uint32_t value) {
    return [=](DirectoryImage& i) { i.put<uint32_t>(i.entry(kind) + field, value); };
  };
  const auto header64 = [](uint64_t at, uint64_t value) {
    return [=](DirectoryImage& i) { i.put<uint64_t>(at, value); };
  };
  const auto header32 = [](uint64_t at, uint32_t value) {
    return [=](DirectoryImage& i) { i.put<uint32_t>(at, value); };
  };
  // Removes a section by turning its entry into an empty user column would be refused for another
  // reason; instead the last entry takes its place.
  const auto remove = [](uint32_t kind, unsigned level = 0) {
    return [=](DirectoryImage& i) {
      const uint64_t last = 128 + 64 * (i.sections() - 1);
      std::memcpy(i.bytes.data() + i.entry(kind, level), i.bytes.data() + last, 64);
      std::memset(i.bytes.data() + last, 0, 64);
      i.put<uint32_t>(40, i.sections() - 1);
    };
  };
  // Adds an entry that is a copy of another, but empty, so that it overlaps nothing.
  const auto repeat = [](uint32_t kind) {
    return [=](DirectoryImage& i) {
      const uint64_t next = 128 + 64 * i.sections();
      std::memcpy(i.bytes.data() + next, i.bytes.data() + i.entry(kind), 64);
      i.put<uint64_t>(i.entry(kind) + 16, 0);
      i.put<uint64_t>(i.entry(kind) + 24, 0);
      i.put<uint32_t>(40, i.sections() + 1);
    };
  };
  using namespace headrace::testing;
  const std::vector<Mistake> mistakes = {
      {"bad magic", header32(0, 0x31415926)},
      {"future version", header32(8, 2)},
      {"header checksum", header32(96, 1), false},
      {"file size", header64(16, 4096)},
      {"more samples than a store may have", header64(24, (uint64_t{1} << 48) + 1)},
      {"all samples", header64(24, UINT64_MAX)},
      {"fewer extents than samples", header64(32, 5)},
      {"more extents than bytes", header64(32, uint64_t{1} << 40)},
      {"too many sections", header32(40, 61)},
      {"all sections", header32(40, UINT32_MAX)},
      {"no sections", header32(40, 0)},
      {"block size", header32(44, 4096)},
      {"offset of the page checksums", header64(48, 8192)},
      {"number of page checksums",
       [](DirectoryImage& i) {
         i.put<uint64_t>(56, i.get<uint64_t>(56) + 1);
         i.seal_header();
       },
       false},
      {"checksum of the page checksums",
       [](DirectoryImage& i) {
         i.put<uint32_t>(64, ~i.get<uint32_t>(64));
         i.seal_header();
       },
       false},
      {"a page checksum", [](DirectoryImage& i) { i.put<uint32_t>(4096, ~i.get<uint32_t>(4096)); },
       false},
      {"no parts", header32(68, 0)},
      {"too many parts", header32(68, 65536)},
      {"other number of part names", header32(68, 2)},
      {"payload not at a page", header64(72, 8200)},
      {"payload in the checksums", header64(72, 4096)},
      {"payload behind the file", header64(72, uint64_t{1} << 40)},
      {"sections overlap",
       [](DirectoryImage& i) { i.put(i.entry(kLabel) + 8, i.section(kExtentRows)); }},
      {"section at an odd place",
       [](DirectoryImage& i) { i.put(i.entry(kLabel) + 8, i.section(kLabel) + 1); }},
      {"section in the header", set64(kLabel, 8, 0)},
      {"section in the page checksums", set64(kLabel, 8, 4096)},
      {"section outside the file", set64(kLabel, 8, uint64_t{1} << 40)},
      {"section at the end of numbers", set64(kLabel, 8, UINT64_MAX - 63)},
      {"section longer than the file", set64(kClassNames, 16, uint64_t{1} << 40)},
      {"section as long as numbers go", set64(kClassNames, 16, UINT64_MAX)},
      {"unknown kind", set32(kClassNames, 0, 12)},
      {"kind zero", set32(kClassNames, 0, 0)},
      {"huge kind", set32(kClassNames, 0, 64 + kClassNames)},
      {"width over the limit", set32(kExtentRows, 4, 65)},
      {"width that contradicts the row", set32(kExtentRows, 4, 1)},
      {"row parameters that contradict the width",
       [](DirectoryImage& i) { i.put<uint8_t>(i.entry(kExtentRows) + 32, 3); }},
      {"volume of five bytes",
       [](DirectoryImage& i) {
         const uint64_t at = i.entry(kExtentRows) + 32;
         i.put<uint8_t>(at, 5);
         i.put<uint8_t>(at + 1, static_cast<uint8_t>(i.get<uint8_t>(at + 1) - 3));
       }},
      {"offset of nine bytes",
       [](DirectoryImage& i) {
         const uint64_t at = i.entry(kExtentRows) + 33;
         i.put<uint8_t>(at, 9);
         i.put<uint8_t>(at + 1, 0);
       }},
      {"checksum of three bytes",
       [](DirectoryImage& i) {
         const uint64_t at = i.entry(kExtentRows) + 34;
         i.put<uint8_t>(at, 5);
         i.put<uint8_t>(at + 1, 3);
       }},
      {"count that contradicts the size", set64(kLabel, 24, 7)},
      {"count that overflows to the size",
       [](DirectoryImage& i) {
         i.put<uint64_t>(i.entry(kLabel) + 24,
                         i.get<uint64_t>(i.entry(kLabel) + 24) + (uint64_t{1} << 62));  // width 4
       }},
      {"label of three bytes",
       [](DirectoryImage& i) {
         i.put<uint32_t>(i.entry(kLabel) + 4, 3);
         i.put<uint64_t>(i.entry(kLabel) + 16, 300);
       }},
      {"too many strings", set64(kPartNames, 24, 1000)},
      {"all strings", set64(kClassNames, 24, UINT64_MAX)},
      {"strings with a width",
       [](DirectoryImage& i) {
         i.put<uint32_t>(i.entry(kClassNames) + 4, 1);
         i.put<uint64_t>(i.entry(kClassNames) + 24, i.get<uint64_t>(i.entry(kClassNames) + 16));
       }},
      {"a string leaves its section",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kClassNames), 60000); }},
      {"user column of another kind",
       [](DirectoryImage& i) { i.put<uint8_t>(i.entry(kUserColumn) + 32, 'O'); }},
      {"user column without a name",
       [](DirectoryImage& i) { i.put<uint8_t>(i.entry(kUserColumn) + 40, 0); }},
      {"two user columns of one name",
       [](DirectoryImage& i) {
         const uint64_t second = i.entry(kUserColumn) + 64;
         std::memcpy(i.bytes.data() + second + 40, i.bytes.data() + second - 24, 24);
       }},
      {"no extent rows", remove(kExtentRows)},
      {"no first extent", remove(kFirstExtent)},
      {"no part column", remove(kPart)},
      {"no part names", remove(kPartNames)},
      {"no name offsets", remove(kNameOffsets)},
      {"no name blocks", remove(kNameBlob)},
      {"no name offsets above", remove(kNameOffsets, 1)},
      {"no name blocks above", remove(kNameBlob, 1)},
      {"no rank to index", remove(kRankToIndex)},
      {"no index to rank", remove(kIndexToRank)},
      {"a level too many",
       [](DirectoryImage& i) { i.put<uint8_t>(i.entry(kNameOffsets, 1) + 32, 2); }},
      {"a level twice",
       [](DirectoryImage& i) {
         const uint64_t next = 128 + 64 * i.sections();
         std::memcpy(i.bytes.data() + next, i.bytes.data() + i.entry(kNameBlob, 1), 64);
         i.put<uint64_t>(next + 16, 0);
         i.put<uint32_t>(40, i.sections() + 1);
       }},
      {"an unused level",
       [](DirectoryImage& i) {
         const uint64_t next = 128 + 64 * i.sections();
         std::memcpy(i.bytes.data() + next, i.bytes.data() + i.entry(kNameBlob, 1), 64);
         i.put<uint64_t>(next + 16, 0);
         i.put<uint8_t>(next + 32, 9);
         i.put<uint32_t>(40, i.sections() + 1);
       }},
      {"name level with a wrong count", set64(kNameBlob, 24, 99)},
      {"name blocks with a width",
       [](DirectoryImage& i) {
         const uint64_t at = i.entry(kNameBlob, 1);  // 100 samples: 7 names above
         i.put<uint32_t>(at + 4, 1);
         i.put<uint64_t>(at + 16, 7);
       }},
      {"extent rows twice", repeat(kExtentRows)},
      {"label twice", repeat(kLabel)},
      {"part names twice", repeat(kPartNames)},
      {"first extent descends",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kFirstExtent) + 3 * 50, 0); }},
      {"first extent behind the last",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kFirstExtent) + 3 * 50, 65000); }},
      {"impossible rank",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kIndexToRank) + 3 * 50, 65000); }},
      {"impossible index at a rank",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kRankToIndex) + 3 * 50, 65000); }},
      {"name block outside its section",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kNameOffsets) + 3 * 2, 65000); }},
      {"name block of no bytes",
       [](DirectoryImage& i) {
         i.put<uint16_t>(i.section(kNameOffsets) + 3, i.get<uint16_t>(i.section(kNameOffsets) + 6));
       }},
      {"name longer than its block",
       [](DirectoryImage& i) { i.put<uint16_t>(i.section(kNameBlob), 0x7fff); }},
      {"name that shares more than there is",
       [](DirectoryImage& i) {
         const uint64_t blob = i.section(kNameBlob);
         i.put<uint8_t>(blob + 1 + i.get<uint8_t>(blob), 120);
       }},
      {"a number without an end",
       [](DirectoryImage& i) { i.put<uint32_t>(i.section(kNameBlob), 0xffffffff); }},
  };
  const DirectoryImage whole = build_directory(full_spec(100));
  REQUIRE(use(whole) == nullptr);
  for (const Mistake& mistake : mistakes) {
    CAPTURE(mistake.what);
    DirectoryImage image = whole;
    mistake.make(image);
    REQUIRE(image.bytes != whole.bytes);
    if (mistake.seal && !image.seal()) image.seal_header();
    const auto error = use(image);
    REQUIRE(error != nullptr);
    CHECK(error->kind == ErrorKind::kCorruptStore);
    CHECK(error->path == "image.hrd");
    CHECK(error->offset_bytes >= 0);
    CHECK(error->offset_bytes <= static_cast<int64_t>(image.bytes.size()));
    CHECK(std::string(error->what()).find("image.hrd") != std::string::npos);
    // Behind the header, only the header checksum itself may be what was noticed.
    if (mistake.seal) CHECK(std::string(error->what()).find("its checksum") == std::string::npos);
  }
}

TEST_CASE("a part column wider than a part number is refused") {
  DirectoryImage image = testing::build_directory(testing::full_spec(100));
  const uint64_t at = image.entry(testing::kPart);
  const uint64_t rows = image.entry(testing::kExtentRows);
  // The rows' bytes stand in for the column: wide enough for 3 bytes each, and the rows go to it.
  const uint64_t place = image.section(testing::kExtentRows);
  image.put(at + 8, place);
  image.put<uint32_t>(at + 4, 3);
  image.put(at + 16, 3 * image.get<uint64_t>(at + 24));
  image.put<uint64_t>(rows + 8, place + (3 * image.get<uint64_t>(at + 24) + 8 + 63) / 64 * 64);
  image.put<uint32_t>(rows + 4, 1);
  image.put<uint64_t>(rows + 16, image.get<uint64_t>(rows + 24));
  image.put<uint64_t>(rows + 32, 1);  // volume of one byte, nothing else
  REQUIRE(image.seal());
  const auto error = use(image);
  REQUIRE(error != nullptr);
  CHECK(std::string(error->what()).find("wider than a part number") != std::string::npos);
}

TEST_CASE(
    "a payload that begins inside the header is refused, and nothing behind the file is read") {
  // 4,096 bytes say that they have one page of payload from 0 on: its checksum would lie behind
  // them.
  for (const uint64_t payload : {0, 1, 4095}) {
    for (const size_t size : {size_t{4096}, size_t{8192}}) {
      CAPTURE(payload);
      CAPTURE(size);
      DirectoryImage image = testing::build_directory(testing::plain_spec(0));
      image.bytes.resize(size);
      image.put<uint64_t>(16, size);
      image.put<uint32_t>(40, 0);
      image.put<uint64_t>(56, 1);
      image.put<uint64_t>(72, payload);
      if (size > 4096) image.put(64, crc32c(0, image.bytes.data() + 4096, 4));
      image.seal_header();
      const auto error = use(image);
      REQUIRE(error != nullptr);
      CHECK(error->kind == ErrorKind::kCorruptStore);
      CHECK(error->offset_bytes == 44);
    }
  }
}

TEST_CASE("files too short for a header are refused") {
  const DirectoryImage whole = testing::build_directory(testing::plain_spec(3));
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{4095}, size_t{4096}, size_t{8191}, whole.bytes.size() - 1}) {
    DirectoryImage image = whole;
    image.bytes.resize(size);
    const auto error = use(image);
    REQUIRE(error != nullptr);
    CHECK(error->kind == ErrorKind::kCorruptStore);
    CHECK(error->offset_bytes >= 0);
  }
}

TEST_CASE("a flipped byte in any checked page is never used") {
  const DirectoryImage whole = testing::build_directory(testing::full_spec(6000));
  REQUIRE(whole.get<uint64_t>(56) >= 4);  // several blocks
  std::mt19937 random(5);
  for (int round = 0; round < 150; ++round) {
    DirectoryImage image = whole;
    const uint64_t at = whole.payload() + random() % (whole.bytes.size() - whole.payload());
    image.put<uint8_t>(at, image.get<uint8_t>(at) ^ static_cast<uint8_t>(1u << (random() % 8)));
    CAPTURE(at);
    const auto error = use(image);
    REQUIRE(error != nullptr);  // `use` touches every page, and every page is checked as a whole
    CHECK(error->kind == ErrorKind::kCorruptStore);
    const uint64_t block = (at - whole.payload()) / 65536 * 65536 + whole.payload();
    CHECK(error->offset_bytes == static_cast<int64_t>(block));
  }
}

TEST_CASE("a flipped byte anywhere in the header or the checksum table stops the opening") {
  const DirectoryImage whole = testing::build_directory(testing::full_spec(100));
  for (uint64_t at = 0; at < 4096 + 4 * whole.get<uint64_t>(56); at += at < 200 ? 1 : 61) {
    DirectoryImage image = whole;
    image.put<uint8_t>(at, image.get<uint8_t>(at) ^ 0x10);
    CAPTURE(at);
    CHECK_THROWS_AS(open_image(image), Error);
  }
}

TEST_CASE("damage in a page that nobody touches is found by damaged_blocks") {
  DirectoryImage image = testing::build_directory(testing::full_spec(6000));
  const uint64_t last = image.bytes.size() - 20;  // index to rank, not read when opening
  image.put<uint8_t>(last, image.get<uint8_t>(last) ^ 1);
  const auto d = open_image(image);
  const uint64_t block = (last - image.payload()) / 65536 * 65536 + image.payload();
  CHECK(d->damaged_blocks() == std::vector<uint64_t>{block});
  CHECK(d->label(0) == -1);  // other pages still serve
}
