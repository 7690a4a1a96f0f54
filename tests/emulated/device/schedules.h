// When work is done that nobody has waited for: what a launch may set off.

#pragma once

#include "queues.h"

namespace emulated {

/// A part of some stream's work, now and then.
inline void run_something() {
  int64_t stream = -1;
  uint64_t position = 0;
  {
    std::lock_guard<std::mutex> lock(state);
    auto& random = settings.random;
    if (random() % 4 != 0) return;
    std::vector<int64_t> busy;
    for (auto& [id, queue] : queues)
      if (!queue.works.empty()) busy.push_back(id);
    if (busy.empty()) return;
    std::sort(busy.begin(), busy.end());  // a seed stands for one schedule
    stream = busy[random() % busy.size()];
    auto& queue = queues[stream];
    position = queue.done + 1 + random() % queue.works.size();
  }
  run_until(stream, position);
}

inline void after_launch() {
  switch (settings.schedule) {
    case LATEST:
      return;
    case AT_ONCE:
      return run_stream(current_stream);
    case SOME_AHEAD:
      if (settings.ahead.count(current_stream)) run_stream(current_stream);
      return;
    case RANDOM:
      return run_something();
  }
}

}  // namespace emulated
