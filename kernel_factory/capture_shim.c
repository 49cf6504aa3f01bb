// Stand-ins for the CUDA entry points that the DSL's host code imports. They record one launch.
//
// The host object of an artifact is linked with this file into one shared library. Nothing here
// computes a grid or a parameter: it writes down what the generated code asks for.
#include <stdint.h>
#include <string.h>

enum { MAX_PARAMETERS = 128, MAX_IMAGE = 16384, MAX_ATTRIBUTES = 16 };

typedef struct {
    uint32_t grid[3], block[3];
    uint64_t shared_bytes;
    void *stream, *attributes;
    uint32_t attribute_count;
} launch_config;  // cudaLaunchConfig_t

typedef struct {
    int32_t id;
    char pad[4];
    unsigned char value[64];
} launch_attribute;  // cudaLaunchAttribute

// Filled by the caller before a capture.
int kf_parameter_count, kf_parameter_size[MAX_PARAMETERS], kf_shared_limit;

// Filled by the launch.
int kf_launches, kf_function_attribute_count, kf_function_attribute[MAX_ATTRIBUTES][2];
launch_config kf_config;
launch_attribute kf_attribute[MAX_ATTRIBUTES];
unsigned char kf_image[MAX_IMAGE];

static char library, kernel;

int _cudaLibraryLoadData(void **out, const void *code, void *a, void *b, int c, void *d, void *e, int f) {
    *out = &library;
    return 0;
}
int _cudaLibraryUnload(void *handle) { return 0; }
int _cudaLibraryGetKernel(void **out, void *handle, const char *name) {
    *out = &kernel;
    return 0;
}
int _cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}
int _cudaSetDevice(int device) { return 0; }
int _cudaGetDeviceCount(int *count) {
    *count = 1;
    return 0;
}
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 97 ? kf_shared_limit : 0;  // 97: largest dynamic shared memory of a block
    return 0;
}
int _cuKernelGetAttribute(int *value, int attribute, void *handle, int device) {
    *value = 0;
    return 0;
}
static int set_attribute(int attribute, int value) {
    if (kf_function_attribute_count == MAX_ATTRIBUTES) return 1;
    kf_function_attribute[kf_function_attribute_count][0] = attribute;
    kf_function_attribute[kf_function_attribute_count++][1] = value;
    return 0;
}
int _cudaFuncSetAttribute(void *handle, int attribute, int value) { return set_attribute(attribute, value); }
int _cudaKernelSetAttributeForDevice(void *handle, int attribute, int value, int device) {
    return set_attribute(attribute, value);
}
int _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *handle, int threads, size_t shared) {
    *blocks = 1;
    return 0;
}
int _cudaLaunchKernelEx(launch_config *config, void *handle, void **parameters) {
    if (config->attribute_count > MAX_ATTRIBUTES) return 1;
    kf_launches++;
    kf_config = *config;
    memcpy(kf_attribute, config->attributes, config->attribute_count * sizeof(launch_attribute));
    unsigned char *at = kf_image;
    for (int i = 0; i < kf_parameter_count; i++) {
        if (at + kf_parameter_size[i] > kf_image + MAX_IMAGE) return 1;
        memcpy(at, parameters[i], kf_parameter_size[i]);
        at += kf_parameter_size[i];
    }
    return 0;
}

// Fill the stack below the host function with a pattern: bytes of an image that follow the pattern
// were never written by the host code, so they are padding.
static __attribute__((noinline)) void fill_stack(int byte) {
    volatile unsigned char area[65536];
    for (int i = 0; i < 65536; i++) area[i] = (unsigned char)byte;
}
__attribute__((noinline)) void kf_call(void (*function)(void **, int), void **arguments, int count, int byte) {
    fill_stack(byte);
    function(arguments, count);
}
