// Races: two works that touch the same bytes, one of them writing, neither behind the other by clocks.
//
// Works are checked in the order in which they happen to run, which is one that their clocks allow; so the last
// writer of each byte, and its readers since, are all that has to be kept.

#pragma once

#include <ATen/ATen.h>

#include "work.h"

namespace emulated {

/// The bytes of a tensor, in pieces; as one, holes included, if there are too many.
inline void add_accesses(const at::Tensor& t, bool writes, std::vector<Access>* out) {
  constexpr int64_t kMost = 4096;
  if (!t.defined() || t.numel() == 0) return;
  const auto start = reinterpret_cast<uintptr_t>(t.storage().data()) + t.storage_offset() * t.itemsize();
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.size(d) > 1 && t.stride(d) != 0) dims.emplace_back(std::abs(t.stride(d)), t.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t piece = 1, count = 1, last = 0;
  size_t first_hole = 0;
  while (first_hole < dims.size() && dims[first_hole].first == piece) piece *= dims[first_hole++].second;
  for (size_t d = first_hole; d < dims.size(); d++) {
    count *= dims[d].second;
    last += dims[d].first * (dims[d].second - 1);
  }
  if (count > kMost) {
    out->push_back({start, start + (last + piece) * t.itemsize(), writes});
    return;
  }
  std::vector<int64_t> offsets{0};
  for (size_t d = first_hole; d < dims.size(); d++) {
    const auto before = offsets;
    for (int64_t i = 1; i < dims[d].second; i++)
      for (auto offset : before) offsets.push_back(offset + i * dims[d].first);
  }
  for (auto offset : offsets) {
    const auto begin = start + offset * t.itemsize();
    out->push_back({begin, begin + piece * t.itemsize(), writes});
  }
}

/// Who has touched which bytes.
class Touched {
 public:
  void touch(const StampPtr& by, const Clock& clock, const Access& access) {
    std::lock_guard<std::mutex> lock(mutex);
    cut(access.begin);
    cut(access.end);
    auto place = cells.lower_bound(access.begin);
    auto from = access.begin;
    std::vector<std::pair<uintptr_t, uintptr_t>> gaps;
    for (; place != cells.end() && place->first < access.end; ++place) {
      if (from < place->first) gaps.emplace_back(from, place->first);
      auto& cell = place->second;
      if (cell.writer) check(*cell.writer, *by, clock);
      if (access.writes)
        for (auto& reader : cell.readers) check(*reader, *by, clock);
      else add_reader(&cell, by);
      from = cell.end;
    }
    if (from < access.end) gaps.emplace_back(from, access.end);
    if (access.writes) {
      cells.erase(cells.lower_bound(access.begin), cells.lower_bound(access.end));
      cells[access.begin] = {access.end, by, {}};
    } else {
      for (auto [begin, end] : gaps) cells[begin] = {end, nullptr, {by}};
    }
  }

  std::map<std::string, int64_t> found() {
    std::lock_guard<std::mutex> lock(mutex);
    return races;
  }
  /// Whoever gets this memory next knows that nobody uses it.
  void forget(uintptr_t begin, uintptr_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    if (cells.empty()) return;
    cut(begin);
    cut(end);
    cells.erase(cells.lower_bound(begin), cells.lower_bound(end));
  }
  void forget() {
    std::lock_guard<std::mutex> lock(mutex);
    cells.clear();
    races.clear();
  }

 private:
  struct Cell {
    uintptr_t end;
    StampPtr writer;
    std::vector<StampPtr> readers;  // the last one of each stream
  };
  std::mutex mutex;
  std::map<uintptr_t, Cell> cells;  // by where they begin
  std::map<std::string, int64_t> races;

  void cut(uintptr_t at) {
    auto place = cells.lower_bound(at);
    if (place == cells.begin()) return;
    --place;
    if (place->second.end <= at) return;
    Cell rest = place->second;
    place->second.end = at;
    cells.emplace(at, std::move(rest));
  }

  static void add_reader(Cell* cell, const StampPtr& by) {
    for (auto& reader : cell->readers)
      if (reader->stream == by->stream) {
        reader = by;
        return;
      }
    cell->readers.push_back(by);
  }

  void check(const Stamp& before, const Stamp& now, const Clock& clock) {
    if (before.stream == now.stream || clock.of(before.stream) >= before.position) return;
    races[before.name + " (stream " + std::to_string(before.stream) + ") and " + now.name + " (stream " +
          std::to_string(now.stream) + ")"]++;
  }
};

inline auto& touched = *new Touched();
inline thread_local Work* running = nullptr;

inline void touch(const Work& work, const std::vector<Access>& accesses) {
  if (!work.stamp) return;
  for (auto& access : accesses) touched.touch(work.stamp, *work.clock, access);
}

}  // namespace emulated
