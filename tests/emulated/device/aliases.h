// Other tensors over the same memory: the host's over the device's, for CPU kernels to run on; the device's over
// pinned memory (UVA); and such as keep nothing alive.

#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/stack.h>

#include "memory.h"
#include "pinned.h"

namespace emulated {

using at::Tensor;
using c10::IValue;

inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == c10::kCUDA; }

inline Tensor over(const Tensor& t, c10::DataPtr data, c10::DispatchKey key) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), t.storage().nbytes(),
                                                       std::move(data), nullptr, false);
  Tensor out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKeySet(key),
                                                        t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

/// The host's, which a kernel of the CPU's takes. What it holds of the memory is added to `keepers`.
inline Tensor host_alias(const Tensor& t, Keepers* keepers) {
  auto keeper = std::make_shared<Keeper>(t.storage());
  if (keepers) keepers->push_back(keeper);
  auto let_go = [](void* held) { delete static_cast<std::shared_ptr<Keeper>*>(held); };
  c10::DataPtr data(t.storage().mutable_data(), new std::shared_ptr<Keeper>(keeper), let_go, c10::Device(c10::kCPU));
  Tensor out = over(t, std::move(data), c10::DispatchKey::CPU);
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

/// The host's, which holds nothing: for work that has keepers of its own.
inline Tensor weak_host_alias(const Tensor& t) {
  Keepers keepers;
  auto out = host_alias(t, &keepers);
  keepers[0]->strong.reset();
  return out;
}

/// The device's view of pinned memory (UVA): read, and written, when the device gets there.
inline Tensor device_view(const Tensor& t) {
  TORCH_CHECK(t.is_cpu() && t.is_pinned(), "only pinned memory can be seen from the device");
  using Held = c10::intrusive_ptr<c10::StorageImpl>;
  auto* held = new Held(Held::reclaim_copy(t.storage().unsafeGetStorageImpl()));
  auto let_go = [](void* h) { delete static_cast<Held*>(h); };
  return over(t, {t.storage().mutable_data(), held, let_go, kDevice}, c10::DispatchKey::CUDA);
}

/// The same memory of the device's, which is not kept.
inline Tensor weak_view(const Tensor& t) {
  return over(t, {t.storage().mutable_data(), nullptr, &keep_nothing, kDevice}, c10::DispatchKey::CUDA);
}

inline Tensor empty_like_on_device(const Tensor& t) {
  if (!t.defined()) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(kDevice).requires_grad(false));
}

// ---------------------------------------------------------------- of an operator's arguments

template <typename F>
IValue map_tensors(const IValue& v, const F& f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (Tensor t : v.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const auto& t : v.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return out;
  }
  return v;
}

template <typename F>
void each_tensor(const IValue& v, const F& f) {
  map_tensors(v, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

/// The tensors of a result, undefined ones among them.
inline std::vector<Tensor> listed(const IValue& v) {
  if (v.isTensor()) return {v.toTensor()};
  if (v.isTensorList()) return v.toTensorVector();
  return {};
}

/// An argument that says "cuda" says another device.
inline IValue moved(const IValue& v, c10::DeviceType to) {
  return v.isDevice() && v.toDevice().type() == c10::kCUDA ? IValue(c10::Device(to)) : v;
}

inline Tensor with_number_flag(Tensor made, const Tensor& of) {  // decides what types are promoted to
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

/// For a CPU kernel. Scalars of the host's are passed by their value, as it is now.
inline IValue for_host(const IValue& v, Keepers* keepers) {
  return map_tensors(moved(v, c10::kCPU), [&](const Tensor& t) {
    return on_device(t) ? host_alias(t, keepers) : with_number_flag(t.clone(), t);
  });
}

/// For a Meta kernel, which works out shapes.
inline IValue for_shapes(const IValue& v, bool keeps_scalars) {
  return map_tensors(moved(v, c10::kMeta), [&](const Tensor& t) {
    if (keeps_scalars && !on_device(t) && t.dim() == 0) return t;
    const auto options = t.options().device(c10::kMeta).pinned_memory(false);
    return with_number_flag(at::empty_strided(t.sizes(), t.strides(), options), t);
  });
}

}  // namespace emulated
