// SourceReads: the last resort of a job's reads: the source, when no node has the bytes.
//
// A range of a share's volume is made of the samples that lie in it. They are read from the source
// and laid where the share's directory says, so that whoever asked for the range cannot tell. It
// reads in the thread that asks: fabric::Failover has one for this.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/directory.h"
#include "io/reader.h"
#include "io/remote_engine.h"

namespace headrace::capi {

class SourceReads final : public io::RemoteEngine {
 public:
  // `listing` is the folder of the store that lists the source; it is opened when it is needed.
  SourceReads(std::string listing, double timeout_s);
  ~SourceReads() override;

  // A volume holds this directory's samples, of which the first is number `base` of the source.
  void add_volume(const std::string& name, std::shared_ptr<Directory> directory, uint64_t base);

  void read(std::shared_ptr<io::RemoteRequests> requests) override;
  void turn(unsigned) override {}
  std::string name() const override { return "source"; }

 private:
  struct Share {
    std::shared_ptr<Directory> directory;
    uint64_t base = 0;
  };
  void open();
  int fill(const Share& share, const io::RemoteRequest& request);

  const std::string listing_;
  const double timeout_s_;
  std::map<std::string, Share> shares_;
  std::mutex mutex_;
  std::shared_ptr<void> source_;
  std::shared_ptr<io::Reader> reader_;
};

}  // namespace headrace::capi
