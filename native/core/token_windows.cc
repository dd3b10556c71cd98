#include "core/token_windows.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>

#include "core/error.h"

namespace headrace {
namespace {

// Which rooms some bin has, with the smallest of at least a given one found in a few words. A word
// of a level says which words of the level below are not zero.
class Rooms {
 public:
  explicit Rooms(size_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  void set(size_t room) {
    for (auto& level : levels_) {
      level[room / 64] |= uint64_t{1} << (room % 64);
      room /= 64;
    }
  }

  void clear(size_t room) {
    for (auto& level : levels_) {
      level[room / 64] &= ~(uint64_t{1} << (room % 64));
      if (level[room / 64] != 0) {
        return;
      }
      room /= 64;
    }
  }

  // The smallest room of at least `least`, or `kNone`.
  static constexpr size_t kNone = SIZE_MAX;
  [[nodiscard]] size_t find(size_t least) const {
    for (size_t level = 0; level < levels_.size(); ++level) {
      const size_t word = least / 64;
      if (word >= levels_[level].size()) {
        return kNone;
      }
      const uint64_t found = levels_[level][word] >> (least % 64) << (least % 64);
      if (found != 0) {
        size_t room = word * 64 + static_cast<size_t>(std::countr_zero(found));
        while (level-- > 0) {
          room = room * 64 + static_cast<size_t>(std::countr_zero(levels_[level][room]));
        }
        return room;
      }
      least = word + 1;  // nothing more in this word: go on with the next one, a level up
    }
    return kNone;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

}  // namespace

std::vector<int64_t> best_fit(std::span<const int64_t> sizes, int64_t capacity) {
  for (const int64_t size : sizes) {
    if (size < 1 || size > capacity) {
      throw Error(ErrorKind::kInvalidArgument, "a piece has the size " + std::to_string(size) +
                                                   ", expected 1 to " + std::to_string(capacity));
    }
  }
  if (sizes.empty()) {
    return {};
  }
  // No bin has more room than is left of the largest capacity, so rooms are below it. Bins of one
  // room are a stack: its head, and below each bin the next one.
  constexpr int64_t kEnd = -1;
  std::vector<int64_t> head(static_cast<size_t>(capacity), kEnd);
  std::vector<int64_t> below;
  std::vector<int64_t> placed(sizes.size());
  Rooms rooms(static_cast<size_t>(capacity));
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto size = static_cast<size_t>(sizes[i]);
    size_t room = rooms.find(size);
    int64_t bin = 0;
    if (room == Rooms::kNone) {
      room = static_cast<size_t>(capacity);
      bin = static_cast<int64_t>(below.size());
      below.push_back(kEnd);
    } else {
      bin = head[room];
      head[room] = below[static_cast<size_t>(bin)];
      if (head[room] == kEnd) {
        rooms.clear(room);
      }
    }
    placed[i] = bin;
    if (room > size) {
      const size_t left = room - size;
      below[static_cast<size_t>(bin)] = head[left];
      head[left] = bin;
      rooms.set(left);
    }
  }
  return placed;
}

CutWindows::Range CutWindows::range_of(int64_t window) const {
  const int64_t tokens = starts.empty() || starts.front() != 0 ? 0 : starts.back();
  if (window < 0 || length < 1 || block < 1 || tokens < 1 || window > (tokens - 1) / length - 1) {
    throw Error(ErrorKind::kInvalidArgument, "window " + std::to_string(window) + " is not there");
  }
  Range range;
  range.begin = window * length;
  range.end = range.begin + length + 1;
  const auto block_of = std::upper_bound(starts.begin(), starts.end(), range.begin) - 1;
  const auto behind = std::lower_bound(block_of, starts.end(), range.end);
  range.block = static_cast<size_t>(block_of - starts.begin());
  range.first = static_cast<int64_t>(range.block) * block;
  range.last = std::min((behind - starts.begin()) * block, documents);
  return range;
}

std::vector<int64_t> CutWindows::documents_of(std::span<const int64_t> windows) const {
  std::vector<int64_t> numbers;
  for (const int64_t window : windows) {
    const Range range = range_of(window);
    for (int64_t document = range.first; document < range.last; ++document) {
      numbers.push_back(document);
    }
  }
  return numbers;
}

CutWindows::Pieces CutWindows::pieces_of(std::span<const int64_t> windows,
                                         std::span<const int64_t> sizes) const {
  Pieces pieces;
  size_t at = 0;
  for (size_t row = 0; row < windows.size(); ++row) {
    const Range range = range_of(windows[row]);
    int64_t begin = starts[range.block];  // of the document, among all tokens
    for (int64_t document = range.first; document < range.last; ++document, ++at) {
      if (at == sizes.size() || sizes[at] < 0 || sizes[at] > starts.back() - begin) {
        throw Error(ErrorKind::kInvalidArgument,
                    "document " + std::to_string(document) + " has not the size that it had");
      }
      const int64_t low = std::max(begin, range.begin);
      const int64_t count = std::min(begin + sizes[at], range.end) - low;
      if (count > 0) {
        pieces.row.push_back(static_cast<int64_t>(row));
        pieces.place.push_back(low - range.begin);
        pieces.document.push_back(document);
        pieces.start.push_back(low - begin);
        pieces.count.push_back(count);
      }
      begin += sizes[at];
    }
  }
  if (at != sizes.size()) {
    throw Error(ErrorKind::kInvalidArgument, "sizes are " + std::to_string(sizes.size()) +
                                                 ", the windows' documents " + std::to_string(at));
  }
  return pieces;
}

}  // namespace headrace
