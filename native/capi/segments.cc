#include "capi/segments.h"

#include <cstring>

#include "core/crc32c.h"
#include "core/error.h"
#include "core/sha.h"

namespace headrace::capi {
namespace {

constexpr char kVolumeMagic[8] = {'H', 'R', 'V', 'O', 'L', '\0', '\r', '\n'};
constexpr uint32_t kVolumeVersion = 1;

uint32_t u32_at(std::span<const std::byte> page, size_t offset) {
  uint32_t value;
  std::memcpy(&value, page.data() + offset, sizeof value);
  return value;
}

std::string hex_at(std::span<const std::byte> page, size_t offset) {
  return hex_of({reinterpret_cast<const uint8_t*>(page.data()) + offset, 16});
}

}  // namespace

void fail_corrupt(const std::string& path, const std::string& what, const std::string& found,
                  const std::string& expected) {
  throw Error(ErrorKind::kCorruptStore,
              path + ": " + what + " is " + found + ", expected " + expected +
                  ". Restore the file from a copy, or pack or index the source again.",
              path);
}

std::shared_ptr<Directory> open_directory(int fd, const SegmentEntry& entry,
                                          const std::string& path) {
  auto directory = Directory::open(fd, path);
  const std::string uuid = hex_of(directory->uuid());
  if (uuid != entry.uuid) fail_corrupt(path, "uuid", uuid, entry.uuid + " as the manifest says");
  const auto expect = [&](const char* what, uint64_t found, uint64_t expected) {
    if (found == expected) return;
    fail_corrupt(path, what, std::to_string(found),
                 std::to_string(expected) + " as the manifest says");
  };
  expect("number of samples", directory->samples(), entry.samples);
  expect("number of extents", directory->extents(), entry.extents);
  return directory;
}

void check_volume_page(std::span<const std::byte> page, const SegmentEntry& entry, size_t number,
                       const std::string& path) {
  if (page.size() < kPageBytes) {
    fail_corrupt(path, "file size in bytes", std::to_string(page.size()), "4,096 or more");
  }
  if (std::memcmp(page.data(), kVolumeMagic, sizeof kVolumeMagic) != 0) {
    fail_corrupt(path, "magic", "another one", "that of a packed volume");
  }
  std::vector<std::byte> zeroed(page.begin(), page.begin() + kPageBytes);
  std::memset(zeroed.data() + 12, 0, 4);
  if (crc32c(zeroed) != u32_at(page, 12)) {
    fail_corrupt(path, "header checksum", "wrong", "that of the header");
  }
  if (u32_at(page, 8) != kVolumeVersion) {
    fail_corrupt(path, "format version", std::to_string(u32_at(page, 8)), "1");
  }
  const std::string uuid = hex_at(page, 16), segment = hex_at(page, 32);
  if (uuid != entry.volumes[number].uuid) {
    fail_corrupt(path, "volume's uuid", uuid, entry.volumes[number].uuid);
  }
  if (segment != entry.uuid) fail_corrupt(path, "volume's segment uuid", segment, entry.uuid);
  if (u32_at(page, 48) != number) {
    fail_corrupt(path, "volume's number", std::to_string(u32_at(page, 48)), std::to_string(number));
  }
}

std::string fingerprint_of(const std::vector<std::shared_ptr<Directory>>& directories) {
  std::vector<std::byte> pages;
  for (const auto& directory : directories) {
    const auto header = directory->header();
    pages.insert(pages.end(), header.begin(), header.end());
  }
  return hex_of(sha256(pages)).substr(0, 32);
}

void check_fingerprint(const std::string& found, const std::string& expected,
                       const std::string& path) {
  if (found != expected) fail_corrupt(path, "fingerprint", found, expected);
}

}  // namespace headrace::capi
