// Writes tokens' keys or values to their pages, where these lie.

#include <cstring>

#include "cpu.h"

namespace dflash {
namespace {

ffi::Error Write(ffi::AnyBuffer pool, ffi::AnyBuffer values, ffi::Buffer<ffi::S32> page, ffi::Buffer<ffi::S32> offset,
                 ffi::Result<ffi::AnyBuffer> out) {
  const Sizes of_pool = SizesOf(pool), of_page = SizesOf(page);
  if (of_pool.size() < 3 || of_page.size() != 2)
    return ffi::Error::InvalidArgument("a pool has 3 dimensions or more, and pages have 2");
  Sizes of_values = of_pool;
  of_values[1] = of_page[0], of_values[2] = of_page[1];
  if (SizesOf(values) != of_values || SizesOf(offset) != of_page || SizesOf(*out) != of_pool ||
      pool.element_type() != values.element_type() || pool.element_type() != out->element_type())
    return ffi::Error::InvalidArgument("pool, values, pages and offsets do not fit each other");
  const int64_t layers = of_pool[0], pages = of_pool[1], page_size = of_pool[2], tokens = of_page[0] * of_page[1];
  const int64_t places = layers * pages * page_size;
  if (!places || !tokens) return ffi::Error::Success();
  const int64_t bytes = pool.size_bytes() / places;  // of a token in a layer
  auto* written = static_cast<char*>(out->untyped_data());
  const auto* from = static_cast<const char*>(values.untyped_data());
  // XLA gives both one memory, and copies before if the old pool is still needed.
  if (written != pool.untyped_data()) std::memcpy(written, pool.untyped_data(), pool.size_bytes());
  for (int64_t layer = 0; layer < layers; ++layer)
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t to_page = page.typed_data()[token], to = offset.typed_data()[token];
      if (to_page < 0 || to_page >= pages || to < 0 || to >= page_size) continue;
      std::memcpy(written + ((layer * pages + to_page) * page_size + to) * bytes,
                  from + (layer * tokens + token) * bytes, bytes);
    }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace dflash

XLA_FFI_DEFINE_HANDLER_SYMBOL(DflashWrite, dflash::Write,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::AnyBuffer>());
