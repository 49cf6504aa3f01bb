// A small libcuda.so.1: the CUDA driver API as far as the wheel uses it, on top of the emulator.
//
// Bookkeeping (devices, contexts, handles, attributes) lives here. Loading a cubin and running a
// launch are handed to Python through two callbacks. cuGetProcAddress_v2 answers for every function
// in the table below and CUDA_ERROR_NOT_FOUND for the rest.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum {
    SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_FOUND = 500,
};
enum { MAX_DYNAMIC_SHARED = 8, DEFAULT_SHARED = 49152 };

typedef struct { int id; } library;  // id: what the load callback returned, the module's number
typedef struct { library *owner; char name[4096]; int max_dynamic, loaded; } kernel;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream, *attributes;
    unsigned attribute_count;
} launch_config;  // CUlaunchConfig

typedef CUresult (*load_callback)(const void *code, int *id);
typedef CUresult (*has_callback)(int id, const char *name);
typedef CUresult (*launch_callback)(int id, const char *name, const launch_config *config, void **parameters);

// Set by Python before first use.
char kf_product[256];
int kf_major, kf_minor, kf_multiprocessors, kf_shared_limit, kf_driver_version, kf_stub;
load_callback kf_load;
has_callback kf_has;
launch_callback kf_launch;
// Read by Python.
long kf_launch_count, kf_load_count;

static int initialised, context;
static __thread void *current;

CUresult cuInit(unsigned flags) { initialised = 1; return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = kf_driver_version; return SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return initialised ? SUCCESS : NOT_INITIALIZED; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID_DEVICE : SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, kf_product, length);
    return SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)16 << 30; return SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 75: *value = kf_major; break;
        case 76: *value = kf_minor; break;
        case 16: *value = kf_multiprocessors; break;
        case 97: *value = kf_shared_limit; break;
        case 8: *value = DEFAULT_SHARED; break;
        case 10: *value = 32; break;    // warp size
        case 1: *value = 1024; break;   // threads per block
        case 115: *value = 1; break;    // memory pools
        default: *value = 0;
    }
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return SUCCESS; }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return SUCCESS; }
CUresult cuCtxGetCurrent(void **out) { *out = current; return SUCCESS; }
CUresult cuCtxSetCurrent(void *handle) { current = handle; return SUCCESS; }
CUresult cuCtxPushCurrent_v2(void *handle) { current = handle; return SUCCESS; }
CUresult cuCtxPopCurrent_v2(void **out) { *out = current; current = NULL; return SUCCESS; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return current ? SUCCESS : INVALID_CONTEXT; }
CUresult cuCtxSynchronize(void) { return current ? SUCCESS : INVALID_CONTEXT; }
CUresult cuStreamSynchronize(void *stream) { return SUCCESS; }
CUresult cuStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }

CUresult cuLibraryLoadData(void **out, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    int id = -1;
    CUresult result = kf_load(code, &id);
    if (result != SUCCESS) return result;
    library *made = calloc(1, sizeof *made);
    made->id = id;
    kf_load_count++;
    *out = made;
    return SUCCESS;
}
CUresult cuLibraryUnload(void *handle) { return handle ? SUCCESS : INVALID_HANDLE; }
CUresult cuLibraryGetKernel(void **out, void *handle, const char *name) {
    CUresult result = kf_has(((library *)handle)->id, name);
    if (result != SUCCESS) return result;
    kernel *made = calloc(1, sizeof *made);
    made->owner = handle;
    made->max_dynamic = DEFAULT_SHARED;
    strncpy(made->name, name, sizeof made->name - 1);
    *out = made;
    return SUCCESS;
}
CUresult cuKernelGetFunction(void **out, void *handle) { *out = handle; return handle ? SUCCESS : INVALID_HANDLE; }
static CUresult set_attribute(int attribute, int value, kernel *handle) {
    if (attribute != MAX_DYNAMIC_SHARED) return SUCCESS;
    if (value < 0 || value > kf_shared_limit) return INVALID_VALUE;
    handle->max_dynamic = value;
    return SUCCESS;
}
CUresult cuKernelSetAttribute(int attribute, int value, void *handle, int device) { return set_attribute(attribute, value, handle); }
CUresult cuFuncSetAttribute(void *handle, int attribute, int value) { return set_attribute(attribute, value, handle); }
CUresult cuKernelGetAttribute(int *value, int attribute, void *handle, int device) {
    *value = attribute == MAX_DYNAMIC_SHARED ? ((kernel *)handle)->max_dynamic : 0;
    return SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, int attribute, void *handle) { return cuKernelGetAttribute(value, attribute, handle, 0); }
CUresult cuFuncLoad(void *handle) { ((kernel *)handle)->loaded = 1; return SUCCESS; }
CUresult cuFuncIsLoaded(int *state, void *handle) { *state = ((kernel *)handle)->loaded; return SUCCESS; }
CUresult cuLaunchKernelEx(const launch_config *config, void *handle, void **parameters, void **extra) {
    kernel *target = handle;
    if (!current) return INVALID_CONTEXT;
    if (extra || !target || (int)config->shared_bytes > target->max_dynamic) return INVALID_VALUE;
    for (int i = 0; i < 3; i++)
        if (!config->grid[i] || !config->block[i]) return INVALID_VALUE;
    target->loaded = 1;
    __atomic_add_fetch(&kf_launch_count, 1, __ATOMIC_RELAXED);
    return kf_stub ? SUCCESS : kf_launch(target->owner->id, target->name, config, parameters);
}

static const struct { CUresult code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};
static CUresult describe(CUresult code, const char **text, int want_name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *text = want_name ? errors[i].name : errors[i].text;
            return SUCCESS;
        }
    *text = NULL;
    return INVALID_VALUE;
}
CUresult cuGetErrorName(CUresult code, const char **text) { return describe(code, text, 1); }
CUresult cuGetErrorString(CUresult code, const char **text) { return describe(code, text, 0); }

CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status);
#define ENTRY(name) {#name, (void *)name}
#define VERSIONED(name) {#name, (void *)name##_v2}
static const struct { const char *name; void *function; } table[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceGetAttribute), VERSIONED(cuDeviceTotalMem), ENTRY(cuDevicePrimaryCtxRetain),
    VERSIONED(cuDevicePrimaryCtxRelease), ENTRY(cuDevicePrimaryCtxGetState), ENTRY(cuCtxGetCurrent),
    ENTRY(cuCtxSetCurrent), VERSIONED(cuCtxPushCurrent), VERSIONED(cuCtxPopCurrent), ENTRY(cuCtxGetDevice),
    ENTRY(cuCtxSynchronize), ENTRY(cuStreamSynchronize), ENTRY(cuStreamIsCapturing), ENTRY(cuLibraryLoadData),
    ENTRY(cuLibraryUnload), ENTRY(cuLibraryGetKernel), ENTRY(cuKernelGetFunction), ENTRY(cuKernelSetAttribute),
    ENTRY(cuKernelGetAttribute), ENTRY(cuFuncSetAttribute), ENTRY(cuFuncGetAttribute), ENTRY(cuFuncLoad),
    ENTRY(cuFuncIsLoaded), ENTRY(cuLaunchKernelEx), ENTRY(cuGetErrorName), ENTRY(cuGetErrorString),
    {"cuGetProcAddress", (void *)cuGetProcAddress_v2}, {"cuGetProcAddress_v2", (void *)cuGetProcAddress_v2},
};
CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status) {
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, symbol)) {
            *out = table[i].function;
            if (status) *status = 0;
            return SUCCESS;
        }
    *out = NULL;
    if (status) *status = 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    return NOT_FOUND;
}
