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
    INVALID_HANDLE = 400, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900,
};
enum { MAX_DEVICES = 8, MAX_FAULTS = 16, MAX_STACK = 16 };
enum { MAX_DYNAMIC_SHARED = 8, DEFAULT_SHARED = 49152 };

typedef struct { int id; } library;  // id: what the load callback returned, the module's number
struct kernel;
typedef struct { struct kernel *of; int device, loaded; } function;  // a kernel in one context
typedef struct kernel {
    library *owner;
    char name[4096];
    int max_dynamic[MAX_DEVICES];
    function in[MAX_DEVICES];
} kernel;
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
int kf_major, kf_minor, kf_multiprocessors, kf_shared_limit, kf_driver_version, kf_stub, kf_devices = 1;
int kf_capturing;  // 1 while a stream captures: loads and waits are refused then
load_callback kf_load;
has_callback kf_has;
launch_callback kf_launch;
// Read by Python.
long kf_launch_count, kf_load_count, kf_unload_count, kf_capture_violations;

static int initialised;
static char contexts[MAX_DEVICES];
static __thread void *stack[MAX_STACK];
static __thread int top;
#define current stack[top]

// Faults: the armed calls return a result of the test's choice instead of doing anything.
static struct { const char *name; CUresult result; int skip, times; } faults[MAX_FAULTS];
static int fault_count;
static char fault_lock;
int kf_arm(const char *name, CUresult result, int skip, int times) {
    if (fault_count == MAX_FAULTS) return 1;
    faults[fault_count].name = strdup(name);
    faults[fault_count].result = result;
    faults[fault_count].skip = skip;
    faults[fault_count].times = times;
    __atomic_add_fetch(&fault_count, 1, __ATOMIC_SEQ_CST);
    return 0;
}
void kf_disarm(void) { __atomic_store_n(&fault_count, 0, __ATOMIC_SEQ_CST); }
static CUresult take(const char *name) {
    CUresult result = SUCCESS;
    while (__atomic_test_and_set(&fault_lock, __ATOMIC_ACQUIRE)) {}
    for (int i = 0; i < fault_count && !result; i++)
        if (!strcmp(faults[i].name, name)) {
            if (faults[i].skip > 0) faults[i].skip--;
            else if (faults[i].times > 0) { faults[i].times--; result = faults[i].result; }
        }
    __atomic_clear(&fault_lock, __ATOMIC_RELEASE);
    return result;
}
// Every entry starts with this one.
#define ENTER(name) do { if (fault_count) { CUresult fault = take(#name); if (fault) return fault; } } while (0)
// So does everything that a capturing stream must not see.
#define NOT_WHILE_CAPTURING() do { if (kf_capturing) { __atomic_add_fetch(&kf_capture_violations, 1, __ATOMIC_RELAXED); return CAPTURE_UNSUPPORTED; } } while (0)
static int device_of(void *context) { return (int)((char *)context - contexts); }

CUresult cuInit(unsigned flags) { ENTER(cuInit); initialised = 1; return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { ENTER(cuDriverGetVersion); *version = kf_driver_version; return SUCCESS; }
CUresult cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    *count = kf_devices;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}
CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER(cuDeviceGet);
    *device = ordinal;
    return ordinal >= 0 && ordinal < kf_devices ? SUCCESS : INVALID_DEVICE;
}
CUresult cuDeviceGetName(char *name, int length, int device) {
    ENTER(cuDeviceGetName);
    strncpy(name, kf_product, length);
    return SUCCESS;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER(cuDeviceTotalMem);
    *bytes = (size_t)16 << 30;
    return SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(cuDeviceGetAttribute);
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
CUresult cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER(cuDevicePrimaryCtxRetain);
    if (device < 0 || device >= kf_devices) return INVALID_DEVICE;
    *out = &contexts[device];
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease_v2(int device) { ENTER(cuDevicePrimaryCtxRelease); return SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER(cuDevicePrimaryCtxGetState);
    *flags = 0;
    *active = 1;
    return SUCCESS;
}
CUresult cuCtxGetCurrent(void **out) { ENTER(cuCtxGetCurrent); *out = current; return SUCCESS; }
CUresult cuCtxSetCurrent(void *handle) { ENTER(cuCtxSetCurrent); current = handle; return SUCCESS; }
CUresult cuCtxPushCurrent_v2(void *handle) {
    ENTER(cuCtxPushCurrent);
    if (top == MAX_STACK - 1) return INVALID_CONTEXT;
    stack[++top] = handle;
    return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(void **out) {
    ENTER(cuCtxPopCurrent);
    *out = current;
    current = NULL;
    if (top) top--;
    return SUCCESS;
}
CUresult cuCtxGetDevice(int *device) {
    ENTER(cuCtxGetDevice);
    if (!current) return INVALID_CONTEXT;
    *device = device_of(current);
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) {
    ENTER(cuCtxSynchronize);
    NOT_WHILE_CAPTURING();
    return current ? SUCCESS : INVALID_CONTEXT;
}
CUresult cuStreamSynchronize(void *stream) { ENTER(cuStreamSynchronize); NOT_WHILE_CAPTURING(); return SUCCESS; }
CUresult cuStreamIsCapturing(void *stream, int *status) {
    ENTER(cuStreamIsCapturing);
    *status = kf_capturing;
    return SUCCESS;
}

CUresult cuLibraryLoadData(void **out, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    ENTER(cuLibraryLoadData);
    NOT_WHILE_CAPTURING();
    int id = -1;
    CUresult result = kf_load(code, &id);
    if (result != SUCCESS) return result;
    library *made = calloc(1, sizeof *made);
    made->id = id;
    __atomic_add_fetch(&kf_load_count, 1, __ATOMIC_RELAXED);
    *out = made;
    return SUCCESS;
}
CUresult cuLibraryUnload(void *handle) {
    ENTER(cuLibraryUnload);
    NOT_WHILE_CAPTURING();
    if (!handle) return INVALID_HANDLE;
    __atomic_add_fetch(&kf_unload_count, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}
CUresult cuLibraryGetKernel(void **out, void *handle, const char *name) {
    ENTER(cuLibraryGetKernel);
    CUresult result = kf_has(((library *)handle)->id, name);
    if (result != SUCCESS) return result;
    kernel *made = calloc(1, sizeof *made);
    made->owner = handle;
    for (int i = 0; i < MAX_DEVICES; i++) {
        made->max_dynamic[i] = DEFAULT_SHARED;
        made->in[i].of = made;
        made->in[i].device = i;
    }
    strncpy(made->name, name, sizeof made->name - 1);
    *out = made;
    return SUCCESS;
}
CUresult cuKernelGetFunction(void **out, void *handle) {
    ENTER(cuKernelGetFunction);
    if (!handle) return INVALID_HANDLE;
    if (!current) return INVALID_CONTEXT;
    *out = &((kernel *)handle)->in[device_of(current)];
    return SUCCESS;
}
static CUresult set_attribute(int attribute, int value, kernel *handle, int device) {
    if (attribute != MAX_DYNAMIC_SHARED) return SUCCESS;
    if (value < 0 || value > kf_shared_limit || device < 0 || device >= kf_devices) return INVALID_VALUE;
    handle->max_dynamic[device] = value;
    return SUCCESS;
}
CUresult cuKernelSetAttribute(int attribute, int value, void *handle, int device) {
    ENTER(cuKernelSetAttribute);
    return set_attribute(attribute, value, handle, device);
}
CUresult cuFuncSetAttribute(void *handle, int attribute, int value) {
    ENTER(cuFuncSetAttribute);
    return set_attribute(attribute, value, ((function *)handle)->of, ((function *)handle)->device);
}
static int get_attribute(int attribute, kernel *handle, int device) {
    return attribute == MAX_DYNAMIC_SHARED ? handle->max_dynamic[device] : 0;
}
CUresult cuKernelGetAttribute(int *value, int attribute, void *handle, int device) {
    ENTER(cuKernelGetAttribute);
    *value = get_attribute(attribute, handle, device);
    return SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, int attribute, void *handle) {
    ENTER(cuFuncGetAttribute);
    *value = get_attribute(attribute, ((function *)handle)->of, ((function *)handle)->device);
    return SUCCESS;
}
CUresult cuFuncLoad(void *handle) {
    ENTER(cuFuncLoad);
    if (((function *)handle)->loaded) return SUCCESS;
    NOT_WHILE_CAPTURING();
    ((function *)handle)->loaded = 1;
    return SUCCESS;
}
CUresult cuFuncIsLoaded(int *state, void *handle) {
    ENTER(cuFuncIsLoaded);
    *state = ((function *)handle)->loaded;
    return SUCCESS;
}
CUresult cuLaunchKernelEx(const launch_config *config, void *handle, void **parameters, void **extra) {
    ENTER(cuLaunchKernelEx);
    function *target = handle;
    if (!current) return INVALID_CONTEXT;
    if (!target || target->device != device_of(current)) return INVALID_HANDLE;
    if (extra || (int)config->shared_bytes > target->of->max_dynamic[target->device]) return INVALID_VALUE;
    for (int i = 0; i < 3; i++)
        if (!config->grid[i] || !config->block[i]) return INVALID_VALUE;
    if (!target->loaded) NOT_WHILE_CAPTURING();  // a first launch loads the function
    target->loaded = 1;
    __atomic_add_fetch(&kf_launch_count, 1, __ATOMIC_RELAXED);
    return kf_stub ? SUCCESS : kf_launch(target->of->owner->id, target->of->name, config, parameters);
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
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
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
