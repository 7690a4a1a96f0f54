// Operators with rules of their own: those that make tensors, or see them in another way; copies; and numbers that
// the host asks for.

#pragma once

#include <torch/library.h>

#include "copies.h"
#include "fallback.h"

namespace emulated {

inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<c10::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

inline at::Scalar local_scalar(const Tensor& t) {
  BelowAutograd below;
  wait_for_current_stream("item");
  return host_alias(t, nullptr).item();
}

inline const Tensor& resize_(const Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (t.storage().nbytes() > 0) run_all();  // it moves, and works that are queued have its address
  return at::native::resize_(t, size, format);
}

inline Tensor& set_(Tensor& t) {
  c10::Storage fresh(c10::Storage::use_byte_size_t(), 0, &device_memory(), true);
  return at::native::set_storage_cpu_(t, fresh, 0, {0}, {});
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", &resize_);
  m.impl("set_", &set_);
  m.impl("set_.source_Storage", [](Tensor& t, c10::Storage s) -> Tensor& { return at::native::set_(t, s); });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& t, c10::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) -> Tensor& {
           return at::native::set_storage_cpu_(t, s, offset, size, stride);
         });
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& s) -> Tensor& { return at::native::set_tensor_(t, s); });
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream",
         [](Tensor& t, c10::Stream s) { device_memory().record_stream(t.storage().data_ptr(), s); });
}

}  // namespace emulated
