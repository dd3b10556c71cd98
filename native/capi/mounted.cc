#include "capi/mounted.h"

#include <unistd.h>

#include "capi/failure.h"

namespace headrace::capi {

void Mounted::refuse_foreign() const {
  if (getpid() == owner_pid) return;
  refuse(where +
         " was mounted before this process was forked, and the threads that read it do not "
         "exist here. Mount it again.");
}

std::shared_ptr<Mounted> mount(const std::string& where, const MountOptions& options) {
  auto mounted = std::make_shared<Mounted>();
  mounted->where = where;
  mounted->options = options;
  mounted->owner_pid = getpid();
  if (where.starts_with("nvme+tcp://")) {
    mount_namespace(where, mounted.get());
  } else if (where.starts_with("headrace://")) {
    mount_job(where, mounted.get());
  } else if (where.find("://") != where.npos) {
    throw Failure(HR_ERR_UNSUPPORTED,
                  where +
                      ": this library reads local folders, nvme+tcp://host:port/nqn?ns=1 and "
                      "headrace://job. headrace for Python reads object stores.");
  } else {
    mount_folder(where, mounted.get());
  }
  mounted->catalog->seal();
  return mounted;
}

}  // namespace headrace::capi
