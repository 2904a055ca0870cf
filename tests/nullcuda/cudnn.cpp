// cuDNN's graph interface, as cudnn-frontend's code in torch's attention calls it: descriptors keep what is set,
// heuristics know one engine, a plan has a workspace, and executing it launches a kernel that touches the
// tensors of the variant pack. How long it takes, watch.py says. Attention that has no kernel is refused.
#include "null.h"

#include <cudnn.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <set>

using namespace null;

namespace {

// What a descriptor holds. The interface copies: a descriptor may be destroyed once it is part of another.
struct Content {
    cudnnBackendDescriptorType_t type;
    bool finalized = false;
    std::map<int, std::vector<char>> values;  // of an attribute, its elements side by side
    std::map<int, std::vector<std::shared_ptr<const Content>>> parts;

    template <class T>
    std::vector<T> all(int attribute) const {
        auto it = values.find(attribute);
        if (it == values.end()) return {};
        const T *first = (const T *)it->second.data();
        return std::vector<T>(first, first + it->second.size() / sizeof(T));
    }
    template <class T>
    T one(int attribute) const {
        auto found = all<T>(attribute);
        return found.empty() ? T{} : found[0];
    }
    template <class T>
    void put(int attribute, T value) {
        values[attribute].assign((char *)&value, (char *)(&value + 1));
    }
    const Content *part(int attribute) const {
        auto it = parts.find(attribute);
        return it == parts.end() || it->second.empty() ? nullptr : it->second[0].get();
    }
};
using Descriptor = std::shared_ptr<Content>;
Descriptor &at(cudnnBackendDescriptor_t d) { return *(Descriptor *)d; }

thread_local std::string last_error;
cudnnStatus_t refused(cudnnStatus_t status, const std::string &why) {
    fprintf(stderr, "[null] cuDNN: %s\n", why.c_str());
    last_error = why;
    return status;
}

// --- tensors ---

size_t itemsize(cudnnDataType_t t) {
    switch (t) {
        case CUDNN_DATA_DOUBLE:
        case CUDNN_DATA_INT64:
            return 8;
        case CUDNN_DATA_FLOAT:
        case CUDNN_DATA_INT32:
            return 4;
        case CUDNN_DATA_HALF:
        case CUDNN_DATA_BFLOAT16:
            return 2;
        default:
            return 1;
    }
}

struct Tensor {
    int64_t uid;
    cudnnDataType_t type;
    bool by_value, is_virtual;
    std::vector<int64_t> dims, strides;

    explicit Tensor(const Content &c)
        : uid(c.one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)),
          type(c.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)),
          by_value(c.one<bool>(CUDNN_ATTR_TENSOR_IS_BY_VALUE)),
          is_virtual(c.one<bool>(CUDNN_ATTR_TENSOR_IS_VIRTUAL)),
          dims(c.all<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS)),
          strides(c.all<int64_t>(CUDNN_ATTR_TENSOR_STRIDES)) {}

    bool given() const { return !by_value && !is_virtual; }  // by whoever executes, as memory of the device
    size_t bytes() const {  // from its first element to behind its last
        int64_t n = 1;
        for (size_t i = 0; i < dims.size(); i++) n += (dims[i] - 1) * strides[i];
        return n * itemsize(type);
    }
    // Why a kernel cannot load it tile by tile; nullptr where it can.
    const char *unfit() const {
        if (dims.size() != 4 || strides.size() != 4) return "a tensor of attention has not four dimensions";
        if (itemsize(type) != 2) return nullptr;  // one of rows: what a softmax keeps, sums
        int inner = strides[3] == 1 ? 3 : 2;  // keys and values may be given transposed
        if (strides[inner] != 1) return "the elements of a head lie apart";
        if (dims[inner] > 128 || dims[inner] % 8) return "a head is no multiple of 8 up to 128 wide";
        for (int i = 0; i < 4; i++)
            if (i != inner && dims[i] > 1 && strides[i] % 8) return "rows begin at no multiples of 16 bytes";
        return nullptr;
    }
};

// the attributes of operations that are results
const std::set<int> RESULTS = {
    CUDNN_ATTR_OPERATION_POINTWISE_YDESC, CUDNN_ATTR_OPERATION_POINTWISE_DXDESC,
    CUDNN_ATTR_OPERATION_MATMUL_CDESC, CUDNN_ATTR_OPERATION_REDUCTION_YDESC,
    CUDNN_ATTR_OPERATION_RESHAPE_YDESC, CUDNN_ATTR_OPERATION_RNG_YDESC,
    // older headers have no names for these: O and STATS of SDPA_FWD, STATS, MAX and SUM_EXP of SOFTMAX
    2803, 2804, 3102, 3103, 3104};

// Calls see(tensor, whether it is a result) for each tensor of a graph; a part of it may have parts.
void each_tensor(const Content &graph, const std::function<void(const Tensor &, bool)> &see) {
    for (auto &[attribute, parts] : graph.parts)
        for (auto &part : parts)
            if (part->type == CUDNN_BACKEND_TENSOR_DESCRIPTOR)
                see(Tensor(*part), RESULTS.contains(attribute));
            else
                each_tensor(*part, see);
}

// {uid: (tensor, whether it is written)} of those that whoever executes gives.
std::map<int64_t, std::pair<Tensor, bool>> given(const Content &graph) {
    std::map<int64_t, std::pair<Tensor, bool>> found;
    each_tensor(graph, [&](const Tensor &t, bool result) {
        if (t.given()) found.emplace(t.uid, std::pair(t, false)).first->second.second |= result;
    });
    return found;
}

// Bytes that a plan takes beyond what cudnn-frontend takes for its graph. Not published; as
// memo/kernels/backends.py assumes: where query heads share one of keys, its gradients for each query head in fp32.
// They are the graph's virtual results (B, H, keys, D) which a reduction sums.
int64_t workspace_bytes(const Content &graph) {
    static const double set = setting("NULL_CUDNN_WORKSPACE_BYTES", -1);
    if (set >= 0) return set;
    int64_t bytes = 0;
    for (auto &operation : graph.parts.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
        const Content *x = operation->part(CUDNN_ATTR_OPERATION_REDUCTION_XDESC);
        const Content *y = operation->part(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
        if (!x || !y || Tensor(*x).dims[1] == Tensor(*y).dims[1]) continue;  // not a sum over heads
        int64_t fp32 = 4;
        for (int64_t n : Tensor(*x).dims) fp32 *= n;
        bytes += fp32;
    }
    return bytes;
}

const Content *graph_of(const Content &plan) {
    auto part = plan.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    part = part ? part->part(CUDNN_ATTR_ENGINECFG_ENGINE) : nullptr;
    return part ? part->part(CUDNN_ATTR_ENGINE_OPERATION_GRAPH) : nullptr;
}

size_t element_bytes(cudnnBackendAttributeType_t t) {
    switch (t) {
        case CUDNN_TYPE_BOOLEAN:
        case CUDNN_TYPE_CHAR:
            return 1;
        case CUDNN_TYPE_HANDLE:
        case CUDNN_TYPE_INT64:
        case CUDNN_TYPE_DOUBLE:
        case CUDNN_TYPE_VOID_PTR:
        case CUDNN_TYPE_BACKEND_DESCRIPTOR:
        case CUDNN_TYPE_FRACTION:
            return 8;
        default:
            return 4;  // enumerations, float, int32
    }
}

// A finalized descriptor gives what follows from what was set.
cudnnStatus_t finalize(Content &c) {
    if (c.type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) {
        const char *why = nullptr;
        each_tensor(c, [&](const Tensor &t, bool) {
            if (t.given() && !why) why = t.unfit();
        });
        if (why) return refused(CUDNN_STATUS_NOT_SUPPORTED, why);
        c.put<int64_t>(CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, 1);
    }
    if (c.type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
        const Content *graph = c.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        if (!graph) return refused(CUDNN_STATUS_BAD_PARAM, "heuristics without an operation graph");
        Descriptor engine(new Content{CUDNN_BACKEND_ENGINE_DESCRIPTOR, true, {}, {}});
        engine->put<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, 0);
        engine->parts[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = c.parts[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH];
        Descriptor config(new Content{CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, true, {}, {}});
        config->parts[CUDNN_ATTR_ENGINECFG_ENGINE] = {engine};
        config->put<int32_t>(CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED, 0);
        config->put(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, workspace_bytes(*graph));
        c.parts[CUDNN_ATTR_ENGINEHEUR_RESULTS] = {config};
    }
    if (c.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
        const Content *graph = graph_of(c);
        if (!graph) return refused(CUDNN_STATUS_BAD_PARAM, "a plan without an operation graph");
        c.put<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, workspace_bytes(*graph));
        Lock lock(mutex);
        counts[PLANS]++;  // each compiles a kernel
    }
    c.finalized = true;
    return CUDNN_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
const char *cudnnGetErrorString(cudnnStatus_t s) {
    return s == CUDNN_STATUS_SUCCESS ? "CUDNN_STATUS_SUCCESS" : "an error of null cuDNN";
}
void cudnnGetLastErrorString(char *text, size_t bytes) { snprintf(text, bytes, "%s", last_error.c_str()); }
cudnnStatus_t cudnnCreate(cudnnHandle_t *h) {
    *h = (cudnnHandle_t) new cudaStream_t();  // its stream is all that a handle has
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t h) {
    delete (cudaStream_t *)h;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) {
    *(cudaStream_t *)h = s;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *s) {
    *s = *(cudaStream_t *)h;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *d) {
    *d = (cudnnBackendDescriptor_t) new Descriptor(new Content{type, false, {}, {}});
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
    delete (Descriptor *)d;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t attribute,
                                       cudnnBackendAttributeType_t type, int64_t n, const void *elements) {
    Content &c = *at(d);
    if (c.finalized) return refused(CUDNN_STATUS_BAD_PARAM, "an attribute of a finalized descriptor is set");
    if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        c.values[attribute].assign((const char *)elements, (const char *)elements + n * element_bytes(type));
        return CUDNN_STATUS_SUCCESS;
    }
    auto &parts = c.parts[attribute];
    parts.clear();
    for (int64_t i = 0; i < n; i++) {
        parts.push_back(at(((cudnnBackendDescriptor_t *)elements)[i]));
        if (!parts[i]->finalized) return refused(CUDNN_STATUS_BAD_PARAM, "a part is not finalized");
    }
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) { return finalize(*at(d)); }

// What is no longer than `room` elements is copied into `elements`, descriptors into those that lie there.
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t attribute,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t *n,
                                       void *elements) {
    Content &c = *at(d);
    if (!c.finalized) return refused(CUDNN_STATUS_BAD_PARAM, "a descriptor is asked before it is finalized");
    bool descriptors = type == CUDNN_TYPE_BACKEND_DESCRIPTOR;
    int64_t held = descriptors ? c.parts[attribute].size() : c.values[attribute].size() / element_bytes(type);
    if (n) *n = held;
    for (int64_t i = 0; descriptors && elements && i < std::min(room, held); i++)
        *at(((cudnnBackendDescriptor_t *)elements)[i]) = *c.parts[attribute][i];
    if (!descriptors && elements)
        memcpy(elements, c.values[attribute].data(), std::min(room, held) * element_bytes(type));
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t pack) {
    Lock lock(mutex);
    auto uids = at(pack)->all<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    auto pointers = at(pack)->all<void *>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    std::map<int64_t, void *> where;
    for (size_t i = 0; i < uids.size(); i++) where[uids[i]] = pointers[i];
    std::vector<Range> ranges;
    if (int64_t bytes = at(plan)->one<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE))
        ranges.push_back({at(pack)->one<void *>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE), size_t(bytes), true});
    for (auto &[uid, found] : given(*graph_of(*at(plan))))
        ranges.push_back({where[uid], found.first.bytes(), found.second});
    for (auto &r : ranges)
        if (!on_device(r.start) || !on_device((const char *)r.start + r.bytes - 1) || (uintptr_t)r.start % 16)
            return refused(CUDNN_STATUS_BAD_PARAM, "no memory of the device's, or no multiple of 16 bytes");
    cudaStream_t stream = *(cudaStream_t *)h;
    if (cudaLaunchKernel("", {1, 1, 1}, {128, 1, 1}, nullptr, 0, stream) != cudaSuccess)
        return refused(CUDNN_STATUS_EXECUTION_FAILED, "a launch failed");
    for (auto &r : ranges) touch(stream_of(stream), r, described("cuDNN"));
    return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
