// A CUDA device that is not there, for a CPU-only build of PyTorch: the part that Python sees.
//
// Device memory is the host's, held by tensors of "cuda:0". The dispatch key CUDA, which a CPU build leaves
// empty, gets a fallback that puts the operator's CPU kernel on the current stream's queue.
//
//     settings.h     what tests choose and count       work.h         what is on a queue or in a graph
//     queues.h       streams                           schedules.h    when work is done
//     memory.h       the caching allocator             pinned.h       memory of the host's
//     graphs.h       launches, captures, replays       events.h       what can be waited for
//     clocks.h       what comes behind what            races.h        who touches what, and should have waited
//     accelerator.h  what PyTorch asks a device        aliases.h      other tensors over the same memory
//     fallback.h     any operator                      copies.h, operators.h   those with rules of their own

#include "accelerator.h"
#include "operators.h"

namespace emulated {
namespace {

/// A function of Python's, which goes when Python's lock can be had.
struct Held {
  PyObject* object;
  explicit Held(PyObject* o) : object(o) { Py_INCREF(object); }
  ~Held() {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(object);
  }
};

/// Launch a function of Python's, which works on weak aliases of these tensors' memory.
void enqueue(const std::string& name, py::function function, const std::vector<Tensor>& tensors,
             const std::vector<Tensor>& read, const std::vector<Tensor>& written) {
  auto held = std::make_shared<Held>(function.ptr());
  auto work = std::make_shared<Work>();
  work->name = name;
  for (const auto& t : tensors) work->keepers.push_back(std::make_shared<Keeper>(t.storage()));
  if (settings.finds_races) {
    for (const auto& t : read) add_accesses(t, false, &work->accesses);
    for (const auto& t : written) add_accesses(t, true, &work->accesses);
  }
  work->run = [held] {
    py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::object>(held->object)();
  };
  NoGil no_gil;
  launch(std::move(work));
}

void set_schedule(int kind, const std::vector<int64_t>& ahead, unsigned seed) {
  settings.schedule = Schedule(kind);
  settings.ahead = {ahead.begin(), ahead.end()};
  settings.random.seed(seed);
}

void replace(PyObject** there, py::object function) {
  Py_XDECREF(*there);
  *there = function.is_none() ? nullptr : function.release().ptr();
}

/// What the work that runs touches, in pieces of so many bytes.
void touch_now(const std::vector<uintptr_t>& begins, const std::vector<uintptr_t>& ends, bool writes) {
  if (!running || !running->stamp) return;
  for (size_t i = 0; i < begins.size(); i++)
    touched.touch(running->stamp, *running->clock, {begins[i], ends[i], writes});
}

/// From now on, races are looked for, and those before are forgotten.
void find_races(bool on) {
  run_all();
  std::lock_guard<std::mutex> lock(state);
  host_waits_for_all();
  for (auto& [id, queue] : queues) host_clock.advance(id, queue.pushed);
  settings.finds_races = on;
  touched.forget();
}

std::vector<std::string> names_of(int64_t graph) {
  std::vector<std::string> names;
  std::lock_guard<std::mutex> lock(state);
  for (const auto& work : graphs.at(graph)->works) names.push_back(work->name);
  return names;
}

std::map<int64_t, size_t> pending() {
  std::map<int64_t, size_t> out;
  std::lock_guard<std::mutex> lock(state);
  for (auto& [id, queue] : queues) out[id] = queue.works.size();
  return out;
}

std::map<std::string, int64_t> memory() {
  auto& all = device_memory();
  std::lock_guard<std::mutex> lock(state);
  return {{"used", all.used},
          {"most used", all.stats.allocated_bytes[0].peak},
          {"reserved", all.reserved},
          {"most reserved", all.stats.reserved_bytes[0].peak},
          {"total", kTotal},
          {"device allocations", all.num_device_allocs}};
}

}  // namespace
}  // namespace emulated

PYBIND11_MODULE(_emulated_device, m) {
  using namespace emulated;
  namespace py = pybind11;
  m.def("install", &install);

  m.def("set_schedule", &set_schedule, py::arg("kind"), py::arg("ahead") = std::vector<int64_t>(),
        py::arg("seed") = 0);
  m.def("set_speed", [](double launch, double replayed, double byte) {
    settings.seconds_per_launch = launch;
    settings.seconds_per_replayed = replayed;
    settings.seconds_per_byte = byte;
  });
  m.def("seconds", [] { std::lock_guard<std::mutex> lock(state); return device_seconds; });
  m.def("set_sync_mode", [](int mode) { settings.sync_mode = mode; });
  m.def("get_sync_mode", [] { return settings.sync_mode; });
  m.def("set_hook", [](py::object hook) { replace(&settings.hook, std::move(hook)); });
  m.def("set_place", [](py::object place) { replace(&settings.place, std::move(place)); });

  m.def("waits", [] { std::lock_guard<std::mutex> lock(state); return waits; });
  m.def("counts", [] { std::lock_guard<std::mutex> lock(state); return counts; });
  m.def("forget_counts", [] { std::lock_guard<std::mutex> lock(state); waits.clear(); counts.clear(); });
  m.def("pending", &pending);
  m.def("memory", &memory);
  m.def("reset_peaks", [] { device_memory().resetPeakStats(0); });
  m.def("set_tag", [](const std::string& tag) { device_memory().tag = tag; });
  m.def("blocks", [](const std::string& tag) { return device_memory().blocks_of(tag); });
  m.def("empty_cache", [] { device_memory().emptyCache(); });

  m.def("current_stream", [] { return current_stream; });
  m.def("set_stream", [](int64_t id) { current_stream = id; });
  m.def("synchronize", &synchronize_device);

  m.def("is_capturing", &is_capturing);
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("replay", &replay);
  m.def("drop_graph", &drop_graph);
  m.def("names_of", &names_of);

  m.def("enqueue", &enqueue, py::arg("name"), py::arg("function"), py::arg("tensors"),
        py::arg("read") = std::vector<Tensor>(), py::arg("written") = std::vector<Tensor>());
  m.def("find_races", &find_races);
  m.def("finds_races", [] { return settings.finds_races; });
  m.def("races", [] { return touched.found(); });
  m.def("touch_now", &touch_now);
  m.def("weak_host_alias", [](const Tensor& t) { BelowAutograd below; return weak_host_alias(t); });
  m.def("device_view", &device_view);
  m.def("weak_view", &weak_view);
}
