// What PyTorch asks of a device of its kind "cuda": through its guard (streams and events), and through the
// hooks of its CUDA library, which a CPU build does not have.

#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "events.h"
#include "pinned.h"

namespace emulated {

using c10::Device;
using c10::DeviceIndex;

inline void synchronize_device() {
  wait_as_asked("device.synchronize");
  run_all();
  std::lock_guard<std::mutex> lock(state);
  host_waits_for_all();
}

inline int64_t new_stream() {
  std::lock_guard<std::mutex> lock(state);
  queues[next_stream];
  return next_stream++;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream named(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
  c10::Stream getStream(Device) const override { return named(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return named(0); }
  c10::Stream getNewStream(Device, int) const override { return named(new_stream()); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override { return named(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return named(std::exchange(current_stream, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override {
    forbid_in_capture("stream.query");
    std::lock_guard<std::mutex> lock(state);
    if (!queues[stream.id()].works.empty()) return false;
    host_waits_for_stream(stream.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    warn_of_wait();
    wait_as_asked("stream.synchronize");
    run_stream(stream.id());
    std::lock_guard<std::mutex> lock(state);
    host_waits_for_stream(stream.id());
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> lock(state);
    return bool(queues[stream.id()].capture);
  }
  void synchronizeDevice(DeviceIndex) const override { synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().record_stream(data, stream);
  }

  static Event& of(void* event) { return *static_cast<Event*>(event); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    emulated::record(of(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) emulated::block(of(event), stream.id());
  }
  bool queryEvent(void* event) const override { return !event || query(of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize(of(event));
  }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    TORCH_CHECK(from && to, "CUDA error: invalid resource handle (an event was not recorded)");
    return elapsed(of(from), of(to));
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* pointer) const override { return pinned_memory().has(pointer); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override { synchronize_device(); }
};

inline void install() {
  static bool is_installed = false;
  if (std::exchange(is_installed, true)) return;
  c10::SetAllocator(c10::kCUDA, &device_memory(), 255);
  c10::impl::DeviceGuardImplRegistrar(c10::kCUDA, new Guard());
  // PyTorch keeps the hooks that a CPU build made when it was imported, and asks for no others: so that
  // object gets the functions of ours.
  static auto* ours = new Hooks();
  auto* there = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  memcpy(reinterpret_cast<void*>(there), reinterpret_cast<void*>(ours), sizeof(void*));
}

}  // namespace emulated
