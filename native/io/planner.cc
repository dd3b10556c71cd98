#include "io/planner.h"

#include <algorithm>

#include "core/error.h"

namespace headrace::io {
namespace {

// Slots of one volume whose residency is asked one by one; larger groups are sampled.
constexpr size_t kProbeEachMax = 8;
constexpr size_t kProbeSample = 8;
// Directory rows are asked for this many samples ahead.
constexpr size_t kLookAhead = 16;
// Direct requests must stay aligned, and every request must make progress.
ReaderOptions sane(ReaderOptions options) {
  options.request_bytes_max =
      align_up(std::clamp<uint64_t>(options.request_bytes_max, 4096, 1 << 30), 4096);
  options.coalesce_gap_bytes = std::min<uint64_t>(options.coalesce_gap_bytes, 1 << 30);
  options.remote_request_bytes_max =
      std::clamp<uint64_t>(options.remote_request_bytes_max, 1, 1 << 30);
  options.remote_gap_bytes = std::min<uint64_t>(options.remote_gap_bytes, 1 << 30);
  options.remote_overshoot = std::clamp(options.remote_overshoot, 0.0, 1e6);
  return options;
}

}  // namespace

Planner::Planner(std::shared_ptr<const Catalog> catalog, const ReaderOptions& options,
                 std::vector<int> parts)
    : held_(std::move(catalog)),
      catalog_(*held_),
      options_(sane(options)),
      parts_(std::move(parts)),
      hints_(std::make_unique<VolumeHint[]>(catalog_.volumes())) {
  for (const Segment& segment : catalog_.segments()) {
    std::vector<int> slots;
    for (const int part : segment.part_map) {
      const auto it = std::find(parts_.begin(), parts_.end(), part);
      slots.push_back(it == parts_.end() ? -1 : static_cast<int>(it - parts_.begin()));
    }
    slots_of_part_.push_back(std::move(slots));
  }
}

uint64_t Planner::plan(Plan& plan) const {
  locate(plan);
  choose(plan);
  return lay_out(plan);
}

void Planner::doubt(uint32_t volume) const {
  hints_[volume].doubtful.store(true, std::memory_order_relaxed);
}

// Leaves of a slot what a range asks for.
void Planner::cut(const Range& range, uint64_t index, Slot* slot) const {
  if (range.start == 0 && range.size == slot->length) return;
  const bool whole_files = catalog_.volume(slot->volume).kind() == VolumeKind::kTree;
  if (whole_files || range.start > slot->length || range.size > slot->length - range.start) {
    throw Error(ErrorKind::kInvalidArgument,
                std::to_string(range.size) + " bytes from " + std::to_string(range.start) +
                    " on were asked of sample " + std::to_string(index) + ", which has " +
                    std::to_string(slot->length) +
                    (whole_files ? " and is a file, which is read whole" : ""));
  }
  slot->offset += range.start;
  slot->length = range.size;
  slot->has_crc = false;
}

void Planner::locate(Plan& plan) const {
  const std::span<const int64_t> indices = plan.batch->indices;
  const size_t parts = parts_.size();
  plan.slots.resize(indices.size() * parts);
  plan.batch->samples = indices.size();
  plan.batch->parts = parts;
  plan.batch->labels.resize(indices.size());
  const auto prefetch = [&](size_t i) {
    const Segment& segment = catalog_.segment_of(static_cast<uint64_t>(indices[i]));
    segment.directory->prefetch_sample(static_cast<uint64_t>(indices[i]) - segment.base);
  };
  for (size_t i = 0; i < std::min(kLookAhead, indices.size()); ++i) prefetch(i);
  for (size_t i = 0; i < indices.size(); ++i) {
    if (i + kLookAhead < indices.size()) prefetch(i + kLookAhead);
    const auto index = static_cast<uint64_t>(indices[i]);
    const Segment& segment = catalog_.segment_of(index);
    const auto number = static_cast<uint32_t>(&segment - catalog_.segments().data());
    const Directory& directory = *segment.directory;
    const uint64_t sample = index - segment.base;
    plan.batch->labels[i] = directory.label(sample);
    const auto [first, last] = directory.extents_of(sample);
    for (uint64_t e = first; e < last; ++e) {
      const uint32_t part = directory.part(e);
      const int position = part < slots_of_part_[number].size() ? slots_of_part_[number][part] : -1;
      if (position < 0) continue;
      const Extent extent = directory.extent(e);
      catalog_.check_extent(segment, sample, extent);
      Slot& slot = plan.slots[i * parts + static_cast<size_t>(position)];
      slot.offset = extent.offset;
      slot.length = extent.length;
      slot.mtime_ns = extent.mtime_ns;
      slot.sample = sample;
      slot.volume = segment.volume_base + extent.volume;
      slot.segment = number;
      slot.crc = extent.crc;
      slot.has_crc = directory.has_crc();
      if (!plan.ranges.empty()) cut(plan.ranges[i], index, &slot);
      slot.route = Route::kBuffered;  // decided by `choose`
    }
  }
}

// Decides each slot's route and sorts what is to be read in runs.
void Planner::choose(Plan& plan) const {
  std::vector<uint32_t> order;
  order.reserve(plan.slots.size());
  bool one_volume = true;
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    if (plan.slots[i].route == Route::kNone) continue;
    const Volume& volume = catalog_.volume(plan.slots[i].volume);
    // An empty file is still opened: it may have grown.
    if (plan.slots[i].length == 0 && volume.kind() != VolumeKind::kTree) {
      plan.slots[i].route = Route::kNone;
      if (plan.slots[i].has_crc && plan.slots[i].crc != 0) plan.slots[i].ok = false;
      continue;
    }
    one_volume &= order.empty() || plan.slots[i].volume == plan.slots[order[0]].volume;
    order.push_back(i);
  }
  if (!one_volume) {
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return plan.slots[a].volume < plan.slots[b].volume;
    });
  }
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin + 1;
    const uint32_t volume = plan.slots[order[begin]].volume;
    while (end < order.size() && plan.slots[order[end]].volume == volume) ++end;
    choose_volume(plan, std::span(order).subspan(begin, end - begin), volume);
    begin = end;
  }
  for (const uint32_t slot : order) {
    const Route route = plan.slots[slot].route;
    if (is_run(route)) plan.sorted.push_back(slot);
  }
  std::sort(plan.sorted.begin(), plan.sorted.end(), [&](uint32_t a, uint32_t b) {
    const Slot& x = plan.slots[a];
    const Slot& y = plan.slots[b];
    if (x.volume != y.volume) return x.volume < y.volume;
    if (x.route != y.route) return x.route < y.route;
    return x.offset < y.offset;
  });
}

void Planner::choose_volume(Plan& plan, std::span<uint32_t> slots, uint32_t number) const {
  const auto set_all = [&](Route route) {
    for (const uint32_t slot : slots) plan.slots[slot].route = route;
  };
  Volume& volume = catalog_.volume(number);
  if (volume.kind() == VolumeKind::kRemote) return set_all(Route::kRemote);
  if (volume.kind() == VolumeKind::kTree || catalog_.open_per_read()) {
    return set_all(Route::kPath);
  }
  const bool may_gather = options_.slow == nullptr && (options_.engine == EngineChoice::kAuto ||
                                                       options_.engine == EngineChoice::kMmap);
  const bool may_direct = options_.direct != DirectReads::kNever;
  if (may_gather && options_.engine == EngineChoice::kMmap && volume.mapping() != nullptr) {
    return set_all(Route::kGather);
  }
  if (options_.direct == DirectReads::kAlways) {
    return set_all(volume.direct_fd() >= 0 ? Route::kDirect : Route::kBuffered);
  }
  const auto resident = [&](uint32_t slot) {
    return volume.resident(plan.slots[slot].offset, plan.slots[slot].length);
  };
  const Route cold = may_direct && volume.direct_fd() >= 0 ? Route::kDirect : Route::kBuffered;
  const Route warm = may_gather && volume.mapping() != nullptr ? Route::kGather : Route::kBuffered;
  VolumeHint& hint = hints_[number];
  if (slots.size() > kProbeEachMax && !hint.doubtful.load(std::memory_order_relaxed)) {
    size_t found = 0;
    for (size_t i = 0; i < kProbeSample; ++i) {
      found += resident(slots[i * slots.size() / kProbeSample]);
    }
    if (found == kProbeSample) return set_all(warm);
    if (found == 0) return set_all(cold);
  }
  size_t found = 0;
  for (const uint32_t slot : slots) {
    const bool here = resident(slot);
    found += here;
    plan.slots[slot].route = here ? warm : cold;
  }
  if (found == slots.size() && slots.size() > kProbeEachMax) {
    hint.doubtful.store(false, std::memory_order_relaxed);
  }
}

}  // namespace headrace::io
