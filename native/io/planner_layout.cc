// The planner's second half: the places in the buffer, and the requests that fill it.
#include <fcntl.h>

#include <algorithm>

#include "core/error.h"
#include "io/gap_choice.h"
#include "io/planner.h"
#include "io/sample_path.h"

namespace headrace::io {
namespace {

// Runs start at pages, which every device's alignment divides.
constexpr uint64_t kRunAlignment = 4096;

uint64_t align_down(uint64_t value, uint64_t alignment) { return value & ~(alignment - 1); }

// A batch's size is a sum of numbers from a directory: it is refused before it could overflow.
void check_bytes(uint64_t bytes) {
  if (bytes <= kOffsetMax) return;
  throw Error(ErrorKind::kCorruptStore,
              "the samples of a batch are said to have more than " + std::to_string(kOffsetMax) +
                  " bytes. A sample directory is damaged; run `headrace verify` on the store.");
}

Read& request(Plan& plan, std::vector<Read>& list, uint32_t volume, uint64_t offset,
              uint64_t length, uint64_t dest) {
  Read& r = list.emplace_back();
  r.volume = volume;
  r.offset = offset;
  r.length = length;
  r.dest = plan.data + dest;
  r.buffer_id = plan.batch->buffer->id;
  plan.batch->stats.bytes_read += length;
  return r;
}

// Which gaps between remote slots are worth reading through.
GapChoice choose_remote_gaps(const Plan& plan, const ReaderOptions& options) {
  std::vector<uint64_t> gaps;
  uint64_t wanted = 0;
  uint64_t end = 0;
  const Slot* before = nullptr;
  for (const uint32_t number : plan.sorted) {
    const Slot& slot = plan.slots[number];
    if (slot.route != Route::kRemote) continue;
    const bool neighbours = before != nullptr && before->volume == slot.volume;
    if (neighbours && slot.offset > end) gaps.push_back(slot.offset - end);
    const uint64_t from = neighbours ? std::max(slot.offset, end) : slot.offset;
    end = std::max(neighbours ? end : 0, slot.offset + slot.length);
    wanted += end - std::min(from, end);
    before = &slot;
  }
  const double budget = static_cast<double>(wanted) * options.remote_overshoot;
  return {std::move(gaps), options.remote_free_gap_bytes, options.remote_gap_bytes,
          static_cast<uint64_t>(std::min(budget, 1e18))};
}

}  // namespace

// Gives every slot its place in the buffer; returns the bytes needed.
uint64_t Planner::lay_out(Plan& plan) const {
  uint64_t bytes = 0;
  for (Slot& slot : plan.slots) {
    if (slot.route != Route::kGather && slot.route != Route::kPath) continue;
    slot.dest = bytes;
    bytes = align_up(bytes + slot.length, kGatherAlignment);
    check_bytes(bytes);
  }
  lay_out_runs(plan, &bytes);
  return bytes;
}

void Planner::lay_out_runs(Plan& plan, uint64_t* bytes) const {
  GapChoice remote_gaps = choose_remote_gaps(plan, options_);
  const auto joins = [&](const Run& run, const Slot& slot, uint64_t begin) {
    if (run.volume != slot.volume || run.route != slot.route) return false;
    if (begin <= run.end) return true;
    if (slot.route == Route::kRemote) return remote_gaps.joins(begin - run.end);
    return begin - run.end <= options_.coalesce_gap_bytes;
  };
  for (uint32_t i = 0; i < plan.sorted.size(); ++i) {
    Slot& slot = plan.slots[plan.sorted[i]];
    const uint64_t alignment =
        slot.route == Route::kDirect ? catalog_.volume(slot.volume).alignment() : 1;
    const uint64_t begin = align_down(slot.offset, alignment);
    const uint64_t end = align_up(slot.offset + slot.length, alignment);
    Run* run = plan.runs.empty() ? nullptr : &plan.runs.back();
    if (run == nullptr || !joins(*run, slot, begin)) {
      run = &plan.runs.emplace_back();
      run->volume = slot.volume;
      run->route = slot.route;
      run->begin = begin;
      run->end = begin;
      run->dest = align_up(*bytes, kRunAlignment);
      run->first = i;
    }
    run->end = std::max(run->end, end);
    run->last = i + 1;
    slot.dest = run->dest + (slot.offset - run->begin);
    *bytes = run->dest + (run->end - run->begin);
    check_bytes(*bytes);
  }
}

void Planner::ask(Plan& plan) const {
  ask_each(plan);
  ask_runs(plan);
  plan.batch->stats.cached_reads = plan.gathers.size();
}

// The slots that are read alone: gathered from a mapping, or files of their own.
void Planner::ask_each(Plan& plan) const {
  plan.gathers.reserve(plan.slots.size());
  for (uint32_t i = 0; i < plan.slots.size(); ++i) {
    Slot& slot = plan.slots[i];
    if (slot.route == Route::kPath) ask_path(plan, i);
    if (slot.route != Route::kGather) continue;
    Read& r = plan.gathers.emplace_back();
    r.mapping = catalog_.volume(slot.volume).mapping();
    r.offset = slot.offset;
    r.length = slot.length;
    r.dest = plan.data + slot.dest;
    r.want_crc = options_.verify && slot.has_crc;
    r.user = i;
  }
}

void Planner::ask_path(Plan& plan, uint32_t number) const {
  Slot& slot = plan.slots[number];
  Volume& volume = catalog_.volume(slot.volume);
  const bool tree = volume.kind() == VolumeKind::kTree;
  std::string& path = plan.paths.emplace_back();
  if (tree) {
    catalog_.segments()[slot.segment].directory->name(slot.sample, &path);
    if (!stays_below(path)) {
      slot.ok = false;
      return;
    }
  } else {
    path = volume.path();
  }
  Read& r =
      request(plan, plan.requests, slot.volume, tree ? 0 : slot.offset, slot.length, slot.dest);
  r.fd = tree ? volume.fd() : AT_FDCWD;
  r.path = path.c_str();
  r.check =
      tree ? FileCheck{slot.length, slot.mtime_ns} : FileCheck{volume.bytes(), volume.mtime_ns()};
  r.user = number;
  ++plan.batch->stats.opened_files;
}

void Planner::ask_runs(Plan& plan) const {
  BatchStats& stats = plan.batch->stats;
  for (uint32_t i = 0; i < plan.runs.size(); ++i) {
    Run& run = plan.runs[i];
    Volume& volume = catalog_.volume(run.volume);
    const bool direct = run.route == Route::kDirect;
    const bool remote = run.route == Route::kRemote;
    const int fd = remote ? -1 : direct ? volume.direct_fd() : volume.fd();
    const uint64_t most = remote ? options_.remote_request_bytes_max : options_.request_bytes_max;
    uint32_t requests = 0;
    for (uint64_t at = run.begin; at < run.end; ++requests) {
      const uint64_t length = std::min(most, run.end - at);
      Read& r = request(plan, remote ? plan.remote : plan.requests, run.volume, at, length,
                        run.dest + (at - run.begin));
      r.fd = fd;
      r.user = i;
      at += length;
    }
    run.requests_left.store(requests, std::memory_order_relaxed);
    (remote ? stats.remote_reads : direct ? stats.direct_reads : stats.buffered_reads) += requests;
  }
}

}  // namespace headrace::io
