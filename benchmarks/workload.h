// What the probes of this folder have in common: the extents to read, their random order, clocks.
//
// A manifest is a sequence of (u64 offset, u64 length) in host order, one pair a sample, over one
// file. Header only and free of headrace's own code, so that a limit is not measured with the
// thing that it limits.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace headrace::bench {

struct Extent {
  uint64_t offset;
  uint64_t length;
};

[[noreturn]] inline void fail(const std::string& what) {
  std::perror(what.c_str());
  std::exit(1);
}

inline std::vector<Extent> load_manifest(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) fail(path);
  std::vector<Extent> extents;
  Extent extent;
  while (std::fread(&extent, sizeof extent, 1, file) == 1) extents.push_back(extent);
  std::fclose(file);
  return extents;
}

// The extents in the order of `seed`, at most `samples_max` of them.
inline std::vector<Extent> in_random_order(std::vector<Extent> extents, uint64_t seed,
                                           uint64_t samples_max) {
  std::mt19937_64 random(seed);
  std::shuffle(extents.begin(), extents.end(), random);
  if (extents.size() > samples_max) extents.resize(samples_max);
  return extents;
}

inline double now_s() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since).count();
}

// User and system time of all threads of this process, kernel workers of its rings included.
inline double cpu_s() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](timeval t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Result {
  std::string mode;
  unsigned threads = 1;
  unsigned depth = 1;
  uint64_t samples = 0;
  uint64_t bytes = 0;
  double seconds = 0;
  double cpu_seconds = 0;
  double first_batch_s = 0;
};

inline void print_json(const Result& r) {
  std::printf(
      "{\"mode\": \"%s\", \"threads\": %u, \"depth\": %u, \"samples\": %llu, \"bytes\": %llu, "
      "\"seconds\": %.6f, \"cpu_seconds\": %.6f, \"samples_per_s\": %.1f, "
      "\"cpu_s_per_gb\": %.5f, \"first_batch_s\": %.6f}\n",
      r.mode.c_str(), r.threads, r.depth, static_cast<unsigned long long>(r.samples),
      static_cast<unsigned long long>(r.bytes), r.seconds, r.cpu_seconds,
      r.seconds > 0 ? static_cast<double>(r.samples) / r.seconds : 0.0,
      r.bytes > 0 ? r.cpu_seconds / (static_cast<double>(r.bytes) * 1e-9) : 0.0, r.first_batch_s);
}

}  // namespace headrace::bench
