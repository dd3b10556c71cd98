// The name tree against std::map: what is built finds exactly its names and gives them back.
#include "core/name_tree.h"

#include <doctest/doctest.h>

#include <map>
#include <random>

#include "core/error.h"
#include "testing/directory_builder.h"

using namespace headrace;
using headrace::testing::DirectorySpec;

namespace {

std::shared_ptr<Directory> directory_of(const std::vector<std::string>& names) {
  DirectorySpec spec;
  spec.names = names;
  spec.extents.assign(names.size(), {testing::ExtentSpec{}});
  return open_image(testing::build_directory(spec));
}

std::vector<int64_t> find(const Directory& directory, const std::vector<std::string>& names) {
  const std::vector<std::string_view> queries(names.begin(), names.end());
  std::vector<int64_t> found(names.size(), -2);
  directory.find(queries, found);
  return found;
}

// Checks every promise for these names; `others` may or may not be among them.
void check_all(const std::vector<std::string>& names, std::vector<std::string> others) {
  std::map<std::string, int64_t> truth;
  for (size_t i = 0; i < names.size(); ++i) truth[names[i]] = static_cast<int64_t>(i);
  REQUIRE(truth.size() == names.size());
  const auto directory = directory_of(names);
  others.insert(others.end(), names.begin(), names.end());
  const auto found = find(*directory, others);
  for (size_t i = 0; i < others.size(); ++i) {
    const auto it = truth.find(others[i]);
    REQUIRE(found[i] == (it == truth.end() ? -1 : it->second));
  }
  uint64_t rank = 0;
  std::string back;
  for (const auto& [name, index] : truth) {
    REQUIRE(directory->index_at_rank(rank++) == static_cast<uint64_t>(index));
    directory->name(static_cast<uint64_t>(index), &back);
    REQUIRE(back == name);
  }
}

std::string random_name(std::mt19937& random, size_t length_max, unsigned letters) {
  std::string name(random() % (length_max + 1), '\0');
  for (char& c : name) c = static_cast<char>(letters == 256 ? random() : 'a' + random() % letters);
  return name;
}

// Names that nearly equal `name`, on both sides of it.
void add_neighbours(const std::string& name, std::vector<std::string>* out) {
  out->push_back(name + '\0');
  out->push_back(name + '\xff');
  if (name.empty()) return;
  out->push_back(name.substr(0, name.size() - 1));
  for (const size_t at : {size_t{0}, name.size() / 2, name.size() - 1}) {
    for (const int change : {1, -1}) {
      std::string other = name;
      other[at] = static_cast<char>(other[at] + change);
      out->push_back(other);
    }
  }
}

ErrorKind build_error(const std::vector<uint8_t>& blob, const std::vector<uint64_t>& offsets) {
  try {
    build_names(blob, offsets);
  } catch (const Error& error) {
    return error.kind;
  }
  FAIL("build_names accepted it");
  return ErrorKind::kVolume;
}

}  // namespace

TEST_CASE("random names of every alphabet and count are found, and nothing else is") {
  for (const size_t n : {1, 15, 16, 17, 256, 257, 5000}) {
    for (const unsigned letters : {2, 26, 256}) {
      CAPTURE(n);
      CAPTURE(letters);
      std::mt19937 random(static_cast<uint32_t>(n * 1000 + letters));
      std::map<std::string, int> unique;
      while (unique.size() < n) unique[random_name(random, letters == 2 ? 20 : 12, letters)];
      std::vector<std::string> names, others{""};
      for (const auto& [name, unused] : unique) names.push_back(name);
      if (random() % 2 == 0) std::shuffle(names.begin(), names.end(), random);
      for (size_t i = 0; i < n; i += 1 + n / 500) add_neighbours(names[i], &others);
      for (int i = 0; i < 300; ++i) others.push_back(random_name(random, 12, letters));
      check_all(names, others);
    }
  }
}

TEST_CASE("names that are prefixes of each other are told apart, in any index order") {
  std::vector<std::string> names;
  for (size_t length = 0; length < 300; ++length) names.emplace_back(length, 'x');
  check_all(names, {std::string(300, 'x'), std::string(5, 'y'), std::string("xx\0", 3), "w"});
  std::reverse(names.begin(), names.end());
  check_all(names, {std::string(300, 'x'), std::string(5, 'y'), std::string("xx\0", 3), "w"});
}

TEST_CASE("the empty name is a name like any other") {
  check_all({""}, {"a", std::string(1, '\0')});
  check_all({"b", "", "a"}, {"c", std::string(1, '\0')});
  CHECK(find(*directory_of({"a"}), {""}) == std::vector<int64_t>{-1});
}

TEST_CASE("all 256 byte values and their order are kept") {
  std::vector<std::string> names;
  for (int a = 255; a >= 0; --a) {
    names.emplace_back(1, static_cast<char>(a));
    names.push_back({static_cast<char>(a), '\0'});
    names.push_back({static_cast<char>(a), '\xff'});
  }
  check_all(names, {"", "ab", std::string("\xff\xff\xff")});
}

TEST_CASE("names up to 65535 bytes fit, with long and short shared prefixes") {
  std::vector<std::string> names;
  for (const size_t length : {127, 128, 16383, 16384, 65534, 65535}) {
    names.emplace_back(length, 'p');
    names.push_back(std::string(length - 1, 'p') + 'q');
  }
  check_all(names, {std::string(65536, 'p'), std::string(100000, 'p'), "p", std::string(126, 'p')});
}

TEST_CASE("an empty directory finds nothing") {
  CHECK(find(*directory_of({}), {"", "a"}) == std::vector<int64_t>{-1, -1});
}

TEST_CASE("bulk look-ups larger than one group keep their order") {
  std::vector<std::string> names;
  for (int i = 0; i < 1000; ++i) names.push_back("n" + std::to_string(i * 7 % 1000));
  const auto directory = directory_of(names);
  std::vector<std::string> asked;
  std::vector<int64_t> expected;
  for (int i = 0; i < 997; ++i) {
    asked.push_back(i % 3 == 0 ? "missing" + std::to_string(i) : names[static_cast<size_t>(i)]);
    expected.push_back(i % 3 == 0 ? -1 : i);
  }
  CHECK(find(*directory, asked) == expected);
}

TEST_CASE("children are those of std::map, in pieces of any size") {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    std::map<std::string, int64_t> truth;
    for (int i = 0; i < 200; ++i) {
      std::string name = random_name(random, 8, 3);
      for (char& c : name) c = c == 'c' ? '/' : c;
      truth.emplace(name, 0);
    }
    std::vector<std::string> names;
    for (auto& [name, index] : truth) {
      index = static_cast<int64_t>(names.size());
      names.push_back(name);
    }
    const auto directory = directory_of(names);
    for (const std::string prefix : {"", "a/", "b/", "a/b/", "/", "//", "ab/"}) {
      std::map<std::string, int64_t> folders, files;
      for (const auto& [name, index] : truth) {
        if (!name.starts_with(prefix)) continue;
        const std::string rest = name.substr(prefix.size());
        const size_t slash = rest.find('/');
        if (slash == std::string::npos) {
          files.emplace(rest, index);
        } else {
          folders.emplace(rest.substr(0, slash), index);
        }
      }
      const uint64_t limit = 1 + random() % 9;
      uint64_t rank = 0, seen = 0;
      for (;;) {
        const auto children = directory->children(prefix, rank, limit);
        if (children.empty()) break;
        for (const Child& child : children) {
          const bool folder = child.kind == Child::kFolder;
          const auto& want = folder ? folders : files;
          REQUIRE(want.contains(child.name));
          CHECK(want.at(child.name) == static_cast<int64_t>(child.sample));
          CHECK(child.next_rank > rank);
          rank = child.next_rank;
          ++seen;
          if (folder) continue;
          const auto next = std::next(truth.find(prefix + child.name));
          const bool longer = next != truth.end() && next->first.starts_with(prefix + child.name);
          CHECK((child.kind == Child::kFilePrefix) == longer);
        }
      }
      CHECK(seen == folders.size() + files.size());
    }
    for (int i = 0; i < 50; ++i) {
      const std::string key = random_name(random, 6, 3);
      const auto at = truth.lower_bound(key);
      CHECK(directory->seek(key) == static_cast<uint64_t>(std::distance(truth.begin(), at)));
      const auto below = truth.lower_bound(key + "/");
      const bool some = below != truth.end() && below->first.starts_with(key + "/");
      const auto [file, folder] = directory->lookup(key);
      CHECK(file == (truth.contains(key) ? truth[key] : -1));
      CHECK(folder == (some ? below->second : -1));
    }
  }
}

TEST_CASE("duplicates are refused, near and far, sorted or not") {
  const std::vector<uint8_t> blob{'a', 'b', 'a'};
  CHECK(build_error(blob, {0, 1, 2, 3}) == ErrorKind::kInvalidArgument);
  const std::vector<uint8_t> same{'a', 'a'};
  CHECK(build_error(same, {0, 1, 2}) == ErrorKind::kInvalidArgument);
  CHECK(build_error({}, {0, 0, 0}) == ErrorKind::kInvalidArgument);
  // Equal names that start a block each: 16 apart in sorted order is impossible, 1 apart across the
  // border is not.
  std::vector<uint8_t> letters;
  std::vector<uint64_t> offsets{0};
  for (int i = 0; i < 17; ++i) {
    letters.push_back(static_cast<uint8_t>(i < 16 ? i : 15));
    offsets.push_back(letters.size());
  }
  CHECK(build_error(letters, offsets) == ErrorKind::kInvalidArgument);
}

TEST_CASE("a blob and offsets that contradict each other are refused") {
  const std::vector<uint8_t> blob(70000, 'a');
  CHECK(build_error(blob, {}) == ErrorKind::kInvalidArgument);
  CHECK(build_error(blob, {0, 5, 4}) == ErrorKind::kInvalidArgument);
  CHECK(build_error(blob, {0, 70001}) == ErrorKind::kInvalidArgument);
  CHECK(build_error(blob, {0, 65536}) == ErrorKind::kInvalidArgument);
  CHECK_NOTHROW(build_names(blob, std::vector<uint64_t>{0, 65535}));
}
