#include "capi/namespace_catalog.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>
#include <vector>

#include "capi/segments.h"
#include "core/crc32c.h"

namespace headrace::capi {
namespace {

constexpr char kMagic[8] = {'H', 'R', 'N', 'S', 'C', 'A', 'T', '1'};
constexpr uint32_t kEntriesMax = 1 << 20;
constexpr uint64_t kTableBytesMax = 64 << 20;
constexpr uint32_t kNameBytesMax = 1024;
constexpr uint64_t kBytesMax = uint64_t{1} << 62;
constexpr size_t kEntryBytes = 24, kAlignment = 8, kHeaderBytes = 32, kCrcAt = 28;

template <class T>
T field(std::span<const std::byte> data, size_t offset) {
  T value;
  std::memcpy(&value, data.data() + offset, sizeof value);
  return value;
}

void expect(bool right, const std::string& where, const std::string& what, const std::string& found,
            const std::string& expected) {
  if (!right) fail_corrupt(where, what, found, expected);
}

// A relative path that stays below, of printable ASCII or bytes above.
bool is_name(std::string_view name) {
  for (const char c : name) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7F || c == '\\') return false;
  }
  while (true) {
    const size_t slash = name.find('/');
    const std::string_view part = name.substr(0, slash);
    if (part.empty() || part == "." || part == "..") return false;
    if (slash == name.npos) return true;
    name.remove_prefix(slash + 1);
  }
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// No file lies over another, over the catalog, or beyond the end of this namespace.
void check_places(const std::map<std::string, NamespaceFile>& files, uint64_t first_byte,
                  uint64_t bytes, const std::string& where) {
  std::vector<std::tuple<uint32_t, uint64_t, uint64_t, std::string_view>> places;
  for (const auto& [name, file] : files) {
    places.emplace_back(file.nsid, file.offset, file.length, name);
  }
  std::sort(places.begin(), places.end());
  uint32_t nsid = 0;
  uint64_t end = first_byte;
  for (const auto& [in, offset, length, name] : places) {
    if (in != std::exchange(nsid, in)) end = 0;
    const std::string what = "place of '" + std::string(name) + "'";
    expect(offset >= end, where, what, std::to_string(offset), std::to_string(end) + " or more");
    end = offset + length;
    expect(in != 0 || end <= bytes, where, what, std::to_string(end),
           "at most " + std::to_string(bytes));
  }
}

}  // namespace

CatalogHeader parse_catalog_header(std::span<const std::byte> page, uint64_t bytes,
                                   const std::string& where) {
  expect(page.size() == kCatalogPageBytes && bytes >= kCatalogPageBytes, where,
         "first page in bytes", std::to_string(page.size()), "4096");
  expect(std::memcmp(page.data(), kMagic, sizeof kMagic) == 0, where, "magic",
         "another one: no store lies here", "HRNSCAT1");
  std::vector<std::byte> zeroed(page.begin(), page.end());
  std::memset(zeroed.data() + kCrcAt, 0, 4);
  expect(crc32c(zeroed) == field<uint32_t>(page, kCrcAt), where, "catalog header checksum", "wrong",
         "that of the header");
  const auto version = field<uint32_t>(page, 8);
  expect(version == 1, where, "catalog version", std::to_string(version), "1");
  expect(all_zero(page.subspan(kHeaderBytes)), where, "rest of the catalog's header", "not zero",
         "zero");
  const CatalogHeader out{field<uint32_t>(page, 12), field<uint64_t>(page, 16),
                          field<uint32_t>(page, 24)};
  expect(out.entries > 0 && out.entries <= kEntriesMax, where, "catalog entries",
         std::to_string(out.entries), "1 to " + std::to_string(kEntriesMax));
  const uint64_t least = out.entries * (kEntryBytes + kAlignment);
  const uint64_t most = std::min(kTableBytesMax, bytes - kCatalogPageBytes);
  expect(out.table_bytes >= least && out.table_bytes <= most && out.table_bytes % kAlignment == 0,
         where, "catalog table in bytes", std::to_string(out.table_bytes),
         "a multiple of 8 from " + std::to_string(least) + " to " + std::to_string(most));
  return out;
}

std::map<std::string, NamespaceFile> parse_catalog_table(const CatalogHeader& header,
                                                         std::span<const std::byte> table,
                                                         uint64_t bytes, const std::string& where) {
  expect(table.size() == header.table_bytes && crc32c(table) == header.table_crc, where,
         "catalog table checksum", "wrong", "that of the table");
  std::map<std::string, NamespaceFile> files;
  size_t at = 0;
  for (uint32_t number = 0; number < header.entries; ++number) {
    const std::string what = "entry " + std::to_string(number) + " of the catalog";
    const size_t left = table.size() - at;
    expect(left >= kEntryBytes, where, what, std::to_string(left) + " bytes", "24 or more");
    const auto name_bytes = field<uint32_t>(table, at + 4);
    const size_t padded = (size_t{name_bytes} + kAlignment - 1) / kAlignment * kAlignment;
    expect(name_bytes > 0 && name_bytes <= kNameBytesMax && padded <= left - kEntryBytes, where,
           what + ": its name in bytes", std::to_string(name_bytes), "1 to 1024 that are there");
    const std::string name(reinterpret_cast<const char*>(table.data()) + at + kEntryBytes,
                           name_bytes);
    expect(is_name(name), where, what + ": its name", "another one", "a relative path");
    expect(all_zero(table.subspan(at + kEntryBytes + name_bytes, padded - name_bytes)), where,
           what + ": its padding", "not zero", "zero");
    const NamespaceFile file{field<uint32_t>(table, at), field<uint64_t>(table, at + 8),
                             field<uint64_t>(table, at + 16)};
    expect(file.offset <= kBytesMax && file.length <= kBytesMax, where, what + ": its place",
           std::to_string(file.length) + " bytes at " + std::to_string(file.offset),
           "at most 2^62");
    expect(files.emplace(name, file).second, where, what, "a second '" + name + "'",
           "each name once");
    at += kEntryBytes + padded;
  }
  expect(at == table.size(), where, "end of the catalog's last entry", std::to_string(at),
         std::to_string(table.size()));
  const uint64_t first_byte = kCatalogPageBytes + (table.size() + kCatalogPageBytes - 1) /
                                                      kCatalogPageBytes * kCatalogPageBytes;
  check_places(files, first_byte, bytes, where);
  return files;
}

}  // namespace headrace::capi
