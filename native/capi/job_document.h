// JobDocument: `job.json` of a job's meeting folder: which segments there are, and where each can
// be read (docs/howto/global-store.md). What is read is checked before it is believed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "capi/manifest.h"

namespace headrace::capi {

struct JobPlace {
  std::string directory;             // URL
  std::vector<std::string> volumes;  // URLs, one for each of the entry's
};

struct JobSegment {
  SegmentEntry entry;
  std::vector<JobPlace> places;  // in the order in which they are asked
};

struct JobDocument {
  std::string session;
  std::string fingerprint;
  std::string listing;  // the store that lists the source
  bool staged = false;
  std::vector<JobSegment> segments;
};

// Throws Error(kCorruptStore).
JobDocument parse_job(std::string_view text, const std::string& path);

}  // namespace headrace::capi
