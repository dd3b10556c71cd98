// Pieces: byte ranges of volumes, cut into read commands of whole blocks.
//
// A batch of requests is shared by all its pieces, wherever they are: a request is finished with
// the last of its commands, and the loops of several threads may end them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/receiver.h"
#include "io/remote_engine.h"

namespace headrace::fabric {

// A volume: a namespace, or a window of one.
struct NamespaceGeometry {
  uint32_t nsid = 0;
  uint32_t block_bytes = 512;
  uint64_t blocks = 0;
  uint64_t first_byte = 0;
  uint64_t bytes = ~uint64_t{0};  // fewer where the namespace ends before
};

// Requests that are being read.
class ReadBatch {
 public:
  ReadBatch(std::shared_ptr<io::RemoteRequests> requests, int64_t deadline_ns);

  const io::RemoteRequest& request(size_t number) const { return requests_->requests()[number]; }
  const std::string& path(size_t number) const { return requests_->path(number); }
  size_t size() const { return requests_->requests().size(); }
  io::RemoteRequests& requests() const { return *requests_; }
  int64_t deadline_ns() const { return deadline_ns_; }
  bool abandoned() const { return requests_->abandoned(); }

  // Before any of its commands ends.
  void expect(size_t number, uint64_t bytes, uint32_t commands);
  // A command of a request ended. True with the last one: `result` is what became of the request.
  bool ended(size_t number, int error, io::RemoteResult* result);

 private:
  struct Read {
    uint64_t bytes = 0;
    std::atomic<uint32_t> commands_left = 0;
    std::atomic<int> error = 0;
  };
  const std::shared_ptr<io::RemoteRequests> requests_;
  const int64_t deadline_ns_;
  std::vector<Read> reads_;
};

// One command: whole blocks, of which `place` is wanted.
struct Piece {
  std::shared_ptr<ReadBatch> batch;
  uint32_t number = 0;  // of the request
  uint32_t nsid = 0;
  uint64_t slba = 0;
  uint32_t blocks = 0;
  uint32_t bytes = 0;
  DataPlace place;
  unsigned attempts = 0;
};

// Adds the commands of one request to `pieces`, none larger than `command_bytes` unless a block is;
// returns how many. As of a file: what lies behind the volume's end does not arrive, and 0 is
// returned when that is all of it.
size_t cut(const NamespaceGeometry& volume, uint32_t command_bytes,
           const std::shared_ptr<ReadBatch>& batch, size_t number, std::vector<Piece>* pieces);

}  // namespace headrace::fabric
