// Documents that somebody else wrote, in any bytes: they are read or refused, nothing else. The
// first byte chooses which reader.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "capi/job_document.h"
#include "capi/json.h"
#include "capi/manifest.h"
#include "capi/namespace_catalog.h"
#include "capi/segments.h"
#include "core/crc32c.h"
#include "core/error.h"
#include "fabric/address.h"

namespace {

using namespace headrace;
using namespace headrace::capi;

void require(bool right) {
  if (!right) std::abort();
}

// What was read is written in a form that reads as the same.
void read_json(const std::string& text) {
  const Json json = Json::parse(text, "fuzz");
  const std::string canonical = json.canonical();
  require(Json::parse(canonical, "again").canonical() == canonical);
  if (json.string() != nullptr) file_name(*json.string());
  parse_segment(json, "fuzz", "segment");
}

// With right checksums, so that what lies behind them is reached.
void read_catalog(std::string text) {
  constexpr uint64_t kBytes = uint64_t{1} << 40;
  if (text.size() <= 32) return;
  std::vector<std::byte> page(kCatalogPageBytes);
  std::memcpy(page.data(), text.data(), 32);
  std::memcpy(page.data(), "HRNSCAT1", 8);
  std::vector<std::byte> table(text.size() - 32);
  std::memcpy(table.data(), text.data() + 32, table.size());
  const uint64_t table_bytes = table.size();
  std::memcpy(page.data() + 16, &table_bytes, sizeof table_bytes);
  const uint32_t table_crc = crc32c(table);
  std::memcpy(page.data() + 24, &table_crc, sizeof table_crc);
  std::memset(page.data() + 28, 0, 4);
  const uint32_t crc = crc32c(page);
  std::memcpy(page.data() + 28, &crc, sizeof crc);
  const CatalogHeader header = parse_catalog_header(page, kBytes, "fuzz");
  for (const auto& [name, file] : parse_catalog_table(header, table, kBytes, "fuzz")) {
    require(!name.empty() && name[0] != '/' && name.find("..") != 0);
    require(file.nsid != 0 || file.offset + file.length <= kBytes);
  }
}

// The header page of a packed volume: any bytes, of any number, and with a right checksum.
void read_volume_page(const std::string& text) {
  const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
  std::vector<std::byte> page(bytes, bytes + text.size());
  if (!text.empty() && text[0] % 2 == 0) {
    page.resize(kPageBytes);
    std::memcpy(page.data(), "HRVOL\0\r\n", 8);
    std::memset(page.data() + 12, 0, 4);
    const uint32_t crc = crc32c(page);
    std::memcpy(page.data() + 12, &crc, sizeof crc);
  }
  SegmentEntry entry;
  entry.volumes.resize(1);
  check_volume_page(page, entry, 0, "fuzz");
  require(false);  // no page has the empty uuid that this segment's volume has
}

void read_address(const std::string& text) {
  const auto address = fabric::FabricAddress::parse(text);
  require(!address.host.empty() && address.port != 0 && address.nsid != 0);
  require(fabric::is_nqn(address.subnqn));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    switch (data[0] % 6) {
      case 0:
        read_json(text);
        break;
      case 1:
        parse_manifest(text, "fuzz");
        break;
      case 2:
        parse_job(text, "fuzz");
        break;
      case 3:
        read_catalog(text);
        break;
      case 4:
        read_volume_page(text);
        break;
      default:
        read_address(text);
    }
  } catch (const Error&) {
  }
  return 0;
}
