// Work that was launched: on a stream's queue, or captured in a graph.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/Storage.h>

#include "clocks.h"

namespace emulated {

/// What an alias holds of the memory that it stands for. `strong` goes where a GPU keeps nothing alive.
struct Keeper {
  c10::intrusive_ptr<c10::StorageImpl> strong;
  c10::weak_intrusive_ptr<c10::StorageImpl> weak;
  bool pooled = false;  // of a graph's pool, which outlives the tensor; or nobody asked for it to be kept

  explicit Keeper(const c10::Storage& storage)
      : strong(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl())),
        weak(strong) {}
};
using Keepers = std::vector<std::shared_ptr<Keeper>>;

/// Bytes that are read or written.
struct Access {
  uintptr_t begin, end;
  bool writes;
};

/// A launch, for those who meet its traces.
struct Stamp {
  int64_t stream;
  uint64_t position;
  std::string name;
};
using StampPtr = std::shared_ptr<const Stamp>;

struct Work {
  std::string name;
  std::function<void()> run;
  Keepers keepers;
  size_t bytes = 0;  // that an operator is given and returns
  bool is_replayed = false;
  // Where races are looked for.
  std::vector<Access> accesses;
  StampPtr stamp;
  std::shared_ptr<const Clock> clock;
  // A wait: it runs the other stream up to there, and nothing else.
  int64_t wait_stream = -1;
  uint64_t wait_position = 0;
};
using WorkPtr = std::shared_ptr<Work>;

struct Graph {
  int64_t id;
  int64_t pool;
  std::vector<WorkPtr> works;
  std::set<int64_t> members;                                 // streams that were drawn into the capture
  std::unordered_map<int64_t, uint64_t> last, joined;        // of each stream: what it did, what was waited for
  bool is_open = false;
  std::string broken;  // what has invalidated the capture
};
using GraphPtr = std::shared_ptr<Graph>;

/// A stream: what was launched on it and is not done, first come, first served.
struct Queue {
  std::deque<WorkPtr> works;
  uint64_t pushed = 0, done = 0;
  GraphPtr capture;
};

inline auto& queues = *new std::unordered_map<int64_t, Queue>();  // outlives Python
inline auto& graphs = *new std::unordered_map<int64_t, GraphPtr>();
inline int64_t next_stream = 1, next_graph = 1;
inline int num_captures = 0;
inline thread_local int64_t current_stream = 0;

}  // namespace emulated
