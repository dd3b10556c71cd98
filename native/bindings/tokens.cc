// Token bindings: pieces of documents, as they were read, become rows of equal length; and the
// assignments that orders over windows and mixtures are made of.
//
// One call per group of batches; the GIL is free meanwhile. Everything that Python hands over is
// checked against both buffers before a byte is touched.
#include "bindings/tokens.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/choice.h"
#include "bindings/gil.h"
#include "core/error.h"
#include "core/mixture.h"
#include "core/token_types.h"
#include "core/token_windows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

template <class T>
using Rows = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

TokenType type_of_name(const std::string& dtype) {
  return choice<TokenType>(dtype,
                           {{"uint8", TokenType::kUint8},
                            {"int8", TokenType::kInt8},
                            {"uint16", TokenType::kUint16},
                            {"int16", TokenType::kInt16},
                            {"uint32", TokenType::kUint32},
                            {"int32", TokenType::kInt32},
                            {"int64", TokenType::kInt64}},
                           "dtype");
}

template <class To>
bool place_tokens(const ArrayIn<uint8_t>& data, const std::string& dtype,
                  const ArrayIn<int64_t>& offsets, const ArrayIn<int64_t>& dests,
                  const ArrayIn<int64_t>& counts, const Rows<To>& rows) {
  const TokenType type = type_of_name(dtype);
  const unsigned width = bytes_of(type);
  const size_t pieces = offsets.size();
  if (dests.size() != pieces || counts.size() != pieces) {
    throw Error(ErrorKind::kInvalidArgument, "offsets, dests and counts are not equally many");
  }
  const uint64_t bytes = data.size();
  const uint64_t places = rows.size();
  for (size_t i = 0; i < pieces; ++i) {
    const auto offset = static_cast<uint64_t>(offsets.data()[i]);
    const auto dest = static_cast<uint64_t>(dests.data()[i]);
    const auto count = static_cast<uint64_t>(counts.data()[i]);
    if (offset <= bytes && count <= (bytes - offset) / width && dest <= places &&
        count <= places - dest) {
      continue;
    }
    throw Error(ErrorKind::kInvalidArgument,
                "piece " + std::to_string(i) + " leaves its buffers: " + std::to_string(count) +
                    " tokens from byte " + std::to_string(offset) + " of " + std::to_string(bytes) +
                    " to place " + std::to_string(dest) + " of " + std::to_string(places));
  }
  const WithoutGil released;
  bool same = true;
  for (size_t i = 0; i < pieces; ++i) {
    same &= convert_tokens(type, data.data() + offsets.data()[i], rows.data() + dests.data()[i],
                           static_cast<size_t>(counts.data()[i]));
  }
  return same;
}

}  // namespace

void register_tokens(nb::module_& m) {
  m.def(
      "best_fit",
      [](const ArrayIn<int64_t>& sizes, int64_t capacity) {
        return own([&] {
          const WithoutGil released;
          return best_fit(view(sizes), capacity);
        }());
      },
      "sizes"_a, "capacity"_a,
      "The bin of each piece, placed in this order: the fullest that it fits into, else a new "
      "one.");
  m.def(
      "shared_period",
      [](const ArrayIn<int64_t>& parts) {
        return own([&] {
          const WithoutGil released;
          return shared_period(view(parts));
        }());
      },
      "parts"_a,
      "The source at each position of one period of a mixture of so many parts of each source.");
  m.def(
      "cut_documents",
      [](const ArrayIn<int64_t>& starts, int64_t block, int64_t documents, int64_t length,
         const ArrayIn<int64_t>& windows) {
        return own([&] {
          const WithoutGil released;
          return CutWindows{view(starts), block, documents, length}.documents_of(view(windows));
        }());
      },
      "starts"_a, "block"_a, "documents"_a, "length"_a, "windows"_a,
      "The documents that may have a part in these windows, window by window.");
  m.def(
      "cut_windows",
      [](const ArrayIn<int64_t>& starts, int64_t block, int64_t documents, int64_t length,
         const ArrayIn<int64_t>& windows, const ArrayIn<int64_t>& sizes) {
        auto pieces = [&] {
          const WithoutGil released;
          const CutWindows cut{view(starts), block, documents, length};
          return cut.pieces_of(view(windows), view(sizes));
        }();
        return nb::make_tuple(own(std::move(pieces.row)), own(std::move(pieces.place)),
                              own(std::move(pieces.document)), own(std::move(pieces.start)),
                              own(std::move(pieces.count)));
      },
      "starts"_a, "block"_a, "documents"_a, "length"_a, "windows"_a, "sizes"_a,
      nb::sig("def cut_windows(starts: numpy.typing.NDArray[numpy.int64], block: int, documents: "
              "int, length: int, windows: numpy.typing.NDArray[numpy.int64], sizes: "
              "numpy.typing.NDArray[numpy.int64]) -> "
              "tuple[numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], "
              "numpy.typing.NDArray[numpy.int64], numpy.typing.NDArray[numpy.int64], "
              "numpy.typing.NDArray[numpy.int64]]"),
      "The pieces of these windows: row, place, document, start and count of each. `sizes` are "
      "those of `cut_documents`.");
  constexpr const char* kDoc =
      "Copies piece i, `counts[i]` tokens of `dtype` from byte `offsets[i]` of `data` on, to place "
      "`dests[i]` of `rows`. False: a token does not fit.";
  m.def("place_tokens", &place_tokens<int32_t>, "data"_a, "dtype"_a, "offsets"_a, "dests"_a,
        "counts"_a, "rows"_a, kDoc);
  m.def("place_tokens", &place_tokens<int64_t>, "data"_a, "dtype"_a, "offsets"_a, "dests"_a,
        "counts"_a, "rows"_a, kDoc);
}

}  // namespace headrace::bindings
