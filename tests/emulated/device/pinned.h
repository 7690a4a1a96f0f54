// Memory of the host's that the device can reach: pinned. Work that is queued keeps it, as PyTorch's allocator
// of such memory does, which has an event behind each copy.

#pragma once

#include <c10/core/Allocator.h>

#include "races.h"

namespace emulated {

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &drop, c10::Device(c10::kCPU)};
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 512, (n + 511) / 512 * 512) == 0, "host memory is short");
    fill_with_rubbish(start, n, kFresh);
    {
      std::lock_guard<std::mutex> lock(mutex);
      sizes[reinterpret_cast<uintptr_t>(start)] = n;
    }
    return {start, start, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }

  bool has(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> lock(mutex);
    auto next = sizes.upper_bound(address);
    if (next == sizes.begin()) return false;
    auto [start, size] = *std::prev(next);
    return address < start + size;
  }

 private:
  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;

  static void drop(void* start);
};

inline PinnedMemory& pinned_memory() {
  static auto* one = new PinnedMemory();
  return *one;
}

inline void PinnedMemory::drop(void* start) {
  if (!start) return;
  auto& self = pinned_memory();
  {
    std::lock_guard<std::mutex> lock(self.mutex);
    auto place = self.sizes.find(reinterpret_cast<uintptr_t>(start));
    touched.forget(place->first, place->first + place->second);
    self.sizes.erase(place);
  }
  free(start);
}

}  // namespace emulated
