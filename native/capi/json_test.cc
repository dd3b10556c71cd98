// Documents are read as RFC 8259 says, and refused where they bend it.
#include "capi/json.h"

#include <doctest/doctest.h>

#include <string>

#include "core/error.h"

using headrace::Error;
using headrace::capi::file_name;
using headrace::capi::Json;

namespace {

std::string canonical(const std::string& text) { return Json::parse(text, "test").canonical(); }

TEST_CASE("a document is written as Python writes it") {
  CHECK(canonical(" {\"b\" : [1, -0, 2.50, true, null] , \"a\":{}}\n") ==
        "{\"a\":{},\"b\":[1,0,2.5,true,null]}");
  CHECK(canonical("\"\\u00fc\\/\\n\\u007f\\ud83d\\ude00\\udc80\"") ==
        "\"\\u00fc/\\n\\u007f\\ud83d\\ude00\\udc80\"");
  CHECK(canonical("\"\xc3\xbc\xf0\x9f\x98\x80\"") == "\"\\u00fc\\ud83d\\ude00\"");
  CHECK(canonical("[1e3, 1e16, 0.0001, 0.00001, 123456789012345678901234567890]") ==
        "[1000.0,1e+16,0.0001,1e-05,123456789012345678901234567890]");
  CHECK(Json::parse("{\"crc\":1,\"x\":{\"crc\":2}}", "t").canonical("crc") ==
        "{\"x\":{\"crc\":2}}");
}

TEST_CASE("what bends the rules is refused") {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1,]",
                           "[1 2]",
                           "{\"a\":1,}",
                           "{\"a\":1,\"a\":2}",
                           "{a:1}",
                           "01",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "NaN",
                           "Infinity",
                           "-",
                           "nul",
                           "truest",
                           "\"",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\u12g4\"",
                           "\"\n\"",
                           "\"\xff\"",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xf4\x90\x80\x80\"",
                           "1e999",
                           "1 1",
                           "[]]",
                           "\xef\xbb\xbf{}"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(Json::parse(text, "test"), Error);
  }
  CHECK_THROWS_AS(Json::parse(std::string("[1\0]", 4), "test"), Error);
  CHECK_THROWS_AS(Json::parse(std::string(65, '1'), "test"), Error);
}

TEST_CASE("depth is bounded") {
  CHECK_NOTHROW(Json::parse(std::string(32, '[') + std::string(32, ']'), "test"));
  CHECK_THROWS_AS(Json::parse(std::string(34, '[') + std::string(34, ']'), "test"), Error);
  CHECK_THROWS_AS(Json::parse(std::string(1 << 20, '['), "test"), Error);
}

TEST_CASE("integers fit or are none") {
  CHECK(Json::parse("9223372036854775807", "t").integer() == INT64_MAX);
  CHECK(!Json::parse("9223372036854775808", "t").integer());
  CHECK(!Json::parse("1.0", "t").integer());
  CHECK(!Json::parse("\"1\"", "t").integer());
}

TEST_CASE("names of files are bytes again") {
  CHECK(file_name(*Json::parse("\"a\\udc80b\"", "t").string()) == std::string("a\x80"
                                                                              "b"));
  CHECK(!file_name(*Json::parse("\"a\\u0000\"", "t").string()));
  CHECK(!file_name(*Json::parse("\"\\ud800\"", "t").string()));
}

}  // namespace
