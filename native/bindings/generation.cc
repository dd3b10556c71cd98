// Generation bindings: noise, layouts of files, and what writes them many at a time, the GIL free
// meanwhile.
#include "bindings/generation.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "core/noise.h"
#include "io/file_layout.h"
#include "io/file_writer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace::bindings {
namespace {

using io::FileLayout;
using io::FileWriter;

using Writable = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using PieceIn = std::tuple<int, uint64_t, nb::bytes>;
using RunIn = std::pair<uint64_t, std::vector<PieceIn>>;

std::string string_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void make_layout(FileLayout* self, const std::vector<RunIn>& given, int checksum,
                 std::vector<uint64_t> patches) {
  std::vector<FileLayout::Run> runs;
  for (const auto& [times, pieces] : given) {
    auto& run = runs.emplace_back(FileLayout::Run{times, {}});
    for (const auto& [kind, nbytes, text] : pieces) {
      run.pieces.push_back({static_cast<FileLayout::Kind>(kind), nbytes, string_of(text)});
    }
  }
  new (self)
      FileLayout(std::move(runs), static_cast<FileLayout::Checksum>(checksum), std::move(patches));
}

std::pair<size_t, int> write(FileWriter& self, const std::vector<const FileLayout*>& layouts,
                             const std::vector<uint64_t>& keys,
                             const std::vector<nb::bytes>& paths) {
  if (layouts.size() != paths.size() || keys.size() != paths.size()) {
    throw nb::value_error("layouts, keys and paths differ in number");
  }
  std::vector<std::string> names;
  for (const nb::bytes& path : paths) names.push_back(string_of(path));
  const WithoutGil released;
  for (size_t i = 0; i < names.size(); ++i) {
    if (const int code = self.write(*layouts[i], keys[i], names[i]); code != 0) return {i, code};
  }
  return {names.size(), 0};
}

}  // namespace

void register_generation(nb::module_& m) {
  nb::class_<Noise>(m, "Noise", "Incompressible bytes: a function of pool, key and position.")
      .def(
          "__init__",
          [](Noise* self, const ArrayIn<uint64_t>& words) {
            if (words.size() * 8 != Noise::kBlockBytes) {
              throw nb::value_error("a pool has 131,072 words");
            }
            new (self) Noise(view(words));
          },
          "words"_a, "uint64, shape (131072,): the pool.")
      .def(
          "fill",
          [](const Noise& self, uint64_t key, uint64_t position, Writable out) {
            const WithoutGil released;
            self.fill(key, position, std::as_writable_bytes(std::span(out.data(), out.size())));
          },
          "key"_a, "position"_a, "out"_a, "The bytes of a file from a position on.");
  nb::class_<FileLayout>(m, "FileLayout", "What a generated file consists of.")
      .def("__init__", &make_layout, "runs"_a, "checksum"_a, "patches"_a,
           "`runs` of (times, pieces), each piece (kind, bytes, text); see "
           "PieceRun of headrace.bench.content.")
      .def_prop_ro("nbytes", &FileLayout::nbytes, "Of the finished file.");
  nb::class_<FileWriter>(m, "FileWriter", "Writes generated files, whole or not at all.")
      .def(
          "__init__",
          [](FileWriter* self, std::shared_ptr<Noise> noise, bool direct) {
            new (self) FileWriter(std::move(noise), direct);
          },
          "noise"_a, "direct"_a, "`direct`: past the page cache, where that is possible.")
      .def("write", &write, "layouts"_a, "keys"_a, "paths"_a,
           "Writes files; returns how many were, and the errno of the one that was not, or 0.");
}

}  // namespace headrace::bindings
