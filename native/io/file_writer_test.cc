#include "io/file_writer.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "core/crc32.h"
#include "core/crc32c.h"
#include "core/error.h"

using headrace::Noise;
using headrace::io::FileLayout;
using headrace::io::FileWriter;
using Kind = FileLayout::Kind;
using Checksum = FileLayout::Checksum;

namespace {

std::shared_ptr<const Noise> noise() {
  std::mt19937_64 random(3);
  std::vector<uint64_t> words(Noise::kBlockBytes / 8);
  for (auto& word : words) word = random();
  return std::make_shared<const Noise>(words);
}

struct Folder {
  Folder() {
    char name[] = "/tmp/headrace-writer-XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file() const { return path + "/file"; }
  std::string path;
};

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string made(const Noise& noise, uint64_t key, uint64_t position, size_t size) {
  std::string out(size, '\0');
  noise.fill(key, position, std::as_writable_bytes(std::span(out)));
  return out;
}

uint32_t number(const std::string& bytes, size_t at) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

const std::byte* data(const std::string& bytes) {
  return reinterpret_cast<const std::byte*>(bytes.data());
}

}  // namespace

TEST_CASE("a file is its pieces, and a CRC-32 is written over it, whatever its size") {
  const auto pool = noise();
  const Folder folder;
  for (const uint64_t size : {0, 100, 70'001, (4 << 20) - 14, 9'000'003}) {
    for (const bool direct : {true, false}) {
      FileWriter writer(pool, direct);
      const FileLayout layout({{1,
                                {{Kind::kText, 0, "head...."},
                                 {Kind::kBegin, 0, ""},
                                 {Kind::kText, 0, "inside"},
                                 {Kind::kNoise, size, ""},
                                 {Kind::kEnd, 0, ""},
                                 {Kind::kText, 0, "tail...."}}}},
                              Checksum::kZip, {4, 8 + 6 + size + 4});
      REQUIRE(writer.write(layout, 5, folder.file()) == 0);
      const std::string found = content(folder.file());
      const std::string inside = "inside" + made(*pool, 5, 0, size);
      CHECK(found.size() == layout.nbytes());
      CHECK(found.substr(8, inside.size()) == inside);
      const uint32_t sum = headrace::crc32(0, data(inside), inside.size());
      CHECK(number(found, 4) == sum);
      CHECK(number(found, found.size() - 4) == sum);
      CHECK(found.substr(0, 4) == "head");
      CHECK(found.substr(found.size() - 8, 4) == "tail");
    }
  }
}

TEST_CASE("runs repeat, each record with its own checksum") {
  const auto pool = noise();
  const Folder folder;
  const FileLayout layout({{3,
                            {{Kind::kBegin, 0, ""},
                             {Kind::kText, 0, "r"},
                             {Kind::kNoise, 100, ""},
                             {Kind::kEnd, 0, ""}}}},
                          Checksum::kRecord, {});
  REQUIRE(FileWriter(pool, true).write(layout, 1, folder.file()) == 0);
  const std::string found = content(folder.file());
  REQUIRE(found.size() == 3 * 105);
  for (size_t i = 0; i < 3; ++i) {
    const std::string record = "r" + made(*pool, 1, 100 * i, 100);
    CHECK(found.substr(105 * i, 101) == record);
    const uint32_t crc = headrace::crc32c(0, data(record), record.size());
    CHECK(number(found, 105 * i + 101) == (crc >> 15 | crc << 17) + 0xa282ead8);
  }
}

TEST_CASE("codes are noise without the two bytes that mean something else") {
  const auto pool = noise();
  const Folder folder;
  const FileLayout layout({{1, {{Kind::kCodes, 100'000, ""}}}}, Checksum::kNone, {});
  REQUIRE(FileWriter(pool, false).write(layout, 1, folder.file()) == 0);
  std::string expected = made(*pool, 1, 0, 100'000);
  size_t changed = 0;
  for (char& c : expected) {
    if (static_cast<unsigned char>(c) > 0xfd) {
      c = static_cast<char>(0xfd);
      ++changed;
    }
  }
  CHECK(changed > 500);
  CHECK(content(folder.file()) == expected);
}

TEST_CASE("a file that cannot be finished leaves nothing, and says why") {
  const auto pool = noise();
  const Folder folder;
  const FileLayout layout({{1, {{Kind::kNoise, 5'000'000, ""}}}}, Checksum::kNone, {});
  struct rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const struct rlimit small { 4'500'000, before.rlim_max };
  for (const bool direct : {true, false}) {
    setrlimit(RLIMIT_FSIZE, &small);
    const int code = FileWriter(pool, direct).write(layout, 1, folder.file());
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK(code == EFBIG);
    CHECK(std::filesystem::is_empty(folder.path));
  }
  std::signal(SIGXFSZ, handler);
  CHECK(FileWriter(pool, true).write(layout, 1, folder.path + "/no/file") == ENOENT);
}

TEST_CASE("layouts that make no sense are refused") {
  using Runs = std::vector<FileLayout::Run>;
  const auto refused = [](Runs runs, Checksum checksum, std::vector<uint64_t> patches) {
    CHECK_THROWS_AS(FileLayout(std::move(runs), checksum, std::move(patches)), headrace::Error);
  };
  const FileLayout::Piece begin{Kind::kBegin, 0, ""}, end{Kind::kEnd, 0, ""};
  refused({{1, {begin}}}, Checksum::kZip, {});
  refused({{1, {end}}}, Checksum::kZip, {});
  refused({{1, {begin, end}}}, Checksum::kNone, {});
  refused({{2, {begin, end}}}, Checksum::kZip, {});
  refused({{1, {begin, {Kind::kNoise, 10, ""}, end}}}, Checksum::kZip, {7});
  refused({{uint64_t{1} << 40, {{Kind::kNoise, uint64_t{1} << 40, ""}}}}, Checksum::kNone, {});
  refused({{1, {{static_cast<Kind>(9), 0, ""}}}}, Checksum::kNone, {});
}
