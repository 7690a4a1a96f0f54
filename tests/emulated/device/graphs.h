// Launches and CUDA graphs: what a captured launch becomes, and what a replay is.
//
// Nothing runs at a capture. A graph keeps no memory alive but its pool's: a replay refuses memory that was
// freed since, where a GPU would use whatever is there by now.

#pragma once

#include "memory.h"
#include "schedules.h"

namespace emulated {

/// Launch work on the current stream, or capture it.
inline void launch(WorkPtr work) {
  if (settings.place && work->name != "event") work->name += place();
  // Streams and graphs keep no memory of the device's alive: it is freed in their order.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> let_go;  // behind the lock
  {
    std::lock_guard<std::mutex> lock(state);
    auto graph = capture_locked();
    for (auto& keeper : work->keepers) {
      if (!keeper->strong) continue;
      auto* block = block_of(*keeper->strong);
      keeper->pooled = (block && block->pool != 0) || keeps_nothing(*keeper->strong);
      if (block || graph) let_go.push_back(std::move(keeper->strong));
    }
    if (graph) {
      graph->works.push_back(std::move(work));
      graph->last[current_stream] = graph->works.size();
      return;
    }
    push_locked(current_stream, std::move(work));
  }
  after_launch();
}

inline int64_t begin_capture(int64_t pool) {
  std::lock_guard<std::mutex> lock(state);
  TORCH_CHECK(current_stream != 0, "CUDA graphs must be captured on a non-default stream.");
  auto& queue = queues[current_stream];
  TORCH_CHECK(!queue.capture, "the stream is captured already");
  auto graph = std::make_shared<Graph>();
  graph->id = next_graph++;
  graph->pool = pool;
  graph->is_open = true;
  queue.capture = graph;
  num_captures++;
  return graph->id;
}

inline void end_capture(int64_t id) {
  GraphPtr graph;  // one that fails goes behind the lock, with what it holds
  std::lock_guard<std::mutex> lock(state);
  graph = queues[current_stream].capture;
  TORCH_CHECK(graph && graph->id == id, "the stream captures another graph, or none");
  std::string unjoined;
  for (auto member : graph->members) {
    auto& queue = queues[member];
    if (queue.capture == graph) queue.capture = nullptr;
    if (graph->last[member] > graph->joined[member]) unjoined = "stream " + std::to_string(member);
  }
  queues[current_stream].capture = nullptr;
  graph->is_open = false;
  num_captures--;
  TORCH_CHECK(graph->broken.empty(), "CUDA error: operation failed due to a previous error during capture (",
              graph->broken, ")");
  TORCH_CHECK(unjoined.empty(), "CUDA error: capturing stream has unjoined work (", unjoined, ")");
  graphs[id] = graph;
}

inline void replay(int64_t id) {
  GraphPtr graph;
  {
    std::lock_guard<std::mutex> lock(state);
    TORCH_CHECK(!capture_locked(), "a graph is replayed while another one is captured");
    graph = graphs.at(id);
  }
  NoGil no_gil;
  std::vector<WorkPtr> works;
  for (const auto& captured : graph->works) {
    if (captured->name == "event") continue;
    auto work = std::make_shared<Work>();
    work->name = captured->name + " (replayed)";
    work->accesses = captured->accesses;
    work->bytes = captured->bytes;
    work->is_replayed = true;
    auto of_host = std::make_shared<std::vector<c10::intrusive_ptr<c10::StorageImpl>>>();
    for (const auto& keeper : captured->keepers) {
      if (keeper->pooled) continue;
      auto alive = keeper->weak.lock();
      TORCH_CHECK(alive, "a graph is replayed whose ", captured->name,
                  " uses memory that was freed since it was captured");
      if (!block_of(*alive)) of_host->push_back(std::move(alive));
    }
    work->run = [captured, of_host] { captured->run(); };
    works.push_back(std::move(work));
  }
  for (auto& work : works) launch(std::move(work));
}

inline void drop_graph(int64_t id) {
  GraphPtr graph;  // goes behind the lock
  std::lock_guard<std::mutex> lock(state);
  auto found = graphs.find(id);
  if (found == graphs.end()) return;
  graph = found->second;
  graphs.erase(found);
}

}  // namespace emulated
