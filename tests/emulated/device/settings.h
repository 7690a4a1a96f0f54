// What a test can choose, and what it can look at afterwards.

#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>

#include <c10/core/Device.h>
#include <torch/csrc/utils/pybind.h>

namespace emulated {

namespace py = pybind11;

inline const c10::Device kDevice(c10::kCUDA, 0);

/// When work is done that nobody has waited for yet. A GPU may do any of these.
enum Schedule { AT_ONCE, LATEST, SOME_AHEAD, RANDOM };

struct Settings {
  Schedule schedule = LATEST;
  std::set<int64_t> ahead;  // SOME_AHEAD: streams that work at once; all others as late as may be
  std::mt19937 random{0};
  bool finds_races = false; // by clocks (`races.h`); set before what is captured
  // What work takes by the device's own clock, which no host's time enters.
  double seconds_per_launch = 5e-6, seconds_per_replayed = 1e-6, seconds_per_byte = 1e-12;
  int sync_mode = 0;        // torch.cuda.set_sync_debug_mode
  PyObject* hook = nullptr; // called with (kind, name) where the host waits
  PyObject* place = nullptr; // says where Python's code is, for races to be told by
};
inline Settings settings;

constexpr size_t kTotal = size_t(4) << 30;  // bytes of the device's memory

/// What nobody has written yet, or has freed, holds rubbish, in pairs of bytes: NaN in every floating type; as an index out of bounds, and not -1, which is padding.
constexpr uint16_t kFresh = 0xFFFE, kFreed = 0xFFFD, kOnItsWay = 0xFFFA;
constexpr size_t kMostPoisoned = size_t(64) << 20;  // more takes longer than it is worth

inline void fill_with_rubbish(void* start, size_t bytes, uint16_t rubbish) {
  auto* pairs = static_cast<uint16_t*>(start);
  std::fill(pairs, pairs + bytes / 2, rubbish);
  if (bytes % 2) static_cast<uint8_t*>(start)[bytes - 1] = uint8_t(rubbish >> 8);
}

inline std::mutex state;  // of queues, memory and counters; never held while anything is executed
inline std::map<std::string, int64_t> waits, counts;
inline double device_seconds = 0;  // that the device has worked, all streams one behind the other; by `state`

/// Lets go of Python's lock, if this thread has it.
struct NoGil {
  PyThreadState* saved = nullptr;
  NoGil() {
    if (Py_IsInitialized() && PyGILState_Check()) saved = PyEval_SaveThread();
  }
  ~NoGil() {
    if (saved) PyEval_RestoreThread(saved);
  }
};

inline void count(const std::string& what) {
  std::lock_guard<std::mutex> lock(state);
  counts[what]++;
}

inline void call_hook(const char* kind, const std::string& name) {
  if (!settings.hook) return;
  py::gil_scoped_acquire gil;
  py::reinterpret_borrow<py::object>(settings.hook)(kind, name);
}

/// " @ file:line", if somebody asked for it. Not to be called with a lock held.
inline std::string place() {
  if (!settings.finds_races || !settings.place) return "";
  py::gil_scoped_acquire gil;
  return " @ " + py::reinterpret_borrow<py::object>(settings.place)().cast<std::string>();
}

}  // namespace emulated
