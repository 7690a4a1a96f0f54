// Streams: work is put on a queue, and queues are worked off where the host waits, no earlier
// (`schedules.h` makes exceptions).

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "races.h"

namespace emulated {

inline std::recursive_mutex execution;  // who executes; never waited for with Python's lock held

/// Kernels run below autograd, and no mode of Python's sees them.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::PythonDispatcher})};
};

inline double seconds_of(const Work& work) {
  const double launch = work.is_replayed ? settings.seconds_per_replayed : settings.seconds_per_launch;
  return launch + settings.seconds_per_byte * double(work.bytes);
}

/// Run a stream up to a position. Call with `execution` held.
inline void run_until_locked(int64_t stream, uint64_t position) {
  for (;;) {
    WorkPtr work;
    {
      std::lock_guard<std::mutex> lock(state);
      auto& queue = queues[stream];
      if (queue.done >= position || queue.works.empty()) return;
      work = queue.works.front();
    }
    std::exception_ptr error;
    try {
      if (work->wait_stream >= 0) {
        run_until_locked(work->wait_stream, work->wait_position);
      } else {
        BelowAutograd below;
        c10::InferenceMode inference;
        running = work.get();
        if (work->stamp) touch(*work, work->accesses);
        work->run();
        running = nullptr;
      }
    } catch (const std::exception& e) {
      running = nullptr;
      error = std::make_exception_ptr(std::runtime_error(
          "CUDA error, asynchronously reported, of " + work->name + ": " + e.what()));
    }
    {
      std::lock_guard<std::mutex> lock(state);
      auto& queue = queues[stream];
      queue.works.pop_front();
      queue.done++;
      if (work->wait_stream < 0) device_seconds += seconds_of(*work);
    }
    if (error) std::rethrow_exception(error);
  }
}

inline void run_until(int64_t stream, uint64_t position) {
  NoGil no_gil;
  std::lock_guard<std::recursive_mutex> lock(execution);
  run_until_locked(stream, position);
}

inline void run_stream(int64_t stream) {
  uint64_t position;
  {
    std::lock_guard<std::mutex> lock(state);
    position = queues[stream].pushed;
  }
  run_until(stream, position);
}

inline void run_all() {
  std::vector<int64_t> ids;
  {
    std::lock_guard<std::mutex> lock(state);
    for (auto& [id, queue] : queues) ids.push_back(id);
  }
  for (auto id : ids) run_stream(id);
}

/// Put work on a queue. Call with `state` held.
inline void push_locked(int64_t stream, WorkPtr work) {
  auto& queue = queues[stream];
  queue.pushed++;
  if (settings.finds_races) {
    work->clock = launch_clock(stream, queue.pushed);
    work->stamp = std::make_shared<const Stamp>(Stamp{stream, queue.pushed, work->name});
  }
  queue.works.push_back(std::move(work));
}

/// The graph that the current stream is captured into, if any. Call with `state` held.
inline GraphPtr capture_locked() {
  return num_captures == 0 ? nullptr : queues[current_stream].capture;
}

inline bool is_capturing() {
  std::lock_guard<std::mutex> lock(state);
  return bool(capture_locked());
}

/// Calls that a capture does not survive, on any stream: captures are "global", as PyTorch's are unless asked.
inline void forbid_in_capture(const std::string& what) {
  {
    std::lock_guard<std::mutex> lock(state);
    if (num_captures == 0) return;
    for (auto& [id, queue] : queues)
      if (queue.capture) queue.capture->broken = what;
  }
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

inline void warn_of_wait() {
  TORCH_CHECK(settings.sync_mode != 2, "called a synchronizing CUDA operation");
  if (settings.sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

/// The host waits for the current stream, because of an operator: nobody has asked for that.
inline void wait_for_current_stream(const std::string& because) {
  forbid_in_capture(because);
  warn_of_wait();
  {
    std::lock_guard<std::mutex> lock(state);
    waits[because]++;
  }
  call_hook("wait", because);
  run_stream(current_stream);
  std::lock_guard<std::mutex> lock(state);
  host_waits_for_stream(current_stream);
}

/// The host waits because it was told to. PyTorch's debug mode warns of streams alone.
inline void wait_as_asked(const std::string& what) {
  forbid_in_capture(what);
  count(what);
  call_hook("asked", what);
}

/// Have a stream wait for a place of another one, which has this clock. Call with `state` held.
inline void push_wait_locked(int64_t stream, int64_t other, uint64_t position, const Clock& clock) {
  auto work = std::make_shared<Work>();
  work->name = "wait";
  work->wait_stream = other;
  work->wait_position = position;
  stream_clocks[stream].join(clock);
  push_locked(stream, std::move(work));
}

}  // namespace emulated
