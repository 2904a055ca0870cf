// Memory of the devices, with its limit, and page locks of the host's. Device memory is host memory that
// takes no pages until it is touched.
#include "null.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace null {

size_t memory_bytes() {
    static size_t n = setting("NULL_MEMORY_BYTES", 80e9);
    return n;
}
static size_t context_bytes() {
    static size_t n = setting("NULL_CONTEXT_BYTES", 700e6);
    return n;
}
static size_t lockable_bytes() {
    static size_t n = setting("NULL_LOCKABLE_BYTES", 1e15);
    return n;
}

// R580 and later drivers refuse to lock this much in one registration
static const size_t LARGEST_REGISTRATION = 1ull << 39;

// --- what is held ---

static struct Account {
    size_t used = 0, peak = 0;
} accounts[64];  // of each device

static std::map<uintptr_t, std::pair<size_t, int>> allocations;  // on devices: bytes, device
static std::map<uintptr_t, size_t> locked;                       // on the host, page-locked

template <class Map>
static typename Map::iterator holder(Map &map, const void *p) {  // the entry at or before p
    auto it = map.upper_bound((uintptr_t)p);
    return it == map.begin() ? map.end() : std::prev(it);
}

bool on_device(const void *p) {
    auto it = holder(allocations, p);
    return it != allocations.end() && (uintptr_t)p < it->first + it->second.first;
}

bool page_locked(const void *p, size_t bytes, bool *crosses) {
    auto it = holder(locked, p);
    if (crosses) *crosses = false;
    if (it == locked.end() || (uintptr_t)p >= it->first + it->second) return false;
    bool inside = (uintptr_t)p + bytes <= it->first + it->second;
    if (crosses) *crosses = !inside;
    return inside;
}

bool take_device_bytes(size_t bytes) {
    Account &mine = accounts[current_device()];
    if (mine.used + bytes + context_bytes() > memory_bytes()) return false;
    mine.used += bytes;
    mine.peak = std::max(mine.peak, mine.used);
    return true;
}

void give_device_bytes(size_t bytes) { accounts[current_device()].used -= bytes; }

}  // namespace null

using namespace null;

extern "C" {

// {bytes in use on the current device, the most there were}
void null_memory(long long *out) {
    out[0] = accounts[current_device()].used, out[1] = accounts[current_device()].peak;
}

// --- memory of the device ---

cudaError_t cudaMalloc(void **p, size_t bytes) {
    Lock lock(mutex);
    counts[MALLOCS]++;
    size_t n = (bytes + (2 << 20) - 1) / (2 << 20) * (2 << 20);  // pages of 2 MiB
    *p = nullptr;
    if (!take_device_bytes(n)) return failed(cudaErrorMemoryAllocation);
    void *at = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        give_device_bytes(n);
        return failed(cudaErrorMemoryAllocation);
    }
    allocations[(uintptr_t)at] = {n, current_device()};
    *p = at;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    Lock lock(mutex);
    auto it = allocations.find((uintptr_t)p);
    if (!p) return cudaSuccess;
    if (it == allocations.end()) return failed(cudaErrorInvalidValue);
    counts[FREES]++;
    synchronize_device();  // as the real one does
    forget(p, it->second.first);
    accounts[it->second.second].used -= it->second.first;
    munmap(p, it->second.first);
    allocations.erase(it);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
    Lock lock(mutex);
    *total = memory_bytes();
    *free = memory_bytes() - context_bytes() - accounts[current_device()].used;
    return cudaSuccess;
}

// --- memory of the host ---

static bool locks(size_t bytes) {  // whether so many more bytes may be locked
    size_t held = 0;
    for (auto &[start, n] : locked) held += n;
    return held + bytes <= lockable_bytes();
}

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) {
    Lock lock(mutex);
    if (!locks(bytes)) return failed(cudaErrorMemoryAllocation);
    *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    locked[(uintptr_t)*p] = bytes;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p) {
    Lock lock(mutex);
    auto it = locked.find((uintptr_t)p);
    if (it == locked.end()) return failed(cudaErrorInvalidValue);
    forget(p, it->second);
    munmap(p, it->second);
    locked.erase(it);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned) {
    Lock lock(mutex);
    counts[REGISTRATIONS]++;
    if (bytes >= LARGEST_REGISTRATION || !locks(bytes)) return failed(cudaErrorMemoryAllocation);
    auto next = locked.lower_bound((uintptr_t)p);
    if (page_locked(p, 1) || (next != locked.end() && next->first < (uintptr_t)p + bytes))
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    locked[(uintptr_t)p] = bytes;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p) {
    Lock lock(mutex);
    auto it = locked.find((uintptr_t)p);
    if (it == locked.end()) return failed(cudaErrorHostMemoryNotRegistered);
    host().deed();
    touch(host(), {p, it->second, true}, described("end of the page lock"));  // no copy may be under way
    forget(p, it->second);
    locked.erase(it);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p) {
    Lock lock(mutex);
    memset(a, 0, sizeof *a);
    a->device = current_device();
    a->type = on_device(p)        ? cudaMemoryTypeDevice
              : page_locked(p, 1) ? cudaMemoryTypeHost
                                  : cudaMemoryTypeUnregistered;
    if (a->type == cudaMemoryTypeDevice) a->device = holder(allocations, p)->second.second;
    if (a->type != cudaMemoryTypeUnregistered) a->devicePointer = (void *)p;
    if (a->type == cudaMemoryTypeHost) a->hostPointer = (void *)p;
    return cudaSuccess;
}

}  // extern "C"
