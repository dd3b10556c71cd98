// Catalog: the segments of an open store: directories, their volumes, and the global index over
// both. Immutable and thread-safe; shared by all readers of a store in one process.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/directory.h"
#include "io/batch.h"
#include "io/remote_engine.h"
#include "io/syscalls.h"
#include "io/volume.h"

namespace headrace::io {

// No sample and no volume is as large; below these no sum of a batch's lengths overflows.
inline constexpr uint64_t kExtentBytesMax = uint64_t{1} << 46;
inline constexpr uint64_t kOffsetMax = uint64_t{1} << 62;

struct Segment {
  std::shared_ptr<Directory> directory;
  uint64_t base = 0;         // global index of its first sample
  uint32_t volume_base = 0;  // number of its first volume in the catalog
  uint32_t volumes = 0;
  std::vector<int> part_map;  // the segment's part -> number in Catalog::part_names()
};

class Catalog {
 public:
  void add_segment(std::shared_ptr<Directory> directory,
                   std::vector<std::unique_ptr<Volume>> volumes);
  // What reads the remote volumes. Before the first read.
  void set_remote(std::shared_ptr<RemoteEngine> engine) { remote_ = std::move(engine); }
  const std::shared_ptr<RemoteEngine>& remote() const { return remote_; }
  // What reads single samples and second tries are made of; tests hand over calls that fail.
  void set_syscalls(const Syscalls& sys) { sys_ = sys; }
  // Decides how volumes are opened. Call once after the last segment.
  void seal();

  uint64_t samples() const { return samples_; }
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<std::string>& part_names() const { return part_names_; }
  Volume& volume(uint32_t number) const { return *volumes_[number]; }
  size_t volumes() const { return volumes_.size(); }
  // More file volumes than descriptors: each read opens and closes its file.
  bool open_per_read() const { return open_per_read_; }

  // REQUIRES: index < samples().
  const Segment& segment_of(uint64_t index) const {
    if (index < segments_[0].base + segments_[0].directory->samples()) return segments_[0];
    return later_segment_of(index);
  }
  // Throws Error(kSampleNotFound).
  void check_index(int64_t index) const;

  // Throws Error(kCorruptStore) for an extent that leaves its volume, before memory is allocated
  // for it.
  void check_extent(const Segment& segment, uint64_t sample, const Extent& extent) const {
    if (extent.volume < segment.volumes && extent.length <= kExtentBytesMax &&
        extent.offset <= kOffsetMax) {
      const Volume& v = *volumes_[segment.volume_base + extent.volume];
      if (v.kind() == VolumeKind::kTree ||
          (extent.offset <= v.bytes() && extent.length <= v.bytes() - extent.offset)) {
        return;
      }
    }
    fail_extent(segment, sample, extent);
  }

  // One part of one sample, or a range of it, read in the calling thread. The checksum is verified
  // when the whole part is read. `size` -1: to the end. The batch has one sample.
  std::shared_ptr<Batch> read_one(Arena& arena, int64_t index, int part, uint64_t start,
                                  int64_t size, bool verify) const;
  // A batch of all these samples, of which `read` has those at `positions`; null: of none. The
  // others have their labels, and no bytes. Throws Error(kInvalidArgument) for what does not fit.
  std::shared_ptr<Batch> filled_up(Arena& arena, std::vector<int64_t> indices, const Batch* read,
                                   std::span<const int64_t> positions) const;
  // Reads exactly the bytes of an extent with buffered system calls: the slow and certain way, used
  // for single samples and for a second try. Returns 0 or a FailureKind in *failure.
  // `remote` says how remote volumes are read; may be null where there are none.
  bool read_extent(const Segment& segment, uint64_t sample, const Extent& extent, uint64_t start,
                   uint64_t length, std::byte* dest, Failure* failure,
                   const RemoteCall* remote = nullptr) const;

 private:
  const Segment& later_segment_of(uint64_t index) const;
  [[noreturn]] void fail_extent(const Segment& segment, uint64_t sample,
                                const Extent& extent) const;

  std::vector<Segment> segments_;
  std::vector<std::unique_ptr<Volume>> volumes_;
  std::vector<std::string> part_names_;
  std::shared_ptr<RemoteEngine> remote_;
  Syscalls sys_ = kSyscalls;
  uint64_t samples_ = 0;
  bool open_per_read_ = false;
};

}  // namespace headrace::io
