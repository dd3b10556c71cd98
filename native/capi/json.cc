#include "capi/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "core/error.h"

namespace headrace::capi {
namespace {

constexpr size_t kNumberCharsMax = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_code_point(uint32_t c, std::string* out) {
  if (c < 0x80) {
    *out += static_cast<char>(c);
  } else if (c < 0x800) {
    *out += static_cast<char>(0xC0 | c >> 6);
    *out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    *out += static_cast<char>(0xE0 | c >> 12);
    *out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    *out += static_cast<char>(0xF0 | c >> 18);
    *out += static_cast<char>(0x80 | (c >> 12 & 0x3F));
    *out += static_cast<char>(0x80 | (c >> 6 & 0x3F));
    *out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

// The code point at `*at`, which moves behind it; nothing where the bytes are no UTF-8. Surrogates
// pass: whoever does not want them looks.
std::optional<uint32_t> next_code_point(std::string_view text, size_t* at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(*at);
  const size_t size = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (size == 0 || first > 0xF4 || text.size() - *at < size) return std::nullopt;
  uint32_t c = size == 1 ? first : first & (0x7Fu >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((byte(*at + i) & 0xC0) != 0x80) return std::nullopt;
    c = c << 6 | (byte(*at + i) & 0x3F);
  }
  static constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (c < kLeast[size] || c > 0x10FFFF) return std::nullopt;
  *at += size;
  return c;
}

bool is_surrogate(uint32_t c) { return c >= 0xD800 && c <= 0xDFFF; }

void append_escaped(uint32_t unit, std::string* out) {
  *out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) *out += "0123456789abcdef"[unit >> shift & 15];
}

void append_quoted(const std::string& text, std::string* out) {
  *out += '"';
  for (size_t at = 0; at < text.size();) {
    const uint32_t c = *next_code_point(text, &at);  // we made it ourselves
    constexpr std::string_view kShort = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
    const size_t known = c < 0x80 ? kShort.find(static_cast<char>(c)) : kShort.npos;
    if (known != kShort.npos) {
      *out += '\\';
      *out += kLetters[known];
    } else if (c >= 0x20 && c < 0x7F) {
      *out += static_cast<char>(c);
    } else if (c < 0x10000) {
      append_escaped(c, out);
    } else {
      append_escaped(0xD800 + ((c - 0x10000) >> 10), out);
      append_escaped(0xDC00 + ((c - 0x10000) & 0x3FF), out);
    }
  }
  *out += '"';
}

// Python's repr of a float: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
std::string repr(double value) {
  char buffer[40];
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  const std::string_view shortest(buffer, static_cast<size_t>(end.ptr - buffer));
  const size_t e = shortest.find('e');
  const int exponent = std::atoi(std::string(shortest.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) return std::string(shortest);
  const auto fixed = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed);
  std::string out(buffer, static_cast<size_t>(fixed.ptr - buffer));
  if (out.find('.') == out.npos) out += ".0";
  return out;
}

void append_number(const Json::Number& number, std::string* out) {
  if (!number.integer) {
    *out += repr(std::strtod(number.text.c_str(), nullptr));
  } else {
    *out += number.text == "-0" ? "0" : number.text;
  }
}

}  // namespace

class JsonReader {
 public:
  JsonReader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  Json document() {
    if (text_.size() > Json::kBytesMax) fail("more than 64 MiB");
    Json out = value(0);
    skip_spaces();
    if (at_ != text_.size()) fail("something behind the document");
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorKind::kCorruptStore,
                where_ + ": unreadable (" + what + " at byte " + std::to_string(at_) +
                    "), expected a JSON document. Restore the file from a copy.",
                where_, static_cast<int64_t>(at_));
  }
  bool more() const { return at_ < text_.size(); }
  char peek() const { return more() ? text_[at_] : '\0'; }
  void skip_spaces() {
    while (more() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
      ++at_;
    }
  }
  bool take(char c) {
    if (peek() != c || !more()) return false;
    ++at_;
    return true;
  }
  void word(std::string_view expected) {
    if (text_.substr(at_, expected.size()) != expected) fail("an unknown word");
    at_ += expected.size();
  }

  Json value(unsigned depth) {
    if (depth > Json::kDepthMax) fail("more than 32 levels");
    if (++values_ > Json::kValuesMax) fail("more than 6,000,000 values");
    skip_spaces();
    Json out;
    switch (peek()) {
      case '{':
        out.value_ = members(depth);
        break;
      case '[':
        out.value_ = list(depth);
        break;
      case '"':
        out.value_ = string();
        break;
      case 't':
        word("true");
        out.value_ = true;
        break;
      case 'f':
        word("false");
        out.value_ = false;
        break;
      case 'n':
        word("null");
        break;
      default:
        out.value_ = number();
    }
    return out;
  }

  Json::List list(unsigned depth) {
    Json::List out;
    ++at_;
    skip_spaces();
    if (take(']')) return out;
    while (true) {
      out.push_back(value(depth + 1));
      skip_spaces();
      if (take(']')) return out;
      if (!take(',')) fail("no comma between values");
    }
  }

  Json::Members members(unsigned depth) {
    Json::Members out;
    ++at_;
    skip_spaces();
    if (take('}')) return out;
    while (true) {
      skip_spaces();
      if (peek() != '"') fail("a key that is no string");
      std::string key = string();
      skip_spaces();
      if (!take(':')) fail("no colon behind a key");
      out.emplace_back(std::move(key), value(depth + 1));
      skip_spaces();
      if (take('}')) break;
      if (!take(',')) fail("no comma between members");
    }
    std::sort(out.begin(), out.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 1; i < out.size(); ++i) {
      if (out[i].first == out[i - 1].first) fail("a key that stands twice");
    }
    return out;
  }

  std::string string() {
    std::string out;
    ++at_;
    while (true) {
      if (!more()) fail("a string without an end");
      const char c = text_[at_];
      if (static_cast<uint8_t>(c) < 0x20) fail("a control character in a string");
      if (c == '"') {
        ++at_;
        return out;
      }
      if (c == '\\') {
        escape(&out);
        continue;
      }
      const size_t before = at_;
      const auto code_point = next_code_point(text_, &at_);
      if (!code_point || is_surrogate(*code_point)) fail("bytes that are not UTF-8");
      out.append(text_.substr(before, at_ - before));
    }
  }

  void escape(std::string* out) {
    ++at_;
    constexpr std::string_view kLetters = "\"\\/nrtfb", kMeant = "\"\\/\n\r\t\f\b";
    const char letter = peek();
    const size_t known = kLetters.find(letter);
    if (more() && known != kLetters.npos) {
      *out += kMeant[known];
      ++at_;
      return;
    }
    if (!take('u')) fail("an unknown escape");
    uint32_t c = hex4();
    if (c >= 0xD800 && c <= 0xDBFF && text_.substr(at_, 2) == "\\u") {
      const size_t before = at_;
      at_ += 2;
      const uint32_t low = hex4();
      if (low >= 0xDC00 && low <= 0xDFFF) {
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
      } else {
        at_ = before;
      }
    }
    append_code_point(c, out);
  }

  uint32_t hex4() {
    if (text_.size() - at_ < 4) fail("an escape without an end");
    uint32_t out = 0;
    const char* begin = text_.data() + at_;
    const auto read = std::from_chars(begin, begin + 4, out, 16);
    if (read.ec != std::errc() || read.ptr != begin + 4) fail("an escape without four digits");
    at_ += 4;
    return out;
  }

  size_t digits() {
    const size_t before = at_;
    while (is_digit(peek())) ++at_;
    return at_ - before;
  }

  Json::Number number() {
    const size_t begin = at_;
    bool integer = true;
    take('-');
    const bool zero = peek() == '0';
    const size_t count = digits();
    if (count == 0) fail("no value");
    if (zero && count > 1) fail("a number with a leading zero");
    if (take('.')) {
      integer = false;
      if (digits() == 0) fail("a number without decimals");
    }
    if (take('e') || take('E')) {
      integer = false;
      if (!take('+')) take('-');
      if (digits() == 0) fail("a number without an exponent");
    }
    Json::Number out{std::string(text_.substr(begin, at_ - begin)), integer};
    if (out.text.size() > kNumberCharsMax) fail("a number of more than 64 characters");
    if (!integer && !std::isfinite(std::strtod(out.text.c_str(), nullptr))) {
      fail("a number that is too large");
    }
    return out;
  }

  const std::string_view text_;
  const std::string& where_;
  size_t at_ = 0;
  size_t values_ = 0;
};

Json Json::parse(std::string_view text, const std::string& where) {
  return JsonReader(text, where).document();
}

std::optional<int64_t> Json::integer() const {
  const auto* number = std::get_if<Number>(&value_);
  if (number == nullptr || !number->integer) return std::nullopt;
  int64_t out = 0;
  const char* end = number->text.data() + number->text.size();
  const auto read = std::from_chars(number->text.data(), end, out);
  if (read.ec != std::errc() || read.ptr != end) return std::nullopt;
  return out;
}

const Json* Json::find(std::string_view key) const {
  const Members* all = members();
  if (all == nullptr) return nullptr;
  const auto it =
      std::lower_bound(all->begin(), all->end(), key,
                       [](const auto& member, std::string_view k) { return member.first < k; });
  return it != all->end() && it->first == key ? &it->second : nullptr;
}

namespace {

void append(const Json& json, std::string_view except, std::string* out);

void append_members(const Json::Members& members, std::string_view except, std::string* out) {
  *out += '{';
  bool first = true;
  for (const auto& [key, value] : members) {
    if (!except.empty() && key == except) continue;
    if (!std::exchange(first, false)) *out += ',';
    append_quoted(key, out);
    *out += ':';
    append(value, {}, out);
  }
  *out += '}';
}

void append(const Json& json, std::string_view except, std::string* out) {
  if (const auto* members = json.members()) {
    append_members(*members, except, out);
  } else if (const auto* list = json.list()) {
    *out += '[';
    for (size_t i = 0; i < list->size(); ++i) {
      if (i > 0) *out += ',';
      append((*list)[i], {}, out);
    }
    *out += ']';
  } else if (const auto* string = json.string()) {
    append_quoted(*string, out);
  } else {
    *out += json.shown();
  }
}

}  // namespace

std::string Json::canonical(std::string_view except) const {
  std::string out;
  append(*this, except, &out);
  return out;
}

std::string Json::shown() const {
  std::string out;
  if (is_null()) return "null";
  if (const auto* boolean = std::get_if<bool>(&value_)) return *boolean ? "true" : "false";
  if (const auto* number = std::get_if<Number>(&value_)) {
    append_number(*number, &out);
  } else if (const auto* text = string()) {
    append_quoted(text->size() > 200 ? std::string("a long string") : *text, &out);
  } else {
    out = list() != nullptr ? "a list of " + std::to_string(list()->size()) : "an object";
  }
  return out;
}

std::optional<std::string> file_name(const std::string& text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t before = at;
    const auto c = next_code_point(text, &at);
    if (!c || *c == 0) return std::nullopt;
    if (!is_surrogate(*c)) {
      out.append(text, before, at - before);
    } else if (*c >= 0xDC80 && *c <= 0xDCFF) {
      out += static_cast<char>(*c - 0xDC00);
    } else {
      return std::nullopt;
    }
  }
  return out;
}

}  // namespace headrace::capi
