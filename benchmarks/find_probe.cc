// Single look-ups of names through the C API, beside what a C++ program would do without it:
// std::map and std::unordered_map with the same names.
//
//   find_probe STORE NAMES ROUNDS
//
// NAMES holds one name a line, all names of the store. Each round looks all of them up, one by one,
// in one random order; so do two threads and four, each. Prints one line of JSON: nanoseconds a
// look-up in each round, and the bytes that each container took.
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "capi/headrace.h"

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "find_probe: %s: %s\n", what, hr_last_error());
  std::exit(1);
}

double processor_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

// Nanoseconds of this thread's processor time that `find` takes for one of `names`; `find` returns
// the name's index.
template <class Find>
double time_ns(const std::vector<std::string>& names, const std::vector<uint64_t>& indices,
               Find&& find) {
  uint64_t wrong = 0;
  const double begun = processor_ns();
  for (size_t i = 0; i < names.size(); ++i) wrong += find(names[i]) != indices[i];
  const double took = processor_ns() - begun;
  require(wrong == 0, "a look-up found another sample");
  return took / static_cast<double>(names.size());
}

// The same, when `threads` do it at once: the mean of theirs.
template <class Find>
double threads_ns(int threads, const std::vector<std::string>& names,
                  const std::vector<uint64_t>& indices, const Find& find) {
  std::vector<double> each(static_cast<size_t>(threads));
  std::vector<std::thread> running;
  for (double& took : each) {
    running.emplace_back([&] { took = time_ns(names, indices, find); });
  }
  for (std::thread& thread : running) thread.join();
  return std::accumulate(each.begin(), each.end(), 0.0) / threads;
}

size_t allocated() { return mallinfo2().uordblks + mallinfo2().hblkhd; }

}  // namespace

int main(int argc, char** argv) {
  require(argc == 4, "expected STORE NAMES ROUNDS");
  hr_mount_t* mount = nullptr;
  require(hr_mount(argv[1], nullptr, &mount) == HR_OK, "hr_mount");
  std::vector<std::string> names;
  std::ifstream lines(argv[2]);
  for (std::string line; std::getline(lines, line);) names.push_back(line);
  require(!names.empty(), "no names");
  std::shuffle(names.begin(), names.end(), std::mt19937_64(7));
  std::vector<uint64_t> indices;
  for (const std::string& name : names) {
    require(hr_find(mount, name.c_str(), &indices.emplace_back()) == HR_OK, "hr_find");
  }
  const size_t before = allocated();
  std::map<std::string, uint64_t> tree;
  for (size_t i = 0; i < names.size(); ++i) tree.emplace(names[i], indices[i]);
  const size_t between = allocated();
  std::unordered_map<std::string, uint64_t> hash;
  hash.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) hash.emplace(names[i], indices[i]);
  const size_t after = allocated();
  // The containers were filled in the order in which they are asked: asked in another.
  std::mt19937_64 random(8);
  for (size_t i = names.size() - 1; i > 0; --i) {
    const size_t other = random() % (i + 1);
    names[i].swap(names[other]);
    std::swap(indices[i], indices[other]);
  }
  std::printf("{\"names\": %zu, \"map_bytes\": %zu, \"hash_bytes\": %zu, \"rounds\": [",
              names.size(), between - before, after - between);
  for (int round = 0; round < std::atoi(argv[3]); ++round) {
    const auto find = [&](const std::string& name) {
      uint64_t index = UINT64_MAX;
      hr_find(mount, name.c_str(), &index);
      return index;
    };
    const double find_ns = time_ns(names, indices, find);
    const double map_ns =
        time_ns(names, indices, [&](const std::string& name) { return tree.find(name)->second; });
    const double hash_ns =
        time_ns(names, indices, [&](const std::string& name) { return hash.find(name)->second; });
    std::printf(
        "%s{\"hr_find\": %.1f, \"map\": %.1f, \"hash\": %.1f, \"hr_find, 2 threads\": %.1f, "
        "\"hr_find, 4 threads\": %.1f}",
        round > 0 ? ", " : "", find_ns, map_ns, hash_ns, threads_ns(2, names, indices, find),
        threads_ns(4, names, indices, find));
  }
  std::printf("]}\n");
  hr_unmount(mount);
  return 0;
}
