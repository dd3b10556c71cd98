#include "capi/failure.h"
#include "capi/mounted.h"
namespace headrace::capi {
void mount_namespace(const std::string& url, Mounted*) { throw Failure(HR_ERR_UNSUPPORTED, url); }
void mount_job(const std::string& url, Mounted*) { throw Failure(HR_ERR_UNSUPPORTED, url); }
}  // namespace headrace::capi
