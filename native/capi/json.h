// Json: a small strict reader of JSON documents that somebody else wrote.
//
// RFC 8259 without leniency: UTF-8, no byte order mark, no duplicate keys, no NaN, nothing behind
// the document. Depth, size and number of values are bounded before memory is taken for them.
// Strings keep lone surrogates (Python writes the bytes of file names that are not UTF-8 so) in
// their three-byte form: `file_name` turns them back into bytes.
//
// No library does this part: the ones that distributions have reject lone surrogates or replace
// them, keep the last of two equal keys, and hold numbers without their text; and a wheel is built
// where none is installed. What they would take over is a third of json.cc.
//
// `canonical` writes a document as Python's json.dumps(sort_keys=True, separators=(",", ":")) does:
// what the checksums of our documents are computed of.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace headrace::capi {

class Json {
 public:
  struct Number {
    std::string text;  // as it stood in the document
    bool integer = false;
  };
  using List = std::vector<Json>;
  // In the order of their keys.
  using Members = std::vector<std::pair<std::string, Json>>;

  static constexpr size_t kBytesMax = size_t{64} << 20;
  static constexpr size_t kValuesMax = 6'000'000;
  static constexpr unsigned kDepthMax = 32;

  // Throws Error(kCorruptStore), with `where` as the file and the byte at which reading stopped.
  static Json parse(std::string_view text, const std::string& where);

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  const std::string* string() const { return std::get_if<std::string>(&value_); }
  const List* list() const { return std::get_if<List>(&value_); }
  const Members* members() const { return std::get_if<Members>(&value_); }
  // An integer that fits.
  std::optional<int64_t> integer() const;
  // A member of an object; null where there is none, or where this is no object.
  const Json* find(std::string_view key) const;

  // Without the member `except` of the outermost object.
  std::string canonical(std::string_view except = {}) const;
  // A few words for messages.
  std::string shown() const;

 private:
  friend class JsonReader;
  std::variant<std::nullptr_t, bool, Number, std::string, List, Members> value_ = nullptr;
};

// A string of a document as the bytes of a file's name. Nothing if it holds a NUL, or a surrogate
// that stands for no byte.
std::optional<std::string> file_name(const std::string& text);

}  // namespace headrace::capi
