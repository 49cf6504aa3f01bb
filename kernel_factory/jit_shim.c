// Stand-ins for the runtime entry points that the DSL's host code imports, on top of the driver that
// is mapped in the process: the emulated one (kernel_factory/emulator/driver).
//
// Linked into a JIT form on a machine without a GPU, so that its host code runs as it is and its
// launches reach the emulator. On a GPU the form is linked with the DSL's own runtime instead.
// Signatures are those of the CUDA runtime, and of the calls in the objects that the DSL emits.
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>

// The driver's side. Handles of the runtime API are those of the driver; error numbers are shared.
int cuCtxGetCurrent(void **context);
int cuCtxSetCurrent(void *context);
int cuCtxGetDevice(int *device);
int cuDeviceGetAttribute(int *value, int attribute, int device);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device);
int cuKernelGetFunction(void **function, void *kernel);
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device);
int cuGetErrorName(int result, const char **name);
int cuLaunchKernelEx(const void *config, void *function, void **parameters, void **extra);
int cuLibraryGetKernel(void **kernel, void *library, const char *name);
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f);

// As the runtime does: a thread without a context gets the primary one of device 0.
static int context(void) {
    void *now;
    int result = cuCtxGetCurrent(&now);
    if (result || now) return result;
    result = cuDevicePrimaryCtxRetain(&now, 0);
    return result ? result : cuCtxSetCurrent(now);
}

int _cudaGetDevice(int *device) {
    int result = context();
    return result ? result : cuCtxGetDevice(device);
}
int _cudaSetDevice(int device) {
    void *wanted;
    int result = cuDevicePrimaryCtxRetain(&wanted, device);
    return result ? result : cuCtxSetCurrent(wanted);
}
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    return cuDeviceGetAttribute(value, attribute, device);
}
int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    int result = context();
    return result ? result : cuLibraryLoadData(library, code, a, b, c, d, e, f);
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
    return cuLibraryGetKernel(kernel, library, name);
}
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    return cuKernelGetAttribute(value, attribute, kernel, device);
}
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
    return cuKernelSetAttribute(attribute, value, kernel, device);
}
int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
    int device, result = _cudaGetDevice(&device);
    return result ? result : cuKernelSetAttribute(attribute, value, kernel, device);
}
// cudaLaunchConfig_t holds the shared bytes in 64 bits and CUlaunchConfig in 32; below 4 GB they read alike.
int _cudaLaunchKernelEx(const void *config, void *kernel, void **parameters) {
    void *function;
    int result = context();
    if (!result) result = cuKernelGetFunction(&function, kernel);
    return result ? result : cuLaunchKernelEx(config, function, parameters, NULL);
}

// Errors become tvm-ffi's: the caller passes the function that raises, of a kind and a message or its parts.
static const char *describe(int result, char *text, size_t size) {
    const char *name = "unknown";
    cuGetErrorName(result, &name);
    snprintf(text, size, "%s (%d)", name ? name : "unknown", result);
    return text;
}
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int result) {
    char text[256];
    const char *parts[] = {"launch: ", describe(result, text, sizeof text)};
    raise("RuntimeError", parts, 2);
}

// The first call loads the kernels, for device 0, which every host tensor claims. A load that failed is
// tried again by the next call. The process's end unloads nothing: the driver is the emulator's.
int cuda_dialect_init_library_once(
    void **library, int (*init)(void **), int (*load_to_device)(void **, int), void (*raise)(const char *, const char *)
) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    void *loaded = NULL;
    int result = 0;
    pthread_mutex_lock(&lock);
    if (!*library) {
        result = init(&loaded);
        if (!result) result = load_to_device(&loaded, 0);
        if (!result) *library = loaded;
    }
    pthread_mutex_unlock(&lock);
    if (result) {
        char text[256];
        raise("RuntimeError", describe(result, text, sizeof text));
    }
    return result ? -1 : 0;
}
void cuda_dialect_unload_library_once(void **library) {}
