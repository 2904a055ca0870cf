// The driver's interface, libcuda.so.1: torch asks it whether there is a device and a context, Triton loads and launches
// its kernels by it, and both link to more names than they call here. All but a few of these are only names.
#include <cuda_runtime_api.h>

#include <dlfcn.h>

extern "C" {

int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }

int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
// the numbers of attributes are the runtime's
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}
// threads a block, static shared bytes, constant bytes, bytes spilled, registers
int cuFuncGetAttribute(int *value, int attribute, void *) {
    const int all[] = {1024, 0, 0, 0, 64};
    *value = attribute < 5 ? all[attribute] : 0;
    return 0;
}
int cuPointerGetAttribute(void **value, int, void *pointer) { *value = pointer; return 0; }  // the device's address
struct Launch {
    unsigned grid[3], block[3], shared;
    cudaStream_t stream;
};
int cuLaunchKernelEx(const Launch *l, void *, void **, void **) {
    return cudaLaunchKernel("", {l->grid[0], l->grid[1], l->grid[2]}, {l->block[0], l->block[1], l->block[2]}, nullptr,
                            l->shared, l->stream);
}

int cuLaunchKernel(void *, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   cudaStream_t stream, void **, void **) {
    return cudaLaunchKernel("", {gx, gy, gz}, {bx, by, bz}, nullptr, shared, stream);
}
int cuLaunchCooperativeKernel(void *, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, cudaStream_t stream, void **) {
    return cudaLaunchKernel("", {gx, gy, gz}, {bx, by, bz}, nullptr, shared, stream);
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *, int, size_t) { return *n = 2, 0; }

#define NAME(f) int f() { return 0; }
NAME(cuDevicePrimaryCtxRetain) NAME(cuCtxSetCurrent) NAME(cuCtxGetLimit) NAME(cuCtxSetLimit)
NAME(cuGetErrorString) NAME(cuModuleLoad)
NAME(cuModuleLoadData) NAME(cuModuleLoadDataEx) NAME(cuModuleUnload) NAME(cuModuleGetFunction)
NAME(cuLinkCreate_v2) NAME(cuLinkAddData_v2) NAME(cuLinkComplete)
NAME(cuFuncSetAttribute) NAME(cuFuncSetCacheConfig)
NAME(cuTensorMapEncodeTiled)

// torch and transformer-engine get most of the driver's functions by name; torch calls hardly any that are not here
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    *f = dlsym(RTLD_DEFAULT, name);
    if (!*f) *f = (void *)cuCtxSetCurrent;
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

}  // extern "C"
