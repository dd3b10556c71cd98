// Mounting a store that lies on an NVMe/TCP namespace, or on several of one subsystem.
#include <cstring>
#include <utility>

#include "capi/failure.h"
#include "capi/manifest.h"
#include "capi/mounted.h"
#include "capi/namespace_catalog.h"
#include "capi/remote_files.h"
#include "capi/segments.h"
#include "core/error.h"

namespace headrace::capi {
namespace {

using Files = std::map<std::string, NamespaceFile>;

class NamespaceStore {
 public:
  NamespaceStore(const std::string& url, Mounted* mounted)
      : url_(url),
        address_(fabric::FabricAddress::parse(url)),
        mounted_(mounted),
        connections_(std::make_shared<fabric::Connections>(connection_options(mounted->options))) {
    if (address_.window) refuse(url + ": a store begins where its namespace does");
    mounted->connections = connections_;
    mounted->catalog->set_remote(connections_->initiator());
  }

  void open() {
    bytes_ = connections_->open(url_);
    files_ = read_catalog();
    const std::string path = name_of("store.json");
    const NamespaceFile& file = file_of("store.json");
    if (file.length > Json::kBytesMax) {
      fail_corrupt(path, "manifest size in bytes", std::to_string(file.length), "at most 64 MiB");
    }
    std::vector<std::byte> text(file.length);
    read(open_file("store.json", file.length), 0, text);
    const Manifest manifest =
        parse_manifest({reinterpret_cast<const char*>(text.data()), text.size()}, path);
    std::vector<std::shared_ptr<Directory>> directories;
    for (const SegmentEntry& segment : manifest.segments) {
      const std::string name = open_file(segment.directory, segment.directory_bytes);
      directories.push_back(
          fetch_directory(connections_->initiator(), name, segment, mounted_->options.timeout_s));
    }
    mounted_->fingerprint = fingerprint_of(directories);
    check_fingerprint(mounted_->fingerprint, manifest.fingerprint, path);
    for (size_t s = 0; s < directories.size(); ++s) {
      mounted_->catalog->add_segment(directories[s], open_volumes(manifest.segments[s]));
    }
  }

 private:
  void read(const std::string& name, uint64_t offset, std::span<std::byte> dest) const {
    read_range(connections_->initiator(), name, offset, dest, mounted_->options.timeout_s);
  }

  Files read_catalog() const {
    if (bytes_ < kCatalogPageBytes) {
      fail_corrupt(url_, "size in bytes", std::to_string(bytes_), "that of a store");
    }
    std::vector<std::byte> page(kCatalogPageBytes);
    read(url_, 0, page);
    const CatalogHeader header = parse_catalog_header(page, bytes_, url_);
    std::vector<std::byte> table(header.table_bytes);
    read(url_, kCatalogPageBytes, table);
    return parse_catalog_table(header, table, bytes_, url_);
  }

  const NamespaceFile& file_of(const std::string& name) const {
    const auto it = files_.find(name);
    if (it == files_.end()) {
      throw Error(ErrorKind::kCorruptStore,
                  url_ + ": the catalog names no " + name + ". Export or image the store again.",
                  url_);
    }
    return it->second;
  }

  std::string name_of(const std::string& name) const { return url_ + " (" + name + ")"; }

  // Makes a file readable; returns the name under which it is.
  std::string open_file(const std::string& name, uint64_t expected_bytes) {
    const NamespaceFile& file = file_of(name);
    const std::string path = name_of(name);
    if (file.length != expected_bytes) {
      fail_corrupt(path, "file size in bytes", std::to_string(file.length),
                   std::to_string(expected_bytes));
    }
    const uint32_t nsid = file.nsid == 0 ? address_.nsid : file.nsid;
    connections_->open(address_.target() + "?ns=" + std::to_string(nsid) + "#" +
                           std::to_string(file.offset) + "+" + std::to_string(file.length),
                       path);
    return path;
  }

  std::vector<std::unique_ptr<io::Volume>> open_volumes(const SegmentEntry& segment) {
    std::vector<std::unique_ptr<io::Volume>> volumes;
    for (size_t number = 0; number < segment.volumes.size(); ++number) {
      const VolumeEntry& entry = segment.volumes[number];
      if (entry.kind != VolumeEntry::Kind::kPacked) {
        throw Failure(HR_ERR_UNSUPPORTED,
                      url_ + ": its samples lie elsewhere, in " + entry.path +
                          ", expected a packed store. Pack it, and export the packed one.");
      }
      const std::string path = open_file(entry.path, entry.bytes);
      std::vector<std::byte> page(kPageBytes);
      read(path, 0, page);
      check_volume_page(page, segment, number, path);
      volumes.push_back(
          std::make_unique<io::Volume>(io::VolumeKind::kRemote, path, entry.bytes, -1));
    }
    return volumes;
  }

  const std::string url_;
  const fabric::FabricAddress address_;
  Mounted* const mounted_;
  const std::shared_ptr<fabric::Connections> connections_;
  uint64_t bytes_ = 0;
  Files files_;
};

}  // namespace

void mount_namespace(const std::string& url, Mounted* mounted) {
  NamespaceStore(url, mounted).open();
}

}  // namespace headrace::capi
