// How arrays cross the border: inputs are contiguous and checked, outputs borrow native memory and
// keep its owner alive, or own what they were given.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace headrace::bindings {

namespace nb = nanobind;

template <class T>
using ArrayIn = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using ArrayOut = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
std::span<const T> view(const ArrayIn<T>& array) {
  return {array.data(), array.size()};
}

// Read-only: the memory belongs to `owner`, which others may share.
template <class T>
ArrayOut<const T> borrow(const T* data, size_t size, nb::handle owner) {
  return ArrayOut<const T>(data, {size}, owner);
}

template <class T>
ArrayOut<T> own(std::vector<T> values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return ArrayOut<T>(kept->data(), {kept->size()}, owner);
}

}  // namespace headrace::bindings
