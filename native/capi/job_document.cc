#include "capi/job_document.h"

#include <algorithm>

#include "core/error.h"

namespace headrace::capi {
namespace {

constexpr size_t kPlacesMax = 1024;
constexpr size_t kWordBytesMax = 64;

const std::string& string_of(const Json& json, const char* key, const std::string& path,
                             const std::string& where) {
  const Json* found = json.find(key);
  if (found == nullptr || found->string() == nullptr || found->string()->empty()) {
    fail_manifest(path, where + key, found, "a text");
  }
  return *found->string();
}

// Letters, digits and dashes: they become part of names.
std::string word_of(const Json& json, const char* key, const std::string& path) {
  const std::string& text = string_of(json, key, path, "");
  const bool plain = std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-';
  });
  if (!plain || text.size() > kWordBytesMax) fail_manifest(path, key, json.find(key), "a word");
  return text;
}

const Json::List& list_of(const Json& json, const char* key, size_t most, const std::string& path,
                          const std::string& where) {
  const Json* found = json.find(key);
  if (found == nullptr || found->list() == nullptr || found->list()->size() > most) {
    fail_manifest(path, where + key, found, "a list of at most " + std::to_string(most));
  }
  return *found->list();
}

JobPlace parse_place(const Json& json, size_t volumes, const std::string& path,
                     const std::string& where) {
  JobPlace out{string_of(json, "directory", path, where), {}};
  for (const Json& url : list_of(json, "volumes", volumes, path, where)) {
    if (url.string() == nullptr) fail_manifest(path, where + "volumes", &url, "URLs");
    out.volumes.push_back(*url.string());
  }
  if (out.volumes.size() != volumes) {
    fail_manifest(path, where + "volumes", json.find("volumes"),
                  "one for each of the segment's " + std::to_string(volumes));
  }
  return out;
}

JobSegment parse_job_segment(const Json& json, const std::string& path, const std::string& where) {
  const Json* entry = json.find("entry");
  if (entry == nullptr) fail_manifest(path, where + "entry", entry, "a segment");
  JobSegment out{parse_segment(*entry, path, where + "entry"), {}};
  for (const Json& place : list_of(json, "places", kPlacesMax, path, where)) {
    out.places.push_back(parse_place(place, out.entry.volumes.size(), path, where + "places."));
  }
  return out;
}

}  // namespace

JobDocument parse_job(std::string_view text, const std::string& path) {
  const Json json = Json::parse(text, path);
  const Json* version = json.find("version");
  // 2 adds a checksum, which Python's readers compare.
  if (version == nullptr || (version->integer() != 1 && version->integer() != 2)) {
    fail_manifest(path, "version", version, "1 or 2");
  }
  JobDocument out;
  out.session = word_of(json, "session", path);
  out.fingerprint = word_of(json, "fingerprint", path);
  out.staged = string_of(json, "state", path, "") == "staged";
  const Json* listing = json.find("listing");
  if (listing != nullptr && listing->string() != nullptr) {
    out.listing = file_name(*listing->string()).value_or("");
  }
  const Json::List& segments = list_of(json, "segments", kSegmentsMax, path, "");
  for (size_t i = 0; i < segments.size(); ++i) {
    out.segments.push_back(
        parse_job_segment(segments[i], path, "segments[" + std::to_string(i) + "]."));
  }
  if (out.segments.empty()) fail_manifest(path, "segments", json.find("segments"), "one or more");
  return out;
}

}  // namespace headrace::capi
