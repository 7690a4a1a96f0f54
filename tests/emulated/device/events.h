// Events: a place in a stream's order that other streams and the host can wait for.

#pragma once

#include <chrono>

#include "graphs.h"

namespace emulated {

/// What an event stands for: where its stream was when it was recorded last.
struct Point {
  int64_t stream;
  uint64_t position = 0;
  GraphPtr graph;  // recorded in a capture, behind so many works
  uint64_t graph_position = 0;
  double reached_at = 0;  // in milliseconds
  Clock clock;
};
using PointPtr = std::shared_ptr<Point>;

struct Event {
  PointPtr point;  // none: not recorded yet, which is done for whoever asks
  int queries = 0;
};

inline double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void record(Event& event, int64_t stream) {
  auto point = std::make_shared<Point>();
  point->stream = stream;
  auto stamp = std::make_shared<Work>();
  stamp->name = "event";
  stamp->run = [weak = std::weak_ptr<Point>(point)] {
    if (auto alive = weak.lock()) alive->reached_at = now();
  };
  struct OnStream {
    int64_t before = current_stream;
    explicit OnStream(int64_t stream) { current_stream = stream; }
    ~OnStream() { current_stream = before; }
  };
  {
    // Its place is known before it may run: positions count what was put on a queue.
    std::lock_guard<std::mutex> lock(state);
    auto& queue = queues[stream];
    point->graph = queue.capture;
    if (queue.capture) point->graph_position = queue.capture->works.size() + 1;
    point->position = queue.pushed + 1;
    point->clock = stream_clocks[stream];
    point->clock.join(host_clock);
    point->clock.advance(stream, point->position);
  }
  auto before = std::exchange(event.point, point);  // goes behind the lock
  event.queries = 0;
  OnStream on_stream(stream);
  launch(std::move(stamp));
}

/// A stream waits for an event as it was recorded last. In a capture, that draws the stream into it.
inline void block(const Event& event, int64_t stream) {
  auto point = event.point;
  if (!point) return;
  std::lock_guard<std::mutex> lock(state);
  auto& queue = queues[stream];
  if (point->graph) {
    TORCH_CHECK(point->graph->is_open, "CUDA error: an event of a capture that has ended is waited for");
    if (!queue.capture) {
      queue.capture = point->graph;
      point->graph->members.insert(stream);
    }
    auto& joined = point->graph->joined[point->stream];
    joined = std::max(joined, point->graph_position);
    return;
  }
  TORCH_CHECK(!queue.capture,
              "CUDA error: a capturing stream waits for an event from outside (stream capture isolation)");
  if (point->stream != stream) push_wait_locked(stream, point->stream, point->position, point->clock);
}

inline bool is_reached(const PointPtr& point) {
  std::lock_guard<std::mutex> lock(state);
  return queues[point->stream].done >= point->position;
}

/// The host goes on behind it.
inline void reach(const PointPtr& point) {
  run_until(point->stream, point->position);
  std::lock_guard<std::mutex> lock(state);
  host_clock.join(point->clock);
}

inline void forbid_events_of_graphs(const PointPtr& point) {
  TORCH_CHECK(!point->graph, "CUDA error: an event that was recorded in a capture has no state on the host");
}

/// Whether it is reached. A host that asks again and again gets there: late, but not never.
inline bool query(Event& event) {
  auto point = event.point;
  if (!point) return true;
  forbid_in_capture("event.query");
  forbid_events_of_graphs(point);
  if (!is_reached(point) && event.queries++ == 0) return false;
  reach(point);
  return true;
}

inline void synchronize(const Event& event) {
  auto point = event.point;
  if (!point) return;
  forbid_in_capture("event.synchronize");
  if (!is_reached(point)) wait_as_asked("event.synchronize");
  forbid_events_of_graphs(point);
  reach(point);
}

inline double elapsed(const Event& from, const Event& to) {
  TORCH_CHECK(from.point && to.point, "CUDA error: invalid resource handle (an event was not recorded)");
  TORCH_CHECK(is_reached(from.point) && is_reached(to.point),
              "CUDA error: device not ready (the time between events that are not done)");
  return to.point->reached_at - from.point->reached_at;
}

}  // namespace emulated
