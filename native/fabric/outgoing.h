// Outgoing: the bytes that a queue pair wants to send, in order.
//
// Small ones (headers, digests) are copied and lie together; payload is borrowed and stays its
// owner's until `sent` names its tag. It lies in memory, or in a file. Made for writev and
// sendfile: `gather` fills in as many parts as it is given, up to the first that lies in a file;
// `file` says which it is when its turn has come.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace::fabric {

// Bytes of a file. The descriptor is but a number here.
struct FileRange {
  int fd = -1;
  uint64_t offset = 0;
  size_t bytes = 0;
};

class Outgoing {
 public:
  void append(std::span<const std::byte> bytes);
  // `tag` comes back from `sent` when the last of these bytes has gone.
  void borrow(std::span<const std::byte> payload, uint16_t tag);
  void borrow(const FileRange& payload, uint16_t tag);

  bool empty() const { return head_ == pieces_.size(); }
  size_t bytes() const { return bytes_; }
  // Describes the first bytes; returns how many of `parts` are used.
  size_t gather(std::span<iovec> parts) const;
  // The first bytes, if they lie in a file; otherwise none.
  FileRange file() const;
  // The first `count` bytes have gone; the tags of borrowed payload that went are added to
  // `released`.
  void sent(size_t count, std::vector<uint16_t>* released);
  // Nothing more will be sent: forgets everything, and names all tags.
  void clear(std::vector<uint16_t>* released);

 private:
  struct Piece {
    const std::byte* borrowed;  // null: `size` bytes of a file, or of `text_`
    size_t size;
    uint16_t tag;
    int fd = -1;
    uint64_t offset = 0;

    bool is_file() const { return fd >= 0; }
    bool is_text() const { return borrowed == nullptr && fd < 0; }
  };
  void compact();

  std::vector<std::byte> text_;
  size_t text_gone_ = 0;
  std::vector<Piece> pieces_;
  size_t head_ = 0;       // first piece that has not gone
  size_t head_gone_ = 0;  // bytes of it that have
  size_t bytes_ = 0;
};

}  // namespace headrace::fabric
