// Windows of tokens: pieces of documents, each assigned to a window where it fits best, one after
// the other; or windows that are cut out of documents whenever they are asked for.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace headrace {

// The bin of each piece: one with the least room that it fits into, among equals the one that was
// changed last, else a new one. Bins are numbered as they are begun.
//
// `sizes` are placed in their order; each is 1 to `capacity`. Throws Error(kInvalidArgument)
// otherwise.
std::vector<int64_t> best_fit(std::span<const int64_t> sizes, int64_t capacity);

// Windows of `length + 1` tokens, one every `length` tokens, of documents that lie one behind the
// other. Sizes are kept of blocks of documents only: `starts` are the tokens before each block, and
// after the last. So a window is found in two steps: `documents` are those that may have a part in
// it, from its first block to its last; `pieces` are their parts, once their sizes are known.
//
// Throws Error(kInvalidArgument) for windows that are not there, and sizes that are not those of
// `documents`.
struct CutWindows {
  std::span<const int64_t> starts;
  int64_t block = 0;      // documents of a block; the last may have fewer
  int64_t documents = 0;  // all of them
  int64_t length = 0;

  struct Pieces {
    std::vector<int64_t> row, place, document, start, count;
  };

  std::vector<int64_t> documents_of(std::span<const int64_t> windows) const;
  Pieces pieces_of(std::span<const int64_t> windows, std::span<const int64_t> sizes) const;

 private:
  struct Range {
    int64_t begin, end;   // tokens
    size_t block;         // of the first
    int64_t first, last;  // documents
  };
  Range range_of(int64_t window) const;
};

}  // namespace headrace
