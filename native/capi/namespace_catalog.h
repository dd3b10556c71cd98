// NamespaceCatalog: the first bytes of a namespace that carries a store: where each file of it
// lies. docs/format.md; the same checks as src/headrace/fabric/image.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

namespace headrace::capi {

struct NamespaceFile {
  uint32_t nsid = 0;  // 0: the catalog's own namespace
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct CatalogHeader {
  uint32_t entries = 0;
  uint64_t table_bytes = 0;
  uint32_t table_crc = 0;
};

inline constexpr size_t kCatalogPageBytes = 4096;

// `page` is the first page, `bytes` the whole namespace. Both throw Error(kCorruptStore).
CatalogHeader parse_catalog_header(std::span<const std::byte> page, uint64_t bytes,
                                   const std::string& where);
std::map<std::string, NamespaceFile> parse_catalog_table(const CatalogHeader& header,
                                                         std::span<const std::byte> table,
                                                         uint64_t bytes, const std::string& where);

}  // namespace headrace::capi
