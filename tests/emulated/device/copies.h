// Copies, between the host and the device and on it. Which of them wait is in CUDA's documentation ("API
// synchronization behavior") and in PyTorch's Copy.cu, after which each line here is made.

#pragma once

#include "aliases.h"
#include "graphs.h"

namespace emulated {

/// Whether bytes can be copied as they lie.
inline bool in_one_piece(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

/// Whether PyTorch hands this memory of the host's to CUDA as it is. What is not in one piece is copied on the
/// device; another type or order of the host's is made on the host, in memory that is not pinned.
inline bool goes_through(const Tensor& of_host, const Tensor& of_device) {
  if (!of_host.is_pinned() || of_host.scalar_type() != of_device.scalar_type()) return false;
  return in_one_piece(of_host, of_device) || (of_host.is_contiguous() && of_host.sizes() == of_device.sizes());
}

inline void launch_copy(const std::string& name, const Tensor& to, const Tensor& from, Keepers keepers,
                        bool is_staged = false) {
  auto work = std::make_shared<Work>();
  work->name = name;
  work->keepers = std::move(keepers);
  if (settings.finds_races) {
    if (!is_staged) add_accesses(from, false, &work->accesses);
    add_accesses(to, true, &work->accesses);
  }
  work->run = [to, from] { to.copy_(from); };
  launch(std::move(work));
}

inline void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  Keepers keepers;
  auto there = host_alias(to, &keepers);
  if (non_blocking && goes_through(from, to)) {  // read when the device gets there
    auto here = host_alias(from, &keepers);
    launch_copy("copy from pinned memory", there, here, std::move(keepers));
    return count("asynchronous copy to the device");
  }
  if (is_capturing()) forbid_in_capture("a copy from memory of the host's that is not pinned, or that waits");
  launch_copy("copy from the host", there, from.clone(), std::move(keepers), true);  // read now
  if (non_blocking) return count("copy to the device from memory that is not pinned");
  wait_for_current_stream("blocking copy to the device");
}

inline void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  Keepers keepers;
  auto there = host_alias(from, &keepers);
  if (non_blocking && goes_through(to, from)) {
    auto here = host_alias(to, &keepers);
    // Nobody is to read it before it is there.
    if (settings.schedule != AT_ONCE && !is_capturing() && to.is_non_overlapping_and_dense())
      fill_with_rubbish(to.mutable_data_ptr(), to.nbytes(), kOnItsWay);
    launch_copy("copy to pinned memory", here, there, std::move(keepers));
    return count("asynchronous copy to the host");
  }
  wait_for_current_stream(non_blocking ? "copy to memory of the host's that is not pinned"
                                       : "blocking copy to the host");
  to.copy_(there);
}

inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from)) return to;
  BelowAutograd below;
  TORCH_CHECK(to.device().type() != at::kMeta && from.device().type() != at::kMeta, "no copies from or to meta");
  auto spread = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (to.numel() == 0) return to;
  if (!on_device(to)) {
    copy_to_host(to, spread, non_blocking);
  } else if (!on_device(from)) {
    copy_to_device(to, spread, non_blocking);
  } else {
    Keepers keepers;
    auto there = host_alias(to, &keepers), here = host_alias(spread, &keepers);
    launch_copy("copy on the device", there, here, std::move(keepers));
  }
  return to;
}

}  // namespace emulated
