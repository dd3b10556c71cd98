// Fuzzes the name tree against std::map: what is built from a set of names must find exactly these
// names, at their indices, and give every name back.
//
// The input is a list of names, each coded as (bytes kept of the name before, suffix length,
// suffix): prefixes of each other are the interesting case. The same names with one byte changed
// serve as queries that mostly miss.
#include <cstdio>
#include <cstdlib>
#include <map>

#include "core/error.h"
#include "testing/directory_builder.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

std::vector<std::string> parse(const uint8_t* data, size_t size) {
  std::vector<std::string> names;
  std::string name;
  while (size >= 2 && names.size() < 600) {
    name.resize(std::min<size_t>(name.size(), data[0]));
    const size_t suffix = std::min<size_t>(data[1] % 40, size - 2);
    name.append(reinterpret_cast<const char*>(data + 2), suffix);
    if (data[1] >= 250) name.append(300 * (data[1] - 249), 'q');  // lengths of several bytes
    names.push_back(name);
    data += 2 + suffix;
    size -= 2 + suffix;
  }
  return names;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace headrace;
  testing::DirectorySpec spec;
  spec.names = parse(data, size);
  spec.extents.assign(spec.names.size(), {testing::ExtentSpec{}});
  std::map<std::string, int64_t> truth;
  for (size_t i = 0; i < spec.names.size(); ++i) truth[spec.names[i]] = static_cast<int64_t>(i);
  std::shared_ptr<Directory> directory;
  try {
    directory = open_image(testing::build_directory(spec));
  } catch (const Error& error) {
    require(error.kind == ErrorKind::kInvalidArgument && truth.size() < spec.names.size(),
            "only duplicates are refused");
    return 0;
  }
  require(truth.size() == spec.names.size(), "duplicates are refused");

  std::vector<std::string> asked = spec.names;
  for (size_t i = 0; i < spec.names.size(); ++i) {
    std::string other = spec.names[i];
    if (!other.empty()) other[i % other.size()] ^= static_cast<char>(1 + i % 255);
    asked.push_back(other);
    asked.push_back(spec.names[i].substr(0, spec.names[i].size() / 2));
    asked.push_back(spec.names[i] + '\0');
  }
  const std::vector<std::string_view> queries(asked.begin(), asked.end());
  std::vector<int64_t> found(queries.size());
  directory->find(queries, found);
  for (size_t i = 0; i < asked.size(); ++i) {
    const auto it = truth.find(asked[i]);
    require(found[i] == (it == truth.end() ? -1 : it->second), "find agrees with std::map");
  }
  uint64_t rank = 0;
  for (const auto& [name, index] : truth) {
    require(directory->index_at_rank(rank++) == static_cast<uint64_t>(index), "ranks are sorted");
    std::string back;
    directory->name(static_cast<uint64_t>(index), &back);
    require(back == name, "a name comes back");
  }
  return 0;
}
