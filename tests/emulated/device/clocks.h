// Vector clocks: what comes behind what, whatever the schedule.
//
// A stream's clock says how far each stream was when its newest work may begin: waits join clocks, and so does
// what the host has waited for before a launch. Call all of this with `state` held.

#pragma once

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

#include "settings.h"

namespace emulated {

struct Clock {
  std::vector<std::pair<int64_t, uint64_t>> reached;  // of each stream, the position; sorted by stream

  uint64_t of(int64_t stream) const {
    for (auto [id, position] : reached)
      if (id == stream) return position;
    return 0;
  }
  void advance(int64_t stream, uint64_t position) {
    auto place = std::lower_bound(reached.begin(), reached.end(), std::make_pair(stream, uint64_t(0)));
    if (place == reached.end() || place->first != stream) reached.insert(place, {stream, position});
    else place->second = std::max(place->second, position);
  }
  void join(const Clock& other) {
    for (auto [id, position] : other.reached) advance(id, position);
  }
};

inline auto& stream_clocks = *new std::unordered_map<int64_t, Clock>();
inline auto& host_clock = *new Clock();  // what the host has waited for

/// The clock of work that the host launches now, at this position of a stream.
inline std::shared_ptr<const Clock> launch_clock(int64_t stream, uint64_t position) {
  auto& clock = stream_clocks[stream];
  clock.join(host_clock);
  clock.advance(stream, position);
  return std::make_shared<const Clock>(clock);
}

inline void host_waits_for_stream(int64_t stream) { host_clock.join(stream_clocks[stream]); }

inline void host_waits_for_all() {
  for (auto& [id, clock] : stream_clocks) host_clock.join(clock);
}

}  // namespace emulated
