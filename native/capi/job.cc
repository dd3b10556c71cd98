// Mounting what a job's nodes have staged: each share is read from its owner, from a replica when
// the owner is gone, and from the source when nobody has it. The order is the job's, whoever reads.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

#include "capi/failure.h"
#include "capi/job_document.h"
#include "capi/mounted.h"
#include "capi/remote_files.h"
#include "capi/source_reads.h"
#include "core/error.h"
#include "fabric/failover.h"

namespace headrace::capi {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(100);
constexpr char kScheme[] = "headrace://";

std::string folder_of(const std::string& url, const MountOptions& options) {
  const std::string rest = url.substr(sizeof kScheme - 1);
  if (rest.starts_with('/')) return rest;
  if (rest != "job") refuse(url + " is no job, expected headrace://job or headrace:///FOLDER");
  if (!options.job_folder.empty()) return options.job_folder;
  const char* given = std::getenv("HEADRACE_JOB_FOLDER");
  if (given != nullptr && *given != '\0') return given;
  refuse(
      "the job's meeting folder is not given: set HEADRACE_JOB_FOLDER, or job_folder of the "
      "options, to the folder that headrace stage --meet was given");
}

std::optional<std::string> content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text;
  std::vector<char> piece(1 << 16);
  while (file.read(piece.data(), static_cast<std::streamsize>(piece.size())) || file.gcount() > 0) {
    text.append(piece.data(), static_cast<size_t>(file.gcount()));
    if (text.size() > Json::kBytesMax) break;  // the reader refuses it
  }
  return text;
}

// Waits until all shares are staged: only then has every sample its checksum and its place.
JobDocument wait_for_job(const std::string& path, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  bool found = false;
  while (true) {
    if (const auto text = content_of(path)) {
      found = true;
      JobDocument document = parse_job(*text, path);
      if (document.staged) return document;
    }
    if (std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(kPoll);
  }
  if (!found) {
    throw Failure(HR_ERR_NO_STORE, path + ": no job meets here. Start headrace stage on its nodes.",
                  ENOENT);
  }
  throw Failure(HR_ERR_TIMEOUT, path +
                                    ": the job is still being staged. Mount it later, or give a "
                                    "larger timeout_s.");
}

class JobMount {
 public:
  JobMount(const std::string& url, Mounted* mounted)
      : path_(folder_of(url, mounted->options) + "/job.json"), mounted_(mounted) {}

  void open() {
    document_ = wait_for_job(path_, mounted_->options.timeout_s);
    connections_ = std::make_shared<fabric::Connections>(options());
    source_ = document_.listing.empty()
                  ? nullptr
                  : std::make_shared<SourceReads>(document_.listing, mounted_->options.timeout_s);
    failover_ = std::make_shared<fabric::Failover>(connections_->initiator(), source_);
    mounted_->connections = connections_;
    mounted_->catalog->set_remote(failover_);
    mounted_->fingerprint = document_.fingerprint;
    uint64_t base = 0;
    for (size_t s = 0; s < document_.segments.size(); ++s) {
      add_segment(s, base);
      base += document_.segments[s].entry.samples;
    }
  }

 private:
  // A target that is gone is given up soon where there is another way to its bytes.
  fabric::ConnectionsOptions options() const {
    auto out = connection_options(mounted_->options);
    out.host.identity.nqn = "nqn.2026-11.io.headrace:job:" + document_.session;
    bool everywhere = !document_.listing.empty();
    if (!everywhere) {
      everywhere = std::all_of(document_.segments.begin(), document_.segments.end(),
                               [](const JobSegment& segment) { return segment.places.size() > 1; });
    }
    if (!everywhere) return out;
    out.host.timeout_s = std::min(out.host.timeout_s, 1.0);
    out.command_timeout_s = std::min(out.command_timeout_s, 1.5);
    out.give_up_s = std::min(out.give_up_s, 0.3);
    return out;
  }

  std::string name_of(size_t segment, size_t volume) const {
    return kScheme + document_.session + "/share-" + std::to_string(segment) + "-" +
           std::to_string(volume);
  }

  // The places of this list that answer.
  std::vector<std::string> reached(const std::vector<std::string>& urls) {
    std::vector<std::string> out;
    for (const std::string& url : urls) {
      const std::string target = fabric::FabricAddress::parse(url).target();
      if (silent_.contains(target)) continue;
      try {
        connections_->open(url);
        out.push_back(url);
      } catch (const fabric::HostError& e) {
        silent_.emplace(target, e.what());
      }
    }
    return out;
  }

  std::shared_ptr<Directory> directory_of(const JobSegment& segment) {
    std::vector<std::string> urls;
    for (const JobPlace& place : segment.places) urls.push_back(place.directory);
    std::string why = "no place is known";
    for (const auto& [target, failure] : silent_) why = failure;
    for (const std::string& url : reached(urls)) {
      try {
        return fetch_directory(connections_->initiator(), url, segment.entry,
                               mounted_->options.timeout_s);
      } catch (const Failure& e) {
        why = e.what();
      }
    }
    for (const auto& [target, failure] : silent_) why = failure;
    throw Failure(HR_ERR_FABRIC,
                  path_ + ": no node gives the directory " + segment.entry.directory + ": " + why);
  }

  void add_segment(size_t number, uint64_t base) {
    const JobSegment& segment = document_.segments[number];
    const auto directory = directory_of(segment);
    std::vector<std::unique_ptr<io::Volume>> volumes;
    for (size_t v = 0; v < segment.entry.volumes.size(); ++v) {
      const std::string name = name_of(number, v);
      std::vector<std::string> urls;
      for (const JobPlace& place : segment.places) urls.push_back(place.volumes[v]);
      failover_->add_volume(name, reached(urls));
      if (source_ != nullptr) source_->add_volume(name, directory, base);
      volumes.push_back(std::make_unique<io::Volume>(io::VolumeKind::kRemote, name,
                                                     segment.entry.volumes[v].bytes, -1));
    }
    mounted_->catalog->add_segment(directory, std::move(volumes));
  }

  const std::string path_;
  Mounted* const mounted_;
  JobDocument document_;
  std::shared_ptr<fabric::Connections> connections_;
  std::shared_ptr<SourceReads> source_;
  std::shared_ptr<fabric::Failover> failover_;
  std::map<std::string, std::string> silent_;  // targets that did not answer, and why
};

}  // namespace

void mount_job(const std::string& url, Mounted* mounted) { JobMount(url, mounted).open(); }

}  // namespace headrace::capi
