// The CUDA runtime that torch calls, loaded before the real one: devices with a name and a limit of memory,
// streams and events with virtual time, copies, launches. Kernels compute nothing; copies of up to 1 MiB are
// made, so that token ids, losses and flags arrive.
#include "null.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace null {

std::recursive_mutex mutex;
long long counts[COUNTS];

double setting(const char *name, double otherwise) {
    const char *value = getenv(name);
    return value ? atof(value) : otherwise;
}

// --- the modelled machine: every figure an environment variable, read at its first use ---

static int devices() {
    static int n = setting("NULL_DEVICES", 1);
    return n;
}
static int capability() {
    static int n = setting("NULL_CC", 90);
    return n;
}
static double latency_s() {
    static double s = setting("NULL_LATENCY_S", 5e-6);
    return s;
}
static double call_s() {
    static double s = setting("NULL_CALL_S", 1e-6);
    return s;
}
static double link_bytes_per_s() {
    static double r = setting("NULL_LINK_BYTES_PER_S", 25e9);
    return r;
}
static double device_bytes_per_s() {
    static double r = setting("NULL_DEVICE_BYTES_PER_S", 2.68e12);
    return r;
}
static double flops_per_s() {
    static double r = setting("NULL_FLOPS_PER_S", 692e12);
    return r;
}

double pass_s(double bytes) { return bytes / device_bytes_per_s(); }
double product_s(double flops, double bytes) { return std::max(flops / flops_per_s(), pass_s(bytes)); }

// --- threads and streams ---

static thread_local int device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static thread_local std::string label;  // what memo says it is doing

cudaError_t failed(cudaError_t e) { return last_error = e; }

static Actor &main_thread() {
    static Actor actor("host");
    return actor;
}
static std::thread::id main_id = std::this_thread::get_id();  // of the thread that loads this library

Actor &host() {
    static Actor &main = main_thread();
    if (std::this_thread::get_id() == main_id) return main;
    static thread_local Actor *mine = nullptr;
    if (!mine) (mine = new Actor("another thread"))->now.join(main.now);
    return *mine;
}

void wait_for(const Moment &moment) { host().now.join(moment); }

struct Device {
    double busy_until[4] = {};  // of each Engine
    Stream *main = nullptr;
    std::vector<Stream *> streams;
};
static Device device_table[64];

int current_device() { return device; }

static Device &here() { return device_table[device]; }

static Stream *new_stream(const std::string &name) {
    Stream *s = new Stream(name, device);
    here().streams.push_back(s);
    return s;
}

Stream &stream_of(cudaStream_t s) {
    if ((uintptr_t)s > 2) return *(Stream *)s;  // 1 and 2 are cudaStreamLegacy and cudaStreamPerThread
    if (!here().main) here().main = new_stream("compute");
    return *here().main;
}

std::string described(const std::string &what) { return label.empty() ? what : label + " (" + what + ")"; }

void work(Stream &stream, Engine engine, double seconds, const std::vector<Range> &ranges,
          const std::string &what) {
    host().now.seconds += call_s();
    stream.now.join(host().now);
    stream.deed();
    // one copy of a direction at a time, whatever stream it is on; kernels of several streams are not slowed
    // by each other
    double &busy = device_table[stream.device].busy_until[engine];
    if (engine == TO_HOST || engine == TO_DEVICE) stream.now.seconds = std::max(stream.now.seconds, busy);
    stream.now.seconds += latency_s() + seconds;
    busy = stream.now.seconds;
    for (auto &r : ranges) touch(stream, r, described(what));
}

void synchronize_device() {
    for (Stream *s : here().streams) wait_for(s->now);
}

// --- copies ---

static cudaError_t copy(void *to, const void *from, size_t width, size_t to_pitch, size_t from_pitch,
                        size_t rows, Stream &stream, bool waits) {
    counts[COPIES]++;
    size_t to_bytes = (rows - 1) * to_pitch + width, from_bytes = (rows - 1) * from_pitch + width,
           bytes = width * rows;
    if (!bytes) return cudaSuccess;
    bool to_device = on_device(to), from_device = on_device(from), crosses = false, pageable = false;
    if (!to_device && !page_locked(to, to_bytes, &crosses)) pageable = true;
    if (crosses) return failed(cudaErrorInvalidValue);
    if (!from_device && !page_locked(from, from_bytes, &crosses)) pageable = true;
    if (crosses) return failed(cudaErrorInvalidValue);
    if (pageable && !waits) counts[PAGEABLE_COPIES]++;
    std::vector<Range> ranges;
    if (from_device || page_locked(from, from_bytes)) ranges.push_back({from, from_bytes, false});
    if (to_device || page_locked(to, to_bytes)) ranges.push_back({to, to_bytes, true});
    Engine engine = to_device == from_device ? COMPUTE : to_device ? TO_DEVICE : TO_HOST;
    work(stream, engine, engine == COMPUTE ? pass_s(2.0 * bytes) : bytes / link_bytes_per_s(), ranges,
         "copy");
    if (bytes <= 1 << 20)
        for (size_t i = 0; i < rows; i++)
            memmove((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
    if (waits) counts[SYNCS]++;
    if (waits || pageable) wait_for(stream.now);  // the driver stages pageable memory while the caller waits
    return cudaSuccess;
}

// --- launches ---

static thread_local Stream *launched_on = nullptr;  // by this thread since it last said what an operation was

static cudaError_t launch(dim3 grid, dim3 block, size_t shared, cudaStream_t s) {
    Lock lock(mutex);
    counts[LAUNCHES]++;
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535 ||
        !threads || threads > 1024 || block.z > 64 || shared > 232448) {
        counts[BAD_LAUNCHES]++;
        fprintf(stderr, "[null] bad launch: grid %u %u %u, block %u %u %u, %zu bytes of shared memory\n",
                grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
        return failed(cudaErrorInvalidConfiguration);
    }
    work(*(launched_on = &stream_of(s)), COMPUTE, 0, {}, "kernel");
    return cudaSuccess;
}

}  // namespace null

using namespace null;

extern "C" {

// --- what the tests ask and say ---

void null_counts(long long *out) { memcpy(out, counts, sizeof counts); }

// Seconds of virtual time of the calling thread.
double null_now() {
    Lock lock(mutex);
    return host().now.seconds;
}

// Threads that wait for each other outside of CUDA: what one did before null_leave(key) lies behind the other
// after its null_meet(key).
static std::map<long, Moment> &meetings = *new std::map<long, Moment>;
void null_leave(long key) {
    Lock lock(mutex);
    host().deed();
    meetings[key].join(host().now);
}
void null_meet(long key) {
    Lock lock(mutex);
    if (auto it = meetings.find(key); it != meetings.end()) wait_for(it->second);
}

// The name of what the calling thread is launching, for races.
void null_label(const char *text) { label = text; }

void null_name_stream(void *s, const char *name) {
    Lock lock(mutex);
    stream_of((cudaStream_t)s).name = name;
}

// What the kernels were that this thread launched since the last call: they took so many seconds beyond their
// launch, and touched these bytes. Where none was launched (a view, a copy, a product) nothing happens.
// Returns whether any was.
int null_did(const char *what, double seconds, int n, const void **starts, const size_t *bytes,
             const char *writes) {
    Lock lock(mutex);
    Stream *stream = launched_on;
    launched_on = nullptr;
    if (!stream) return 0;
    stream->now.seconds += seconds;
    for (int i = 0; i < n; i++)
        if (on_device(starts[i]) || page_locked(starts[i], bytes[i]))
            touch(*stream, {starts[i], bytes[i], !!writes[i]}, described(what));
    return 1;
}

// The calling thread itself touched these bytes; page-locked ones count, no stream can reach the others.
void null_host_did(const char *what, int n, const void **starts, const size_t *bytes, const char *writes) {
    Lock lock(mutex);
    host().deed();
    for (int i = 0; i < n; i++)
        if (page_locked(starts[i], bytes[i]))
            touch(host(), {starts[i], bytes[i], !!writes[i]}, described(what));
}

// --- devices ---

cudaError_t cudaGetDeviceCount(int *n) {
    *n = devices();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d) {
    *d = device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= devices()) return failed(cudaErrorInvalidDevice);
    device = d;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *v) {
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
    *v = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
    snprintf(s, n, "0000:%02x:00.0", d + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

// An H100's figures, whatever its name and capability: torch's kernels ask for these to choose their
// launches.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    const char *name = getenv("NULL_NAME");
    snprintf(p->name, sizeof p->name, "%s", name ? name : "NVIDIA H100 80GB HBM3");
    p->major = capability() / 10, p->minor = capability() % 10;
    p->totalGlobalMem = memory_bytes(), p->multiProcessorCount = 132, p->warpSize = 32;
    p->maxThreadsPerMultiProcessor = 2048, p->maxThreadsPerBlock = 1024, p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->l2CacheSize = 50 << 20, p->textureAlignment = 512, p->memoryBusWidth = 5120, p->pciBusID = d + 1;
    p->concurrentKernels = p->unifiedAddressing = p->memoryPoolsSupported = 1, p->asyncEngineCount = 3;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int d) {
    cudaDeviceProp p;
    cudaGetDeviceProperties(&p, d);
    switch (what) {
        case cudaDevAttrMultiProcessorCount:
            *value = p.multiProcessorCount;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = p.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = p.minor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = p.sharedMemPerBlock;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = p.sharedMemPerBlockOptin;
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = p.sharedMemPerMultiprocessor;
            break;
        case cudaDevAttrMaxThreadsPerBlock:
            *value = p.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = p.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrWarpSize:
            *value = p.warpSize;
            break;
        case cudaDevAttrMaxGridDimX:
            *value = p.maxGridSize[0];
            break;
        case cudaDevAttrMaxGridDimY:
            *value = p.maxGridSize[1];
            break;
        default:
            *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    Lock lock(mutex);
    counts[SYNCS]++;
    synchronize_device();
    return cudaSuccess;
}

// --- errors ---

cudaError_t cudaGetLastError() {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess                 ? "no error"
           : e == cudaErrorMemoryAllocation ? "out of memory"
           : e == cudaErrorInvalidValue     ? "invalid argument"
           : e == cudaErrorNotReady         ? "device not ready"
                                            : "an error of null CUDA";
}
const char *cudaGetErrorName(cudaError_t e) {
    return e == cudaSuccess                 ? "cudaSuccess"
           : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
                                            : "cudaError";
}

// --- copies ---

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t s) {
    Lock lock(mutex);
    return copy(to, from, bytes, 0, 0, 1, stream_of(s), false);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    Lock lock(mutex);
    return copy(to, from, bytes, 0, 0, 1, stream_of(nullptr), true);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t rows, cudaMemcpyKind, cudaStream_t s) {
    Lock lock(mutex);
    return rows ? copy(to, from, width, to_pitch, from_pitch, rows, stream_of(s), false) : cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t s) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s);
}
cudaError_t cudaMemsetAsync(void *p, int, size_t bytes, cudaStream_t s) {
    Lock lock(mutex);
    work(stream_of(s), COMPUTE, pass_s(bytes), {{p, bytes, true}}, "memset");
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

// a module's constants: nobody reads them
cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *) {
    static char there[1 << 16];
    *p = there;
    return cudaSuccess;
}

// --- streams ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int) {
    Lock lock(mutex);
    if (!(flags & cudaStreamNonBlocking)) {  // it would wait for the default stream, which is not modelled
        fprintf(stderr, "[null] a stream that is not cudaStreamNonBlocking is not modelled\n");
        return failed(cudaErrorNotSupported);
    }
    *s = (cudaStream_t)new_stream("stream " + std::to_string(here().streams.size()));
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;
}  // its number stays taken: what it did is still known
cudaError_t cudaStreamGetPriority(cudaStream_t, int *p) {
    *p = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    Lock lock(mutex);
    counts[SYNCS]++;
    wait_for(stream_of(s).now);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    Lock lock(mutex);
    host().now.seconds += call_s();  // whoever asks again and again gets there
    if (stream_of(s).now.seconds > host().now.seconds) return cudaErrorNotReady;
    wait_for(stream_of(s).now);
    return cudaSuccess;
}
// no graphs: nothing is ever being captured
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *c) {
    *c = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *c, unsigned long long *,
                                     cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                     size_t *) {
    *c = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void *data) {
    call(data);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int) {
    *p = nullptr;
    return cudaSuccess;
}

// --- events: a Moment each ---

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
    *e = (cudaEvent_t) new Moment;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    Lock lock(mutex);
    delete (Moment *)e;
    return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
    Lock lock(mutex);
    counts[EVENTS]++;
    host().now.seconds += call_s();
    Stream &stream = stream_of(s);
    stream.now.join(host().now);
    *(Moment *)e = stream.now;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    Lock lock(mutex);
    counts[WAITS]++;
    host().now.seconds += call_s();
    stream_of(s).now.join(host().now);
    stream_of(s).now.join(*(Moment *)e);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
    Lock lock(mutex);
    Actor &asks = host();
    asks.now.seconds += call_s();
    if (&asks != &main_thread())
        wait_for(*(Moment *)e);  // NCCL's watchdog asks now and then: time enough goes by
    if (((Moment *)e)->seconds > asks.now.seconds) return cudaErrorNotReady;
    wait_for(*(Moment *)e);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    Lock lock(mutex);
    counts[SYNCS]++;
    wait_for(*(Moment *)e);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    Lock lock(mutex);
    double from = ((Moment *)a)->seconds, to = ((Moment *)b)->seconds;
    if (std::max(from, to) > host().now.seconds) return failed(cudaErrorNotReady);
    *ms = (to - from) * 1e3;
    return cudaSuccess;
}

// --- kernels ---

cudaError_t cudaLaunchKernel(const void *, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t s) {
    return launch(grid, block, shared, s);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3 grid, dim3 block, void **, size_t shared, cudaStream_t s) {
    return launch(grid, block, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *, void **) {
    return launch(c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
    *k = (cudaKernel_t)f;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, const void *) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = capability();
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t,
                                                                   unsigned) {
    *n = 2;
    return cudaSuccess;
}

}  // extern "C"
