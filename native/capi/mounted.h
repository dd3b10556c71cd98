// Mounted: an open store, wherever it lies: its catalog, and what keeps its places connected.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/arena.h"
#include "io/catalog.h"

namespace headrace::capi {

struct MountOptions {
  double timeout_s = 60;
  double give_up_s = 60;
  unsigned queues = 2;
  bool digests = true;
  std::string host_nqn;
  std::string job_folder;
};

// Immutable but for what is thread-safe itself; shared by the handles that were made of it.
struct Mounted {
  std::string where;
  std::string fingerprint;
  MountOptions options;
  // Must outlive the catalog's engine; released last.
  std::shared_ptr<void> connections;
  std::shared_ptr<io::Catalog> catalog = std::make_shared<io::Catalog>();
  std::shared_ptr<Arena> arena = Arena::make(16 << 20);  // of single reads
  int owner_pid = 0;

  // Throws Failure(HR_ERR_ARGUMENT) in a forked child.
  void refuse_foreign() const;
};

// Opens what `where` names. Throws.
std::shared_ptr<Mounted> mount(const std::string& where, const MountOptions& options);

// A store in a folder.
void mount_folder(const std::string& folder, Mounted* mounted);
// A store on a namespace: nvme+tcp://host:port/nqn?ns=1.
void mount_namespace(const std::string& url, Mounted* mounted);
// What a job's nodes have staged: headrace://job.
void mount_job(const std::string& url, Mounted* mounted);

}  // namespace headrace::capi
