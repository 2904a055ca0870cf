// Records and replays the memory requests of a training step, inside torch's allocator interface. See memo/planner/allocator.py.
//
// torch can replace an allocator, but not wrap the one it has for CUDA; replaced, that one's caching, statistics and
// out-of-memory reports are gone, and it must happen before the first request. So two entries of the class's virtual table,
// allocate() and raw_deleter(), are pointed here: what is requested outside a segment goes straight on to torch's own
// function, and what is inside is noted or gets its planned address. No CUDA headers; one way for the CPU and for CUDA.

#include <c10/core/Allocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using c10::Allocator;
using c10::DataPtr;
using Allocate = DataPtr (*)(Allocator*, size_t);  // a member function is one whose first argument is `this`
using RawDeleter = c10::DeleterFnPtr (*)(const Allocator*);

constexpr size_t kAllocateSlot = 2, kRawDeleterSlot = 4;  // in c10::Allocator's virtual table; 0 and 1 are its destructors
constexpr size_t kWindow = 16;       // planned requests that may be left out before one is not found any more

struct {
  Allocate allocate = nullptr;
  RawDeleter raw_deleter = nullptr;
} torchs[static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)];  // its own functions, by device

struct Request {
  size_t bytes;
  int64_t offset;  // -1: it outlives the step and is left to torch
};

struct Segment {
  std::string label;
  std::vector<Request> plan;
  bool planned = false, recorded = false, reported = false;
};

using Memory = std::shared_ptr<DataPtr>;  // every live block shares it

struct Arena {  // of one model; the caller's handle and every live block share it
  c10::DeviceType device;
  bool guard;
  std::mutex mutex;  // what follows; frees may come from any thread
  Memory memory;
  size_t bytes = 0;
  std::optional<c10::Stream> stream;  // whose memory it is: on another one a place that is free may still be read
  std::unordered_map<std::string, Segment> segments;
  std::map<size_t, size_t> live;  // planned blocks in use: offset -> end
  std::string log, misses_text;
  int64_t ids = 0, generation = 0, requests = 0, misses = 0;
  size_t recorded_bytes = 0, peak_bytes = 0;
};

struct Block {
  std::shared_ptr<Arena> arena;
  size_t bytes;
  int64_t offset;          // in the arena, or -1 while recording
  int64_t id, generation;  // in the log
  Memory memory;           // the arena's, when it was handed out
  DataPtr native;          // torch's, while recording
};

std::mutex blocks_mutex;
auto& blocks = *new std::unordered_map<void*, Block>;  // in use, of all arenas: torch hands back the address alone. Never
                                                       // destroyed: tensors are freed at exit too

struct Current {  // what the calling thread is in
  std::shared_ptr<Arena> arena;
  Segment* segment = nullptr;
  size_t next = 0;  // the first planned request that did not come yet
  bool recording = false;
};
thread_local Current current;

std::optional<c10::Stream> stream_of(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return std::nullopt;
  const c10::impl::VirtualGuardImpl guard(device);
  return guard.getStream(guard.getDevice());
}

void check_overlap(const Block& block, const char* begin) {  // by brute force, whatever `live` says; caller locks blocks
  const Arena& arena = *block.arena;
  const char* end = begin + block.bytes;
  if (block.offset >= 0 && block.offset + block.bytes > arena.bytes)
    throw std::runtime_error("memory plan: a block lies outside the arena");
  for (const auto& [address, other] : blocks)
    if (const char* start = static_cast<char*>(address); begin < start + other.bytes && start < end)
      throw std::runtime_error("memory plan: two live blocks of " + std::to_string(block.bytes) + " and " +
                               std::to_string(other.bytes) + " bytes overlap");
}

void forget(const Block& block, void* begin) {
  Arena& arena = *block.arena;
  std::lock_guard<std::mutex> lock(arena.mutex);
  if (block.offset < 0) arena.recorded_bytes -= block.bytes;
  else if (block.memory == arena.memory) arena.live.erase(block.offset);
  if (arena.guard && block.offset >= 0 && arena.device == c10::DeviceType::CPU) memset(begin, 0xff, block.bytes);  // NaN
  if (block.id >= 0 && block.generation == arena.generation)
    arena.log += "free " + std::to_string(block.id) + " " + std::to_string(block.bytes) + "\n";
}

template <c10::DeviceType device>
void release(void* begin) {
  std::unique_lock<std::mutex> lock(blocks_mutex);
  auto node = blocks.extract(begin);
  lock.unlock();
  if (node.empty()) torchs[static_cast<size_t>(device)].raw_deleter(c10::GetAllocator(device))(begin);
  else forget(node.mapped(), begin);
}

// The planned offset of the next request, of n bytes, in the current segment; -1 where torch shall serve it. Caller locks.
int64_t planned_offset(Arena& arena, Segment& segment, size_t n) {
  const auto& plan = segment.plan;
  const size_t stop = std::min(plan.size(), current.next + kWindow);
  size_t k = current.next;
  while (k < stop && plan[k].bytes != n) ++k;
  std::string why = current.next < plan.size() ? "where " + std::to_string(plan[current.next].bytes) + " were planned"
                                               : "after all that was planned";
  if (k < stop) {
    current.next = k + 1;
    if (plan[k].offset < 0) return -1;
    const size_t begin = plan[k].offset, end = begin + n;
#ifndef MEMO_TRUST_THE_PLAN
    // protects every live block from a plan that does not fit what is really requested
    const auto after = arena.live.lower_bound(begin);
    const bool taken = (after != arena.live.end() && after->first < end) ||
                       (after != arena.live.begin() && std::prev(after)->second > begin) || end > arena.bytes;
#else
    const bool taken = false;
#endif
    if (!taken && stream_of(arena.device) == arena.stream) return begin;
    why = taken ? "whose place is still taken" : "on another stream than the arena's";
  }
  ++arena.misses;
  if (!segment.reported) arena.misses_text += segment.label + ": " + std::to_string(n) + " bytes were requested " + why + "\n";
  segment.reported = true;
  return -1;
}

template <c10::DeviceType device>
DataPtr hook_allocate(Allocator* native, size_t n) {
  const Allocate allocate = torchs[static_cast<size_t>(device)].allocate;
  if (!current.segment || current.arena->device != device || n == 0) return allocate(native, n);
  const auto arena = current.arena;
  Block block{arena, n, -1, -1, 0, nullptr, {}};
  if (current.recording) block.native = allocate(native, n);  // may wait for other threads: without the lock
  {
    std::lock_guard<std::mutex> lock(arena->mutex);
    ++arena->requests;
    if (current.recording) {
      block.generation = arena->generation;
      arena->log += "malloc " + std::to_string(block.id = arena->ids++) + " " + std::to_string(n) + "\n";
      arena->recorded_bytes += n;
    } else if ((block.offset = planned_offset(*arena, *current.segment, n)) >= 0) {
      arena->live[block.offset] = block.offset + n;
      block.memory = arena->memory;
    }
    const size_t highest = arena->live.empty() ? 0 : arena->live.rbegin()->second;
    arena->peak_bytes = std::max(arena->peak_bytes, highest + arena->recorded_bytes);
  }
  if (!current.recording && block.offset < 0) return allocate(native, n);
  const DataPtr& memory = current.recording ? block.native : *block.memory;
  char* begin = static_cast<char*>(memory.get()) + std::max<int64_t>(block.offset, 0);
  const c10::Device where = memory.device();
  std::lock_guard<std::mutex> lock(blocks_mutex);
  if (arena->guard) check_overlap(block, begin);
  blocks.insert_or_assign(begin, std::move(block));
  return {begin, begin, release<device>, where};
}

template <c10::DeviceType device>
c10::DeleterFnPtr hook_raw_deleter(const Allocator*) {
  return release<device>;
}

template <c10::DeviceType device>
const char* install() {
  static std::mutex once;
  std::lock_guard<std::mutex> lock(once);
  auto& own = torchs[static_cast<size_t>(device)];
  Allocator* native = c10::GetAllocator(device);
  void** table = *reinterpret_cast<void***>(native);
  void **allocate = table + kAllocateSlot, **raw_deleter = table + kRawDeleterSlot;
  if (own.allocate) return nullptr;  // already; the caller tries whether it still comes by here
  const size_t page = sysconf(_SC_PAGESIZE);
  auto* first = reinterpret_cast<char*>(reinterpret_cast<size_t>(allocate) / page * page);
  const size_t length = reinterpret_cast<char*>(raw_deleter + 1) - first;
  if (mprotect(first, length, PROT_READ | PROT_WRITE)) return "the allocator's table cannot be written";
  own.allocate = reinterpret_cast<Allocate>(*allocate);
  own.raw_deleter = reinterpret_cast<RawDeleter>(*raw_deleter);
  *raw_deleter = reinterpret_cast<void*>(hook_raw_deleter<device>);
  const bool understood = native->raw_deleter() == release<device>;
  if (understood) *allocate = reinterpret_cast<void*>(hook_allocate<device>);
  else *raw_deleter = reinterpret_cast<void*>(own.raw_deleter);
  mprotect(first, length, PROT_READ);
  return understood ? nullptr : "this torch's allocator has another interface";
}

using Handle = std::shared_ptr<Arena>;
Arena& get(void* handle) { return **static_cast<Handle*>(handle); }

const char* take(std::string& from) {
  static thread_local std::string text;
  text = std::exchange(from, {});
  return text.c_str();
}

}  // namespace

extern "C" {

// nullptr, or why this torch's allocator cannot be joined. `cuda`: 0 for the CPU's.
const char* memo_install(int cuda) try {
  return cuda ? install<c10::DeviceType::CUDA>() : install<c10::DeviceType::CPU>();
} catch (const std::exception&) {
  return "this torch has no allocator for the device";
}

void* memo_open(int cuda, int guard) {
  auto arena = std::make_shared<Arena>();
  arena->device = cuda ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  arena->guard = guard;
  return new Handle(std::move(arena));
}

void memo_close(void* handle) { delete static_cast<Handle*>(handle); }

// From here to memo_end, what the calling thread requests belongs to `label`: replayed where that has a plan, recorded
// where it has none and was not recorded yet. Whether the thread was in no segment: they do not nest.
int memo_begin(void* handle, const char* label) {
  if (current.segment) return 0;
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  Segment& segment = arena.segments[label];
  if (segment.label.empty()) segment.label = label;
  if (segment.recorded) return 1;
  current = {*static_cast<Handle*>(handle), &segment, 0, !segment.planned};
  if (current.recording) arena.log += "begin " + segment.label + "\n";
  return 1;
}

// `failed`: what was recorded so far is half a log, of no use.
void memo_end(int failed) {
  if (!current.segment) return;
  const Current ended = std::exchange(current, {});  // the arena lives on even if its handle is closed by now
  std::lock_guard<std::mutex> lock(ended.arena->mutex);
  if (!ended.recording) return;
  if (failed) {
    ended.arena->log.clear();
    ++ended.arena->generation;
    for (auto& [label, segment] : ended.arena->segments) segment.recorded = false;
  } else {
    ended.arena->log += "end " + ended.segment->label + "\n";
    ended.segment->recorded = true;
  }
}

// What was recorded since the last call, as text; it is the caller's until the next call of this or of memo_misses.
const char* memo_log(void* handle) {
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  ++arena.generation;
  return take(arena.log);
}

// The first request of each segment that missed its plan since the last call.
const char* memo_misses(void* handle) {
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  return take(arena.misses_text);
}

void memo_plan(void* handle, const char* label, int64_t n, const int64_t* bytes, const int64_t* offsets) {
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  Segment& segment = arena.segments[label];
  segment = {label, {}, true, false, false};
  for (int64_t k = 0; k < n; ++k) segment.plan.push_back({static_cast<size_t>(bytes[k]), offsets[k]});
}

// Gives the arena's memory back, when its last block goes, and takes as many bytes anew from torch; nullptr, or why it has
// none now. All its blocks belong to the stream that is current here.
const char* memo_reserve(void* handle, int64_t bytes) {
  static thread_local std::string error;
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  arena.memory.reset();
  arena.live.clear();
  arena.bytes = 0;
  try {
    arena.stream = stream_of(arena.device);
    const Allocate allocate = torchs[static_cast<size_t>(arena.device)].allocate;
    if (bytes) arena.memory = std::make_shared<DataPtr>(allocate(c10::GetAllocator(arena.device), bytes));
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
  arena.bytes = bytes;
  return nullptr;
}

// {requests in segments, misses, most bytes in use since the last reset, the arena's bytes, its live blocks, characters
// recorded and not yet fetched}
void memo_stats(void* handle, int reset_peak, int64_t* out) {
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  const int64_t stats[] = {arena.requests, arena.misses, static_cast<int64_t>(arena.peak_bytes),
                           static_cast<int64_t>(arena.bytes), static_cast<int64_t>(arena.live.size()),
                           static_cast<int64_t>(arena.log.size())};
  std::copy(std::begin(stats), std::end(stats), out);
  if (reset_peak) arena.peak_bytes = 0;
}

}  // extern "C"
