// The driver's interface, libcuda.so.1: torch asks it whether there is a device and a context, and links to
// more names than it calls here. No headers: all but a few of these are only names.
#include <cstring>

extern "C" {

int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) { *flags = 0, *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int i) { *device = i; return 0; }

#define NAME(f) int f() { return 0; }
NAME(cuDevicePrimaryCtxRetain) NAME(cuCtxSetCurrent) NAME(cuDeviceGetAttribute) NAME(cuPointerGetAttribute)
NAME(cuGetErrorString) NAME(cuLaunchKernel) NAME(cuLaunchCooperativeKernel) NAME(cuModuleLoad)
NAME(cuModuleLoadData) NAME(cuModuleLoadDataEx) NAME(cuModuleUnload) NAME(cuModuleGetFunction)
NAME(cuLinkCreate_v2) NAME(cuLinkAddData_v2) NAME(cuLinkComplete) NAME(cuFuncGetAttribute)
NAME(cuFuncSetAttribute) NAME(cuFuncSetCacheConfig) NAME(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NAME(cuTensorMapEncodeTiled)

// torch gets most of the driver's functions by name
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned, unsigned long long, int *found) {
    *f = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)cuDevicePrimaryCtxGetState :
         !strcmp(name, "cuCtxGetCurrent") ? (void *)cuCtxGetCurrent : (void *)cuCtxSetCurrent;
    if (found) *found = 0;
    return 0;
}

}  // extern "C"
