// Stores on disk for tests: volumes of random bytes, their directory, and what every sample must
// be.
//
// The files lie in the folder where the test runs (the build folder), not in memory: eviction from
// the page cache and direct reads need a real file system.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "io/catalog.h"
#include "testing/directory_builder.h"

namespace headrace::testing {

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::current_path() / "headrace-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<long>(bytes.size()));
}

// Overwrites in place: the inode and an open mapping stay.
inline void patch_file(const std::string& path, uint64_t offset, const std::string& bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  const ssize_t done = pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
  close(fd);
  if (done != static_cast<ssize_t>(bytes.size())) throw std::runtime_error("cannot patch " + path);
}

// Drops the file's pages from the page cache. Pages that are mapped somewhere stay.
inline void evict_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  fsync(fd);
  posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(fd);
}
inline void warm_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> block(1 << 20);
  while (file.read(block.data(), static_cast<long>(block.size())) || file.gcount() > 0) {
  }
}

inline int64_t mtime_of(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) throw std::runtime_error("cannot stat " + path);
  return status.st_mtim.tv_sec * int64_t{1'000'000'000} + status.st_mtim.tv_nsec;
}

inline std::string random_bytes(std::mt19937& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

struct StoreSpec {
  size_t samples = 400;
  unsigned volumes = 3;
  unsigned parts = 1;
  size_t length_max = 9000;
  size_t gap_max = 40;  // unused bytes between samples
  bool crc = true;
  bool tree = false;  // every sample is a file of its own; one part, one volume
  bool mtime = true;  // of a tree's files
  uint32_t seed = 1;
};

class TestStore {
 public:
  explicit TestStore(StoreSpec options) : options_(options), random_(options.seed) {
    spec.crc = options.crc;
    for (unsigned p = 1; p < options.parts; ++p)
      spec.part_names.push_back("part" + std::to_string(p));
    contents.resize(options.samples);
    options.tree ? make_tree() : make_volumes();
  }

  // What sample i must be, part by part; nothing where the part is missing.
  std::vector<std::vector<std::optional<std::string>>> contents;
  DirectorySpec spec;
  std::vector<std::string> paths;  // of the volumes

  std::string file_of(size_t sample) const { return paths[0] + "/" + spec.names[sample]; }
  uint64_t volume_bytes(size_t v) const { return std::filesystem::file_size(paths[v]); }
  std::vector<int64_t> all() const {
    std::vector<int64_t> indices(contents.size());
    for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int64_t>(i);
    return indices;
  }
  std::vector<int64_t> some(size_t count) {
    std::vector<int64_t> indices(count);
    for (auto& i : indices) i = static_cast<int64_t>(random_() % contents.size());
    return indices;
  }
  void evict() const {
    for (const auto& path : paths) evict_file(path);
  }
  void warm() const {
    for (const auto& path : paths) warm_file(path);
  }

  std::vector<std::unique_ptr<io::Volume>> open_volumes() const {
    std::vector<std::unique_ptr<io::Volume>> volumes;
    for (size_t v = 0; v < paths.size(); ++v) {
      volumes.push_back(std::make_unique<io::Volume>(
          options_.tree ? io::VolumeKind::kTree : io::VolumeKind::kFile, paths[v],
          options_.tree ? 0 : volume_bytes(v), -1));
    }
    return volumes;
  }
  void add_to(io::Catalog& catalog) const {
    catalog.add_segment(open_image(build_directory(spec), "test.hrd"), open_volumes());
  }
  std::shared_ptr<io::Catalog> catalog() const {
    auto catalog = std::make_shared<io::Catalog>();
    add_to(*catalog);
    catalog->seal();
    return catalog;
  }

 private:
  static uint32_t crc_of(const std::string& bytes) {
    return crc32c(0, reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  }
  std::string sample_bytes(size_t i) {
    const size_t length = i % 50 == 7 ? 0 : random_() % (options_.length_max + 1);
    return random_bytes(random_, length);
  }

  void make_volumes() {
    std::vector<std::string> bytes(options_.volumes, std::string(4096, 'H'));
    for (size_t i = 0; i < options_.samples; ++i) {
      spec.names.push_back("sample" + std::to_string(i));
      std::vector<ExtentSpec> extents;
      contents[i].resize(options_.parts);
      for (unsigned p = 0; p < options_.parts; ++p) {
        if (options_.parts > 1 && p != i % options_.parts && random_() % 4 == 0) continue;
        const auto v = static_cast<uint32_t>(random_() % options_.volumes);
        bytes[v].append(random_() % (options_.gap_max + 1), '\0');
        const std::string content = sample_bytes(i);
        extents.push_back({v, bytes[v].size(), content.size(), crc_of(content), -1, p});
        bytes[v] += content;
        contents[i][p] = content;
      }
      spec.extents.push_back(extents);
    }
    for (unsigned v = 0; v < options_.volumes; ++v) {
      bytes[v].resize((bytes[v].size() + 4095) / 4096 * 4096);
      paths.push_back(folder_.path("volume-" + std::to_string(v) + ".hrv"));
      write_file(paths.back(), bytes[v]);
    }
  }

  void make_tree() {
    paths.push_back(folder_.path("tree"));
    spec.mtime = options_.mtime;
    for (size_t d = 0; d < 4; ++d) {
      std::filesystem::create_directories(paths[0] + "/d" + std::to_string(d));
    }
    for (size_t i = 0; i < options_.samples; ++i) {
      spec.names.push_back("d" + std::to_string(i % 4) + "/file" + std::to_string(i));
      const std::string content = sample_bytes(i);
      write_file(file_of(i), content);
      contents[i] = {content};
      spec.extents.push_back({{0, 0, content.size(), crc_of(content), mtime_of(file_of(i)), 0}});
    }
  }

  Folder folder_;
  StoreSpec options_;
  std::mt19937 random_;
};

}  // namespace headrace::testing
