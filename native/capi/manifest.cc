#include "capi/manifest.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "core/crc32c.h"
#include "core/error.h"

namespace headrace::capi {
namespace {

constexpr uint64_t kSamplesMax = uint64_t{1} << 48;
constexpr uint64_t kFileBytesMax = uint64_t{1} << 62;
constexpr size_t kFileNameBytesMax = 255;

bool is_hex32(const std::string& text) {
  return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == text.npos;
}

// A file in the store's own folder: a plain name that cannot lead out of it.
bool is_plain_name(const std::string& text) {
  const auto letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  const auto allowed = [&](char c) { return letter(c) || c == '.' || c == '_' || c == '-'; };
  return !text.empty() && text.size() <= kFileNameBytesMax && letter(text[0]) &&
         std::all_of(text.begin(), text.end(), allowed);
}

class Checker {
 public:
  Checker(const std::string& path, std::string where) : path_(path), where_(std::move(where)) {}

  std::string hex(const Json& entry, const char* key) const {
    const Json* found = entry.find(key);
    if (found == nullptr || found->string() == nullptr || !is_hex32(*found->string())) {
      fail(key, found, "32 hexadecimal digits");
    }
    return *found->string();
  }
  std::string plain_name(const Json& entry, const char* key) const {
    const Json* found = entry.find(key);
    if (found == nullptr || found->string() == nullptr || !is_plain_name(*found->string())) {
      fail(key, found, "a file name without '/'");
    }
    return *found->string();
  }
  std::string foreign_path(const Json& entry, const char* key) const {
    const Json* found = entry.find(key);
    const auto bytes =
        found != nullptr && found->string() != nullptr ? file_name(*found->string()) : std::nullopt;
    if (!bytes || bytes->empty()) fail(key, found, "a path");
    return *bytes;
  }
  uint64_t number(const Json& entry, const char* key, uint64_t limit) const {
    const Json* found = entry.find(key);
    const auto value = found != nullptr ? found->integer() : std::nullopt;
    if (!value || *value < 0 || static_cast<uint64_t>(*value) > limit) {
      fail(key, found, "an integer from 0 to " + std::to_string(limit));
    }
    return static_cast<uint64_t>(*value);
  }
  const Json::List& list(const Json& entry, const char* key, uint64_t most) const {
    const Json* found = entry.find(key);
    const Json::List* items = found != nullptr ? found->list() : nullptr;
    if (items == nullptr || items->empty() || items->size() > most) {
      fail(key, found, "a list of 1 to " + std::to_string(most));
    }
    return *items;
  }
  [[noreturn]] void fail(const char* key, const Json* found, const std::string& expected) const {
    fail_manifest(path_, where_.empty() ? key : where_ + "." + key, found, expected);
  }

 private:
  const std::string& path_;
  const std::string where_;
};

VolumeEntry parse_volume(const Json& entry, const std::string& path, const std::string& where) {
  const Checker check(path, where);
  const Json* kind = entry.find("kind");
  const std::string name = kind != nullptr && kind->string() != nullptr ? *kind->string() : "";
  VolumeEntry out;
  if (name == "packed") {
    out.kind = VolumeEntry::Kind::kPacked;
    out.path = check.plain_name(entry, "path");
    out.uuid = check.hex(entry, "uuid");
  } else if (name == "file" || name == "tree" || name == "object") {
    out.kind = name == "file"   ? VolumeEntry::Kind::kFile
               : name == "tree" ? VolumeEntry::Kind::kTree
                                : VolumeEntry::Kind::kObject;
    out.path = check.foreign_path(entry, "path");
  } else {
    check.fail("kind", kind, "packed, file, tree or object");
  }
  if (out.kind != VolumeEntry::Kind::kTree) out.bytes = check.number(entry, "bytes", kFileBytesMax);
  if (out.kind == VolumeEntry::Kind::kFile) {
    const Json* mtime = entry.find("mtime_ns");
    const auto value = mtime != nullptr ? mtime->integer() : std::nullopt;
    if (!value) check.fail("mtime_ns", mtime, "an integer");
    out.mtime_ns = *value;
  }
  return out;
}

void check_names_differ(const Manifest& manifest, const std::string& path) {
  std::set<std::string_view> names;
  size_t count = 0;
  for (const SegmentEntry& segment : manifest.segments) {
    names.insert(segment.directory);
    ++count;
    for (const VolumeEntry& volume : segment.volumes) {
      if (volume.kind != VolumeEntry::Kind::kPacked) continue;
      names.insert(volume.path);
      ++count;
    }
  }
  if (names.size() != count) fail_manifest(path, "a file name", nullptr, "each name once");
}

}  // namespace

void fail_manifest(const std::string& path, const std::string& what, const Json* found,
                   const std::string& expected) {
  throw Error(ErrorKind::kCorruptStore,
              path + ": " + what + " is " +
                  (found != nullptr ? found->shown() : "not as it must be") + ", expected " +
                  expected +
                  ". Restore the manifest from a copy, or pack or index the source again.",
              path);
}

SegmentEntry parse_segment(const Json& entry, const std::string& path, const std::string& where) {
  const Checker check(path, where);
  SegmentEntry out;
  out.directory = check.plain_name(entry, "directory");
  out.directory_bytes = check.number(entry, "directory_bytes", kFileBytesMax);
  out.uuid = check.hex(entry, "uuid");
  out.samples = check.number(entry, "samples", kSamplesMax);
  out.extents = check.number(entry, "extents", kSamplesMax * 16);
  if (out.extents < out.samples) {
    check.fail("extents", entry.find("extents"), std::to_string(out.samples) + " or more");
  }
  const Json::List& volumes = check.list(entry, "volumes", uint64_t{1} << 32);
  for (size_t i = 0; i < volumes.size(); ++i) {
    out.volumes.push_back(
        parse_volume(volumes[i], path, where + ".volumes[" + std::to_string(i) + "]"));
  }
  return out;
}

Manifest parse_manifest(std::string_view text, const std::string& path) {
  const Json document = Json::parse(text, path);
  const std::string canonical = document.canonical("crc32c");
  char computed[16];
  std::snprintf(computed, sizeof computed, "%08x",
                crc32c(std::as_bytes(std::span(canonical.data(), canonical.size()))));
  const Json* stated = document.find("crc32c");
  if (stated == nullptr || stated->string() == nullptr || *stated->string() != computed) {
    fail_manifest(path, "manifest checksum", stated, computed);
  }
  const Json* format = document.find("format");
  if (format == nullptr || format->string() == nullptr || *format->string() != "headrace-store") {
    fail_manifest(path, "format", format, "headrace-store");
  }
  const Json* version = document.find("version");
  if (version == nullptr || version->integer() != 1) fail_manifest(path, "version", version, "1");
  const Checker check(path, "");
  Manifest out;
  check.hex(document, "uuid");
  out.fingerprint = check.hex(document, "fingerprint");
  const Json::List& segments = check.list(document, "segments", kSegmentsMax);
  uint64_t samples = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    out.segments.push_back(parse_segment(segments[i], path, "segments[" + std::to_string(i) + "]"));
    samples += out.segments.back().samples;
  }
  if (samples > kSamplesMax || check.number(document, "samples", kSamplesMax) != samples) {
    check.fail("samples", document.find("samples"), std::to_string(samples));
  }
  check_names_differ(out, path);
  return out;
}

}  // namespace headrace::capi
