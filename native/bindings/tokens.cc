// Token bindings: pieces of documents, as they were read, become rows of equal length; and the
// assignments that orders over windows and mixtures are made of.
//
// One call per group of batches; the GIL is free meanwhile. Everything that Python hands over is
// checked against both buffers before a byte is touched.
#include "bindings/tokens.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/choice.h"
#include "bindings/gil.h"
#include "core/assignment.h"
#include "core/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

template <class T>
using Rows = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One copy that also widens, or narrows. The source may lie at any address. Returns whether every
// token is what it was.
template <class From, class To>
bool convert(const uint8_t* from, To* to, size_t count) {
  bool changed = false;
  for (size_t i = 0; i < count; ++i) {
    From token;
    std::memcpy(&token, from + i * sizeof(From), sizeof(From));
    to[i] = static_cast<To>(token);
    if constexpr (!std::in_range<To>(std::numeric_limits<From>::max())) {
      changed |= !std::in_range<To>(token);
    }
  }
  return !changed;
}

template <class To>
using Convert = bool (*)(const uint8_t*, To*, size_t);

struct Width {
  unsigned bytes;
  Convert<int32_t> to_int32;
  Convert<int64_t> to_int64;
};

template <class From>
constexpr Width width_of() {
  return {sizeof(From), &convert<From, int32_t>, &convert<From, int64_t>};
}

Width width_of_name(const std::string& dtype) {
  return choice<Width>(dtype,
                       {{"uint8", width_of<uint8_t>()},
                        {"int8", width_of<int8_t>()},
                        {"uint16", width_of<uint16_t>()},
                        {"int16", width_of<int16_t>()},
                        {"uint32", width_of<uint32_t>()},
                        {"int32", width_of<int32_t>()},
                        {"int64", width_of<int64_t>()}},
                       "dtype");
}

template <class To>
bool place_tokens(const ArrayIn<uint8_t>& data, const std::string& dtype,
                  const ArrayIn<int64_t>& offsets, const ArrayIn<int64_t>& dests,
                  const ArrayIn<int64_t>& counts, const Rows<To>& rows) {
  const Width width = width_of_name(dtype);
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
    if (offset <= bytes && count <= (bytes - offset) / width.bytes && dest <= places &&
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
    const uint8_t* from = data.data() + offsets.data()[i];
    To* to = rows.data() + dests.data()[i];
    const auto count = static_cast<size_t>(counts.data()[i]);
    if constexpr (sizeof(To) == 4) {
      same &= width.to_int32(from, to, count);
    } else {
      same &= width.to_int64(from, to, count);
    }
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
  constexpr const char* kDoc =
      "Copies piece i, `counts[i]` tokens of `dtype` from byte `offsets[i]` of `data` on, to place "
      "`dests[i]` of `rows`. False: a token does not fit.";
  m.def("place_tokens", &place_tokens<int32_t>, "data"_a, "dtype"_a, "offsets"_a, "dests"_a,
        "counts"_a, "rows"_a, kDoc);
  m.def("place_tokens", &place_tokens<int64_t>, "data"_a, "dtype"_a, "offsets"_a, "dests"_a,
        "counts"_a, "rows"_a, kDoc);
}

}  // namespace headrace::bindings
