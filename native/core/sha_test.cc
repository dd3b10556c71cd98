#include "core/sha.h"

#include <doctest/doctest.h>

#include <string>

namespace headrace {
namespace {

std::span<const std::byte> bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// FIPS 180-4's examples, and the lengths around a block's end.
TEST_CASE("SHA-256 and SHA-1 give the standard's examples") {
  CHECK(hex_of(sha256(bytes(""))) ==
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex_of(sha256(bytes("abc"))) ==
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  const std::string two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  CHECK(hex_of(sha256(bytes(two_blocks))) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex_of(sha1(bytes("abc"))) == "a9993e364706816aba3e25717850c26c9cd0d89d");
  CHECK(hex_of(sha1(bytes(two_blocks))) == "84983e441c3bd26ebaae4aa1f95129e5e54670f1");
  CHECK(hex_of(sha1(bytes(""))) == "da39a3ee5e6b4b0d3255bfef95601890afd80709");
}

}  // namespace
}  // namespace headrace
