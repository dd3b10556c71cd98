// Namespaces as an engine: what every engine must do with bytes at an offset, asked of the reader's
// view of an initiator (RemoteReads), over real queues to a target that exports the tests' files.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fabric/initiator.h"
#include "fabric/target_queues.h"
#include "io/catalog.h"
#include "io/engine_conformance.h"
#include "io/remote_reads.h"
#include "testing/directory_builder.h"

using namespace headrace;
using namespace headrace::fabric;

namespace {

constexpr unsigned kQueues = 2;
constexpr uint16_t kEntries = 32;
constexpr uint32_t kBlock = 512;

// Takes files by their descriptors, as the tests name them: each becomes a namespace, and a volume
// that is a window of it as long as the file.
class NamespacesEngine final : public io::Engine {
 public:
  NamespacesEngine(const io::EngineOptions& options, uint8_t dgst)
      : options_(options),
        exports_(std::make_shared<Exports>()),
        target_({.loops = 1, .readers = 2}),
        initiator_(std::make_shared<Initiator>(InitiatorOptions{})),
        peer_(initiator_->add_target(1 << 20)) {
    for (unsigned i = 0; i < kQueues; ++i) connect(dgst);
  }

  const char* name() const override { return "nvme+tcp"; }

  void read(std::span<io::Read> reads, const io::OnDone& on_done) override {
    for (io::Read& read : reads) read.volume = volume_of(read.fd);
    if (catalog_ == nullptr) make_catalog();
    reads_->read(reads, on_done);
  }

 private:
  void connect(uint8_t dgst) {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    TargetQpairOptions there;
    there.entries = kEntries;
    there.dgst = dgst;
    there.sq_flow_control = false;
    target_.adopt(ends[1], there, exports_, 1, {});
    QpairOptions here;
    here.entries = kEntries;
    here.dgst = dgst;
    here.sq_flow_control = false;
    initiator_->attach(peer_, 0, ends[0], here);
  }

  uint32_t volume_of(int fd) {
    const auto it = numbers_.find(fd);
    if (it != numbers_.end()) return it->second;
    struct stat status;
    REQUIRE(::fstat(fd, &status) == 0);
    const auto bytes = static_cast<uint64_t>(status.st_size);
    const auto number = static_cast<uint32_t>(volumes_.size());
    // Opened anew: the target aligns nothing for a descriptor that is O_DIRECT.
    const io::conformance::File file("/proc/self/fd/" + std::to_string(fd), O_RDONLY);
    exports_->add(number + 1, file.fd, bytes, kBlock);
    const std::string url = "volume-" + std::to_string(number);
    initiator_->add_volume(url, peer_,
                           {number + 1, kBlock, (bytes + kBlock - 1) / kBlock, 0, bytes});
    volumes_.push_back({url, bytes});
    catalog_ = nullptr;
    return numbers_[fd] = number;
  }

  void make_catalog() {
    std::vector<std::unique_ptr<io::Volume>> volumes;
    for (const auto& [url, bytes] : volumes_) {
      volumes.push_back(std::make_unique<io::Volume>(io::VolumeKind::kRemote, url, bytes, -1));
    }
    catalog_ = std::make_unique<io::Catalog>();
    catalog_->add_segment(
        testing::open_image(testing::build_directory(testing::plain_spec(1)), "test.hrd"),
        std::move(volumes));
    catalog_->set_remote(initiator_);
    catalog_->seal();
    reads_ = std::make_unique<io::RemoteReads>(initiator_, *catalog_, options_, 60.0);
  }

  const io::EngineOptions options_;
  const std::shared_ptr<Exports> exports_;
  TargetQueues target_;
  const std::shared_ptr<Initiator> initiator_;
  const uint64_t peer_;
  std::map<int, uint32_t> numbers_;
  std::vector<std::pair<std::string, uint64_t>> volumes_;
  std::unique_ptr<io::Catalog> catalog_;
  std::unique_ptr<io::RemoteReads> reads_;
};

std::unique_ptr<io::Engine> plain(const io::EngineOptions& options) {
  return std::make_unique<NamespacesEngine>(options, 0);
}

std::unique_ptr<io::Engine> with_digests(const io::EngineOptions& options) {
  return std::make_unique<NamespacesEngine>(options, 3);
}

}  // namespace

HEADRACE_VOLUME_CONFORMANCE("nvme+tcp", plain);
HEADRACE_VOLUME_CONFORMANCE("nvme+tcp with digests", with_digests);
