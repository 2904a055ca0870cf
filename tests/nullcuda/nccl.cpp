// NCCL with nobody at the other ends: what would come is whatever lies there. What is sent takes its time on
// its stream, and touches its bytes; a communicator takes device memory.
#include "null.h"

#include <nccl.h>

#include <algorithm>
#include <cstring>

using namespace null;

struct ncclComm {
    int ranks, rank;
};

static double network_bytes_per_s() {
    static double r = setting("NULL_NETWORK_BYTES_PER_S", 360e9);
    return r;
}
static size_t communicator_bytes() {
    static size_t n = setting("NULL_COMMUNICATOR_BYTES", 400e6);
    return n;
}

static size_t itemsize(ncclDataType_t t) {
    switch (t) {
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64:
            return 8;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32:
            return 4;
        case ncclFloat16:
        case ncclBfloat16:
            return 2;
        default:
            return 1;
    }
}

// Between ncclGroupStart and ncclGroupEnd messages gather, and go off together: what is sent travels while
// what is received does.
static thread_local int depth = 0;
static thread_local struct {
    double sent = 0, received = 0;
    std::vector<Range> ranges;
    cudaStream_t stream;
    const char *what;
} group;

static ncclResult_t go() {
    if (depth || group.ranges.empty()) return ncclSuccess;
    Stream &stream = stream_of(group.stream);
    if (stream.name.rfind("stream ", 0) == 0) stream.name = "nccl";  // one that memo has not named
    work(stream, NETWORK, std::max(group.sent, group.received) / network_bytes_per_s(), group.ranges,
         group.what);
    group.sent = group.received = 0;
    group.ranges.clear();
    return ncclSuccess;
}

// One message of a rank; `sent` and `received` bytes are what a ring would make it send and receive.
static ncclResult_t message(const char *what, const void *from, size_t from_bytes, void *to, size_t to_bytes,
                            double sent, double received, cudaStream_t stream) {
    Lock lock(mutex);
    counts[MESSAGES]++;
    if (from) group.ranges.push_back({from, from_bytes, false});
    if (to) group.ranges.push_back({to, to_bytes, true});
    group.sent += sent, group.received += received;
    group.stream = stream, group.what = what;
    return go();
}

static ncclResult_t open(ncclComm_t *c, int ranks, int rank) {
    Lock lock(mutex);
    if (!take_device_bytes(communicator_bytes())) return ncclUnhandledCudaError;  // as NCCL says it
    *c = new ncclComm{ranks, rank};
    return ncclSuccess;
}

static ncclResult_t close(ncclComm_t c) {
    Lock lock(mutex);
    give_device_bytes(communicator_bytes());
    delete c;
    return ncclSuccess;
}

extern "C" {

ncclResult_t ncclGetVersion(int *v) {
    *v = NCCL_VERSION_CODE;
    return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 7, sizeof *id);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId, int rank) { return open(c, n, rank); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId, int rank, ncclConfig_t *) {
    return open(c, n, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int rank, int, ncclUniqueId *, ncclConfig_t *) {
    return open(c, n, rank);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *e) {
    *e = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t c) { return close(c); }
ncclResult_t ncclCommAbort(ncclComm_t c) { return close(c); }
const char *ncclGetErrorString(ncclResult_t r) {
    return r == ncclUnhandledCudaError ? "unhandled cuda error" : "an error of null NCCL";
}
const char *ncclGetLastError(ncclComm_t) { return "null NCCL: no memory for a communicator"; }

ncclResult_t ncclGroupStart() {
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    Lock lock(mutex);
    depth--;
    return go();
}

ncclResult_t ncclAllGather(const void *x, void *out, size_t n, ncclDataType_t t, ncclComm_t c,
                           cudaStream_t s) {
    size_t bytes = n * itemsize(t), moved = bytes * (c->ranks - 1);
    return message("all-gather", x, bytes, out, bytes * c->ranks, moved, moved, s);
}
ncclResult_t ncclReduceScatter(const void *x, void *out, size_t n, ncclDataType_t t, ncclRedOp_t,
                               ncclComm_t c, cudaStream_t s) {
    size_t bytes = n * itemsize(t), moved = bytes * (c->ranks - 1);
    return message("reduce-scatter", x, bytes * c->ranks, out, bytes, moved, moved, s);
}
ncclResult_t ncclAllReduce(const void *x, void *out, size_t n, ncclDataType_t t, ncclRedOp_t, ncclComm_t c,
                           cudaStream_t s) {
    size_t bytes = n * itemsize(t), moved = 2 * bytes * (c->ranks - 1) / c->ranks;
    return message("all-reduce", x, bytes, out, bytes, moved, moved, s);
}
ncclResult_t ncclBroadcast(const void *x, void *out, size_t n, ncclDataType_t t, int root, ncclComm_t c,
                           cudaStream_t s) {
    size_t bytes = n * itemsize(t);
    return message("broadcast", root == c->rank ? x : nullptr, bytes, out, bytes, bytes, bytes, s);
}
ncclResult_t ncclReduce(const void *x, void *out, size_t n, ncclDataType_t t, ncclRedOp_t, int root,
                        ncclComm_t c, cudaStream_t s) {
    size_t bytes = n * itemsize(t);
    return message("reduce", x, bytes, root == c->rank ? out : nullptr, bytes, bytes, bytes, s);
}
ncclResult_t ncclSend(const void *x, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t s) {
    size_t bytes = n * itemsize(t);
    return message("send and receive", x, bytes, nullptr, 0, bytes, 0, s);
}
ncclResult_t ncclRecv(void *out, size_t n, ncclDataType_t t, int, ncclComm_t, cudaStream_t s) {
    size_t bytes = n * itemsize(t);
    return message("send and receive", nullptr, 0, out, bytes, 0, bytes, s);
}
ncclResult_t ncclAlltoAll(const void *x, void *out, size_t n, ncclDataType_t t, ncclComm_t c,
                          cudaStream_t s) {
    size_t bytes = n * itemsize(t), moved = bytes * (c->ranks - 1);
    return message("all-to-all", x, bytes * c->ranks, out, bytes * c->ranks, moved, moved, s);
}

}  // extern "C"
