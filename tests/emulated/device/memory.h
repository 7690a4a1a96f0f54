// The device's memory, and how PyTorch's caching allocator gives it out.
//
// A freed block goes back to the pool of its stream at once, and whoever asks there next gets it: behind
// whoever had it, for a stream keeps its order. Other streams that still use it must have been recorded
// (record_stream), or they read what is not theirs any more. Freed contents are lost in the order of the
// stream. Captures allocate from the pool of their graph, whose blocks are given out again within it:
// graphs that share a pool overwrite one another's memory, as on a GPU.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "queues.h"

namespace emulated {

struct Block {
  void* start;
  size_t size;    // rounded
  size_t asked;
  int64_t pool;   // of a graph; 0: of none
  int64_t stream;
  std::set<int64_t> used_on;  // record_stream
  std::string tag;            // whoever allocated it had set
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t asked) override {
    if (asked == 0) return {nullptr, nullptr, &drop, kDevice};
    auto* block = take(asked);
    return {block->start, block, &drop, kDevice};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_stream(data, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(state);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(state);
    stats.allocated_bytes[0].reset_peak();
    stats.reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(state);
    return {kTotal - reserved, kTotal};
  }

  /// Gives unused memory back, but for that of graphs. cudaFree waits for the device.
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    run_all();
    std::vector<Block*> gone;
    {
      std::lock_guard<std::mutex> lock(state);
      host_waits_for_all();
      take_back_locked();
      rooms.clear();
      std::set<int64_t> in_use;
      for (auto& [id, graph] : graphs) in_use.insert(graph->pool);
      for (auto& [id, queue] : queues)
        if (queue.capture) in_use.insert(queue.capture->pool);
      for (auto place = unused.begin(); place != unused.end();) {
        const auto pool = place->first.first;
        if (pool != 0 && in_use.count(pool)) {
          ++place;
          continue;
        }
        for (auto& [size, block] : place->second) {
          reserved -= size;
          stats.reserved_bytes[0].decrease(size);
          gone.push_back(block);
        }
        place = unused.erase(place);
      }
    }
    for (auto* block : gone) {
      const auto start = reinterpret_cast<uintptr_t>(block->start);
      touched.forget(start, start + block->size);
      free(block->start);
      delete block;
    }
  }

  static Block* block_of(const c10::DataPtr& data) {
    return data.get_deleter() == &drop ? static_cast<Block*>(data.get_context()) : nullptr;
  }

  void record_stream(const c10::DataPtr& data, c10::Stream stream) {
    if (auto* block = block_of(data)) {
      std::lock_guard<std::mutex> lock(state);
      block->used_on.insert(stream.id());
    }
  }

  /// Where memory in use is that was allocated under a tag, and its bytes.
  std::vector<std::pair<uintptr_t, size_t>> blocks_of(const std::string& wanted) {
    std::lock_guard<std::mutex> lock(state);
    std::vector<std::pair<uintptr_t, size_t>> found;
    for (auto* block : tagged)
      if (block->tag == wanted) found.emplace_back(reinterpret_cast<uintptr_t>(block->start), block->size);
    return found;
  }

  std::string tag;  // of what is allocated from now on
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t used = 0, reserved = 0;  // bytes: in tensors; and with those that are kept for the next
  int64_t num_device_allocs = 0;  // cudaMalloc, of segments

 private:
  std::set<Block*> tagged;
  using Unused = std::multimap<size_t, Block*>;  // by size
  struct Awaited {  // freed, and recorded on streams that are not done with it
    Block* block;
    std::vector<std::pair<int64_t, uint64_t>> readers;
  };
  std::map<std::pair<int64_t, int64_t>, Unused> unused;  // by pool and stream
  std::vector<Awaited> awaited;
  std::map<std::tuple<int64_t, int64_t, size_t>, size_t> rooms;  // left in segments, by pool, stream and their size

  Block* take(size_t asked) {
    const size_t size = (asked + 511) / 512 * 512;
    for (bool again : {false, true}) {
      {
        std::lock_guard<std::mutex> lock(state);
        auto graph = capture_locked();
        const int64_t pool = graph ? graph->pool : 0;
        if (!graph) take_back_locked();  // PyTorch asks no events while it captures
        auto& here = unused[{pool, current_stream}];
        auto found = here.lower_bound(size);
        if (found != here.end() && found->first <= 2 * size) {
          auto* block = found->second;
          here.erase(found);
          return given_locked(block, asked);
        }
        if (reserved + size <= kTotal) {
          reserved += size;
          stats.reserved_bytes[0].increase(size);
          count_segments_locked(pool, size);
          return given_locked(new Block{fresh(size), size, asked, pool, current_stream, {}}, asked);
        }
        if (again || graph) break;
      }
      emptyCache();
    }
    C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory (emulated)");
  }

  Block* given_locked(Block* block, size_t asked) {
    block->asked = asked;
    block->tag = tag;
    if (!tag.empty()) tagged.insert(block);
    used += asked;
    stats.allocated_bytes[0].increase(asked);
    return block;
  }

  /// PyTorch cuts small blocks from segments of 2 MiB, others from those of 20, and takes no more for larger ones.
  void count_segments_locked(int64_t pool, size_t size) {
    constexpr size_t MiB = size_t(1) << 20;
    const size_t segment = size <= MiB ? 2 * MiB : size < 10 * MiB ? 20 * MiB : size;
    auto& room = rooms[{pool, current_stream, segment}];
    if (room < size) {
      num_device_allocs++;
      room = segment;
    }
    room -= size;
  }

  static void* fresh(size_t size) {
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 512, size) == 0, "host memory is short");
    if (size <= kMostPoisoned) fill_with_rubbish(start, size, kFresh);
    return start;
  }

  static void drop(void* context);

  void give_back(Block* block) {
    const auto where = place();
    std::lock_guard<std::mutex> lock(state);
    used -= block->asked;
    tagged.erase(block);
    stats.allocated_bytes[0].decrease(block->asked);
    std::set<int64_t> others;
    others.swap(block->used_on);
    others.erase(block->stream);
    if (others.empty() || block->pool != 0) return put_locked(block, where);
    Awaited one{block, {}};
    for (auto id : others) one.readers.emplace_back(id, queues[id].pushed);
    awaited.push_back(std::move(one));
  }

  /// What recorded streams are done with.
  void take_back_locked() {
    std::vector<Awaited> still;
    for (auto& one : awaited) {
      bool is_done = true;
      for (auto [id, position] : one.readers) is_done &= queues[id].done >= position;
      if (is_done) {
        for (auto [id, position] : one.readers) host_clock.advance(id, position);  // it has asked their events
        put_locked(one.block);
      }
      else still.push_back(std::move(one));
    }
    awaited.swap(still);
  }

  void put_locked(Block* block, const std::string& where = "") {
    unused[{block->pool, block->stream}].emplace(block->size, block);
    // A graph's output may be used when nothing holds it any more, until another graph of the pool has run.
    if (block->pool != 0 || block->size > kMostPoisoned) return;
    auto lose = [start = block->start, size = block->size] { fill_with_rubbish(start, size, kFreed); };
    if (queues[block->stream].works.empty() && !settings.finds_races) return lose();
    auto work = std::make_shared<Work>();
    work->name = "free" + where;
    work->run = lose;
    const auto start = reinterpret_cast<uintptr_t>(block->start);
    work->accesses.push_back({start, start + block->size, true});
    push_locked(block->stream, std::move(work));
  }
};

inline DeviceMemory& device_memory() {
  static auto* one = new DeviceMemory();
  return *one;
}

inline void DeviceMemory::drop(void* context) {
  if (context) device_memory().give_back(static_cast<Block*>(context));
}

/// The deleter of views that keep nothing alive (vLLM's weak_ref_tensor).
inline void keep_nothing(void*) {}

inline bool keeps_nothing(const c10::StorageImpl& storage) {
  return storage.data_ptr().get_deleter() == &keep_nothing;
}

inline Block* block_of(const c10::StorageImpl& storage) { return DeviceMemory::block_of(storage.data_ptr()); }

}  // namespace emulated
