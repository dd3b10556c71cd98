// WebP by libwebp: rows below the region are not decoded, pixels outside are not converted.
#if HEADRACE_HAVE_WEBP

#include <webp/decode.h>

#include <algorithm>

#include "pixels/picture.h"

namespace headrace::pixels {
namespace {

// Fancy upsampling looks at neighbours: two more, and even edges, which is where libwebp cuts.
constexpr int kMargin = 2;

class WebpDecoder final : public Decoder {
 public:
  Reason open(std::span<const uint8_t> bytes, bool /* orientation */, Header* header) override {
    bytes_ = bytes;
    WebPBitstreamFeatures features;
    const VP8StatusCode status = WebPGetFeatures(bytes.data(), bytes.size(), &features);
    if (status != VP8_STATUS_OK) return reason(status);
    if (features.has_animation) return "it is an animation";
    header->width = width_ = features.width;
    header->height = height_ = features.height;
    header->alpha = features.has_alpha ? Alpha::kPixels : Alpha::kNone;
    return {};
  }

  Reason decode(const Region& region, int /* shift */, Picture* picture) override {
    const int left = std::max(0, region.left - kMargin) & ~1;
    const int top = std::max(0, region.top - kMargin) & ~1;
    const int right = std::min(width_, region.right + kMargin);
    const int bottom = std::min(height_, region.bottom + kMargin);
    picture->allocate({left, top, right, bottom});
    WebPDecoderConfig config;
    if (!WebPInitDecoderConfig(&config)) return "libwebp is of another version";
    config.options.use_cropping = 1;
    config.options.crop_left = left;
    config.options.crop_top = top;
    config.options.crop_width = picture->width;
    config.options.crop_height = picture->height;
    config.output.colorspace = MODE_RGBA;
    config.output.is_external_memory = 1;
    config.output.u.RGBA.rgba = picture->data;
    config.output.u.RGBA.stride = static_cast<int>(picture->stride);
    config.output.u.RGBA.size = picture->stride * static_cast<size_t>(picture->height);
    const VP8StatusCode status = WebPDecode(bytes_.data(), bytes_.size(), &config);
    WebPFreeDecBuffer(&config.output);
    return status == VP8_STATUS_OK ? Reason() : reason(status);
  }

 private:
  static Reason reason(VP8StatusCode status) {
    switch (status) {
      case VP8_STATUS_NOT_ENOUGH_DATA:
        return "the file is cut off";
      case VP8_STATUS_OUT_OF_MEMORY:
        return "libwebp has no memory for it";
      case VP8_STATUS_UNSUPPORTED_FEATURE:
        return "libwebp does not support what it uses";
      default:
        return "the bytes are damaged";
    }
  }

  std::span<const uint8_t> bytes_;
  int width_ = 0, height_ = 0;
};

}  // namespace

std::unique_ptr<Decoder> make_webp_decoder() { return std::make_unique<WebpDecoder>(); }

}  // namespace headrace::pixels

#endif
