// Records and replays the memory requests of a training step, inside torch's allocator interface: see
// memo/planner/allocator.py. Source: MEMO (arXiv 2407.12117), 4.3.4.
//
// Every step of training makes the same requests in the same order. So a rehearsal is recorded; a planner
// then computes one address for each request in one large block, the arena; in a step a request costs a
// look into the plan, and fragmentation cannot occur. A segment is a named stretch of a step (a layer's
// forward, say).
//
// torch can replace its CUDA allocator, but cannot wrap it. A replacement loses the caching, the statistics
// and the out-of-memory reports, and must happen before the first request. Therefore two entries of the
// allocator class's virtual table, allocate() and raw_deleter(), are pointed at functions of this file.
// Requests outside a segment go on to torch's own function. Requests inside a segment are noted (recording)
// or get their planned address (replay). No CUDA headers are needed, and the CPU's allocator is joined in the
// same way.

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
// in the calling convention (Itanium C++ ABI) a member function is a function whose first argument is `this`
using Allocate = DataPtr (*)(Allocator*, size_t);
using RawDeleter = c10::DeleterFnPtr (*)(const Allocator*);

// places in c10::Allocator's virtual table: 0 and 1 are its destructors, 3 is is_simple_data_ptr()
constexpr size_t kAllocateSlot = 2, kRawDeleterSlot = 4;
// A segment may leave out some of its planned requests: a request is looked for among so many planned ones.
// One that is not found there is a miss.
constexpr size_t kWindow = 16;
constexpr size_t kFence = 3;  // bytes: of no tensor's

// torch's own functions, by device
struct {
  Allocate allocate = nullptr;
  RawDeleter raw_deleter = nullptr;
} torchs[static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES)];

struct Request {
  size_t bytes;
  int64_t offset;  // in the arena; -1: the tensor outlives the step, torch serves the request
};

struct Segment {
  std::string label;
  std::vector<Request> plan;  // in the order of the requests
  bool planned = false, recorded = false;
  bool reported = false;  // a miss was: one line a segment is enough
};

// The arena's memory. Every live block shares it: memory that is replaced by a larger arena's stays until its
// last tensor is gone.
using Memory = std::shared_ptr<DataPtr>;

struct Arena {  // of one model; the caller's handle and every live block share it
  c10::DeviceType device;
  bool guard;  // for tests: check all live blocks against each other, fill freed ones with NaN
  std::mutex mutex;  // protects the members below; frees may come from any thread
  Memory memory;
  size_t bytes = 0;
  // Addresses are reused at once, without a wait: right only where all kernels run on one stream, in order.
  // On another stream a freed place may still be read. Requests of other streams go to torch.
  std::optional<c10::Stream> stream;
  std::unordered_map<std::string, Segment> segments;
  std::map<size_t, size_t> live;  // planned blocks in use: offset -> end
  std::string log, misses_text;
  int64_t ids = 0;
  int64_t generation = 0;  // of the log: a block that was recorded in an earlier one does not note its free
  int64_t requests = 0, misses = 0;
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

// Blocks in use, of all arenas, by address: a free knows nothing else. The map is never destroyed, because
// tensors are freed even while the process exits.
std::mutex blocks_mutex;
auto& blocks = *new std::unordered_map<void*, Block>;

struct Current {  // the segment that the calling thread is in
  std::shared_ptr<Arena> arena;
  Segment* segment = nullptr;
  size_t next = 0;  // the first planned request that has not come yet
  bool recording = false;
  bool varies = false;  // requests may be smaller than planned, and come again: see memo_fence()
};
thread_local Current current;

std::optional<c10::Stream> stream_of(c10::DeviceType device) {
  if (device == c10::DeviceType::CPU) return std::nullopt;
  const c10::impl::VirtualGuardImpl guard(device);
  return guard.getStream(guard.getDevice());
}

// Throws where a new block overlaps a live one. By brute force and without `live`, so that an error in the
// replay's own bookkeeping shows. The caller locks `blocks`.
void check_overlap(const Block& block, const char* begin) {
  const Arena& arena = *block.arena;
  const char* end = begin + block.bytes;
  if (block.offset >= 0 && block.offset + block.bytes > arena.bytes)
    throw std::runtime_error("memory plan: a block lies outside the arena");
  for (const auto& [address, other] : blocks)
    if (const char* start = static_cast<char*>(address); begin < start + other.bytes && start < end)
      throw std::runtime_error("memory plan: two live blocks of " + std::to_string(block.bytes) + " and " +
                               std::to_string(other.bytes) + " bytes overlap");
}

// Takes a freed block out of its arena's books.
void forget(const Block& block, void* begin) {
  Arena& arena = *block.arena;
  std::lock_guard<std::mutex> lock(arena.mutex);
  if (block.offset < 0) arena.recorded_bytes -= block.bytes;
  // a block of memory that was replaced since has no place in the new one
  else if (block.memory == arena.memory) arena.live.erase(block.offset);
  if (arena.guard && block.offset >= 0 && arena.device == c10::DeviceType::CPU)
    memset(begin, 0xff, block.bytes);  // NaN: a read after the free shows
  if (block.id >= 0 && block.generation == arena.generation)
    arena.log += "free " + std::to_string(block.id) + " " + std::to_string(block.bytes) + "\n";
}

// The deleter of this file's blocks; and, in the place of torch's raw deleter, of memory that torch handed
// out itself.
template <c10::DeviceType device>
void release(void* begin) {
  std::unique_lock<std::mutex> lock(blocks_mutex);
  auto node = blocks.extract(begin);
  lock.unlock();  // the memory in `node` goes back to torch, which takes locks of its own
  if (node.empty()) torchs[static_cast<size_t>(device)].raw_deleter(c10::GetAllocator(device))(begin);
  else forget(node.mapped(), begin);
}

// The planned offset of the next request, of n bytes, in the current segment; -1 where torch shall serve the
// request. A request is found by its size: the next planned one of n bytes, or where they vary of at least n.
// The caller locks the arena.
int64_t planned_offset(Arena& arena, Segment& segment, size_t n) {
  const auto& plan = segment.plan;
  const size_t stop = std::min(plan.size(), current.next + kWindow);
  size_t k = current.next;
  while (k < stop && (current.varies ? plan[k].bytes < n : plan[k].bytes != n)) ++k;
  std::string why = "after all that was planned";
  if (current.next < plan.size()) why = "where " + std::to_string(plan[current.next].bytes) + " were planned";
  if (k < stop) {
    current.next = k + 1;
    if (plan[k].offset < 0) return -1;
    const size_t begin = plan[k].offset, end = begin + n;
#ifndef MEMO_TRUST_THE_PLAN
    // protects every live block: the step may have changed since it was recorded, and free tensors later than
    // planned. A wrong plan costs speed, never data.
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
  if (!segment.reported)
    arena.misses_text += segment.label + ": " + std::to_string(n) + " bytes were requested " + why + "\n";
  segment.reported = true;
  return -1;
}

// In the place of torch's allocate(). `native`: torch's allocator.
template <c10::DeviceType device>
DataPtr hook_allocate(Allocator* native, size_t n) {
  const Allocate allocate = torchs[static_cast<size_t>(device)].allocate;
  if (!current.segment || current.arena->device != device || n == 0) return allocate(native, n);
  const auto arena = current.arena;
  Block block{arena, n, -1, -1, 0, nullptr, {}};
  if (current.recording) block.native = allocate(native, n);  // may wait for other threads: before the lock
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
  if (!current.recording && block.offset < 0) return allocate(native, n);  // a miss, or it outlives the step
  const DataPtr& memory = current.recording ? block.native : *block.memory;
  char* begin = static_cast<char*>(memory.get()) + std::max<int64_t>(block.offset, 0);
  const c10::Device where = memory.device();
  std::lock_guard<std::mutex> lock(blocks_mutex);
  if (arena->guard) check_overlap(block, begin);
  blocks.insert_or_assign(begin, std::move(block));
  return {begin, begin, release<device>, where};
}

// Points the two entries of torch's table here, once a process. nullptr, or why they cannot be.
template <c10::DeviceType device>
const char* install() {
  static std::mutex once;
  std::lock_guard<std::mutex> lock(once);
  auto& own = torchs[static_cast<size_t>(device)];
  Allocator* native = c10::GetAllocator(device);
  // an object begins with the address of its class's table
  void** table = *reinterpret_cast<void***>(native);
  void **allocate = table + kAllocateSlot, **raw_deleter = table + kRawDeleterSlot;
  if (own.allocate) return nullptr;  // done before; the caller makes a request and sees whether it comes here
  // the table lies in memory that is read-only after loading: make its pages writable for a moment
  const size_t page = sysconf(_SC_PAGESIZE);
  auto* first = reinterpret_cast<char*>(reinterpret_cast<size_t>(allocate) / page * page);
  const size_t length = reinterpret_cast<char*>(raw_deleter + 1) - first;
  if (mprotect(first, length, PROT_READ | PROT_WRITE)) return "the allocator's table cannot be written";
  own.allocate = reinterpret_cast<Allocate>(*allocate);
  own.raw_deleter = reinterpret_cast<RawDeleter>(*raw_deleter);
  const RawDeleter hook = [](const Allocator*) -> c10::DeleterFnPtr { return release<device>; };
  // Is this slot really raw_deleter()? The compiler's own call tells: it must now give the deleter of this
  // file. In a torch with another interface it does not, and the entry is put back.
  *raw_deleter = reinterpret_cast<void*>(hook);
  const bool understood = native->raw_deleter() == release<device>;
  if (understood) *allocate = reinterpret_cast<void*>(hook_allocate<device>);
  else *raw_deleter = reinterpret_cast<void*>(own.raw_deleter);
  mprotect(first, length, PROT_READ);
  return understood ? nullptr : "this torch's allocator has another interface";
}

using Handle = std::shared_ptr<Arena>;
Arena& get(void* handle) { return **static_cast<Handle*>(handle); }

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

// From here to memo_end, requests of the calling thread belong to segment `label`: they are replayed where it
// has a plan, recorded where it has none and was not recorded yet. Returns 0 where the thread is in a segment
// already: segments do not nest.
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

// `failed`: the segment ended with an exception. Half a log is of no use: all recording begins anew.
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

// Notes a place of the segment by a request of a size that no other has, or finds it in the plan. `varies`:
// behind it come parts, each of which begins with memo_again() of what this returns. The plan knows the largest
// part alone; up to the next fence a request may be smaller than planned.
int64_t memo_fence(int varies) {
  if (!current.segment) return 0;
  const std::string fence = " " + std::to_string(kFence) + "\n";
  std::lock_guard<std::mutex> lock(current.arena->mutex);
  if (current.recording) {
    const std::string id = std::to_string(current.arena->ids++);
    current.arena->log += "malloc " + id + fence + "free " + id + fence;
  } else {
    const auto& plan = current.segment->plan;
    const auto found = std::find_if(plan.begin() + current.next, plan.end(),
                                    [](const Request& request) { return request.bytes == kFence; });
    if (found != plan.end()) current.next = found - plan.begin() + 1;
  }
  current.varies = varies;
  return current.next;
}

void memo_again(int64_t next) { current.next = next; }

// The requests recorded since the last call, or with `misses` the first one of each segment that missed its
// plan, as text, valid until the thread's next call.
const char* memo_take(void* handle, int misses) {
  static thread_local std::string text;
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  if (!misses) ++arena.generation;
  text = std::exchange(misses ? arena.misses_text : arena.log, {});
  return text.c_str();
}

// Gives segment `label` its plan: bytes and offset of each of n requests, in order.
void memo_plan(void* handle, const char* label, int64_t n, const int64_t* bytes, const int64_t* offsets) {
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  Segment& segment = arena.segments[label];
  segment = {label, {}, true, false, false};
  for (int64_t k = 0; k < n; ++k) segment.plan.push_back({static_cast<size_t>(bytes[k]), offsets[k]});
}

// Gives up the arena's memory, which is freed with its last block, and takes `bytes` anew from torch. Returns
// nullptr, or the reason why the arena has no memory now. Its blocks belong to the stream that is current
// here.
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

// {requests in segments, misses, most bytes in use since the last reset, the arena's bytes, its live blocks}
void memo_stats(void* handle, int reset_peak, int64_t* out) {
  Arena& arena = get(handle);
  std::lock_guard<std::mutex> lock(arena.mutex);
  const int64_t stats[] = {arena.requests, arena.misses, static_cast<int64_t>(arena.peak_bytes),
                           static_cast<int64_t>(arena.bytes), static_cast<int64_t>(arena.live.size())};
  std::copy(std::begin(stats), std::end(stats), out);
  if (reset_peak) arena.peak_bytes = 0;
}

}  // extern "C"
