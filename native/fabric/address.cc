#include "fabric/address.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "core/error.h"

namespace headrace::fabric {
namespace {

constexpr std::string_view kScheme = "nvme+tcp://";
constexpr size_t kNqnBytesMax = 223;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// A decimal number without sign and leading zero, of the whole text.
template <class T>
std::optional<T> number(std::string_view text) {
  T out = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), out);
  const bool right = !text.empty() && is_digit(text[0]) && (text.size() == 1 || text[0] != '0') &&
                     read.ec == std::errc() && read.ptr == text.data() + text.size();
  return right ? std::optional(out) : std::nullopt;
}

std::optional<std::string> unquoted(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    uint8_t byte = static_cast<uint8_t>(text[i]);
    if (byte == '%') {
      if (text.size() - i < 3) return std::nullopt;
      const auto read = std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16);
      if (read.ec != std::errc() || read.ptr != text.data() + i + 3) return std::nullopt;
      i += 2;
    }
    if (byte == 0) return std::nullopt;
    out += static_cast<char>(byte);
  }
  return out;
}

// The text behind `mark`, which is cut off.
std::optional<std::string_view> cut(std::string_view* text, char mark) {
  const size_t at = text->find(mark);
  if (at == text->npos) return std::nullopt;
  const std::string_view behind = text->substr(at + 1);
  *text = text->substr(0, at);
  return behind;
}

std::optional<Window> window_of(std::string_view text) {
  const auto bytes = cut(&text, '+');
  const auto offset = number<uint64_t>(text);
  const auto length = bytes ? number<uint64_t>(*bytes) : std::nullopt;
  if (!offset || !length || *offset > INT64_MAX || *length > INT64_MAX) return std::nullopt;
  return Window{*offset, *length};
}

// host, host:port, [v6], [v6]:port.
bool take_authority(std::string_view text, FabricAddress* out) {
  const bool bracketed = text.starts_with('[');
  const size_t end = bracketed ? text.find(']') : text.find(':');
  if (bracketed && end == text.npos) return false;
  out->host = text.substr(bracketed ? 1 : 0, bracketed ? end - 1 : end);
  std::string_view rest = text.substr(std::min(text.size(), bracketed ? end + 1 : end));
  if (out->host.empty() || out->host.find('@') != std::string::npos) return false;
  if (rest.empty()) return true;
  const auto port = rest.starts_with(':') ? number<uint16_t>(rest.substr(1)) : std::nullopt;
  out->port = port.value_or(0);
  return out->port != 0;
}

bool take_parts(std::string_view text, FabricAddress* out) {
  if (!text.starts_with(kScheme)) return false;
  text.remove_prefix(kScheme.size());
  if (const auto fragment = cut(&text, '#')) {
    out->window = window_of(*fragment);
    if (!out->window) return false;
  }
  if (const auto query = cut(&text, '?')) {
    const auto nsid = query->starts_with("ns=") ? number<uint32_t>(query->substr(3)) : std::nullopt;
    out->nsid = nsid.value_or(0);
    if (out->nsid == 0) return false;
  }
  const auto path = cut(&text, '/');
  const auto nqn = path ? unquoted(*path) : std::nullopt;
  if (!nqn || !is_nqn(*nqn)) return false;
  out->subnqn = *nqn;
  return take_authority(text, out);
}

}  // namespace

bool is_nqn(const std::string& nqn) {
  // nqn.2026-11.x
  constexpr std::string_view kForm = "nqn.dddd-dd.x";
  if (nqn.size() < kForm.size() || nqn.size() > kNqnBytesMax) return false;
  for (size_t i = 0; i + 1 < kForm.size(); ++i) {
    const char lower = nqn[i] >= 'A' && nqn[i] <= 'Z' ? static_cast<char>(nqn[i] + 32) : nqn[i];
    if (kForm[i] == 'd' && i > 2 ? !is_digit(nqn[i]) : lower != kForm[i]) return false;
  }
  const auto letter = [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  };
  const size_t colon = nqn.find(':');
  const std::string_view domain =
      std::string_view(nqn).substr(12, colon == nqn.npos ? colon : colon - 12);
  return !domain.empty() && letter(domain[0]) &&
         std::all_of(domain.begin(), domain.end(),
                     [&](char c) { return letter(c) || c == '.' || c == '-'; }) &&
         colon != nqn.size() - 1 && nqn.find('\0') == nqn.npos;
}

FabricAddress FabricAddress::parse(const std::string& url) {
  FabricAddress out;
  if (take_parts(url, &out)) return out;
  throw Error(ErrorKind::kInvalidArgument,
              "'" + url + "' is no namespace, expected nvme+tcp://host:port/nqn?ns=1", url);
}

std::string FabricAddress::target() const {
  const bool v6 = host.find(':') != host.npos;
  return std::string(kScheme) + (v6 ? "[" + host + "]" : host) + ":" + std::to_string(port) + "/" +
         subnqn;
}

}  // namespace headrace::fabric
