"""Driver: a thin layer over ``cuda.bindings.driver``, the only module that imports it.

Works with cuda-bindings 12.9.4, 13.0.3 and 13.4.4. A missing libcuda raises
DynamicLibNotFoundError or FunctionNotFoundError in 13.4 and RuntimeError before; all become
DriverUnavailable with the cause chained. Handles are those of cuda.bindings and opaque here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from kf_runtime.errors import DriverError, DriverUnavailable, KernelNotLoaded
from kf_runtime.plan import Launch
from kf_runtime.system import System

INVALID_CONTEXT: Final = 201
NAME_BYTES: Final = 256
LOADED: Final = 1
Handle = Any
Launcher = Callable[[Any, Handle, int, int], tuple[Any]]


@functools.cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``, imported at first use."""
    try:
        from cuda.bindings import driver
    except ImportError as cause:
        raise DriverUnavailable("import cuda.bindings.driver", cause) from cause
    return driver


def is_mapped() -> bool:
    """Whether some libcuda is already loaded in this process; loads nothing itself.

    A call on host tensors asks this before it looks for an emulated driver, so that it never
    initialises a real one. Asking the loader takes 50 us, so a "no" holds for as long as no module
    is imported; whoever puts an emulated driver in place adds one.
    """
    if _Mapping.found or _Mapping.modules == len(sys.modules):
        return _Mapping.found
    _Mapping.modules = len(sys.modules)
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):
        return False
    _Mapping.found = True  # a libcuda stays for as long as the process does
    return True


class _Mapping:
    """What ``is_mapped`` found, and with how many modules imported."""

    found = False
    modules = 0


def call(name: str, *arguments: Any) -> Any:
    """One driver call by name: its value, a tuple of them, or None. Raises DriverError or DriverUnavailable."""
    try:
        result, *values = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as cause:
        raise DriverUnavailable(name, cause) from cause
    check(name, result)
    return values[0] if len(values) == 1 else (tuple(values) or None)


def check(name: str, result: Any) -> None:
    """Raises DriverError unless ``result`` is CUDA_SUCCESS."""
    if int(result) != 0:
        raise DriverError(name, result=int(result), name=getattr(result, "name", str(result)), text=_describe(result))


def _describe(result: Any) -> str:
    try:
        status, text = bindings().cuGetErrorString(result)
    except RuntimeError:
        return "no description"
    return text.decode(errors="replace") if int(status) == 0 and text else "no description"


def initialise() -> None:
    """cuInit. Raises DriverUnavailable where no driver or no device answers."""
    try:
        call("cuInit", 0)
    except DriverError as cause:
        raise DriverUnavailable("cuInit", cause) from cause


def device_count() -> int:
    """Devices that this process sees."""
    return int(call("cuDeviceGetCount"))


def detect(ordinal: int = 0) -> System:
    """The System of one device. Raises DriverUnavailable or DriverError."""
    initialise()
    device = call("cuDeviceGet", ordinal)
    name: bytes = call("cuDeviceGetName", NAME_BYTES, device)
    attribute = bindings().CUdevice_attribute
    return System(
        product=name.split(b"\0")[0].decode(errors="replace").strip(),
        capability=(
            int(call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)),
            int(call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)),
        ),
        driver_version=int(call("cuDriverGetVersion")),
        ordinal=ordinal,
    )


def ensure_context(ordinal: int) -> None:
    """Make the device's primary context current on this thread where none is."""
    if int(call("cuCtxGetCurrent")) == 0:
        call("cuCtxSetCurrent", _primary_context(ordinal))


@contextmanager
def in_context(ordinal: int) -> Iterator[None]:
    """The device's primary context as the current one; whatever was current before is current again afterwards.

    Where nothing was current, the device's context stays: torch does the same.
    """
    if int(call("cuCtxGetCurrent")) == 0:
        ensure_context(ordinal)
        yield
        return
    call("cuCtxPushCurrent", _primary_context(ordinal))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def is_capturing(stream: int = 0) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    return int(call("cuStreamIsCapturing", bindings().CUstream(stream))) != 0


@functools.cache
def _primary_context(ordinal: int) -> Handle:
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


def load_library(image: bytes) -> Handle:
    """A CUlibrary from the bytes of a cubin. The caller has checked them."""
    return call("cuLibraryLoadData", image, [], [], 0, [], [], 0)


def get_kernel(library: Handle, symbol: str) -> Handle:
    """A CUkernel by its symbol."""
    return call("cuLibraryGetKernel", library, symbol.encode())


def prepare(kernel: Handle, attributes: tuple[tuple[int, int], ...], ordinal: int) -> Handle:
    """Set the kernel's attributes on one device and load it into the current context: a CUfunction.

    cuFuncLoad makes lazy loading happen now, never at a launch or while a graph is captured; cuFuncIsLoaded
    says whether it did. Raises KernelNotLoaded where it did not.
    """
    device = call("cuDeviceGet", ordinal)
    for attribute, value in attributes:
        call("cuKernelSetAttribute", bindings().CUfunction_attribute(attribute), value, kernel, device)
    function = call("cuKernelGetFunction", kernel)
    call("cuFuncLoad", function)
    state = int(call("cuFuncIsLoaded", function))
    if state != LOADED:
        raise KernelNotLoaded(state)
    return function


def launch_config(launch: Launch) -> Any:
    """The CUlaunchConfig of a Launch on stream 0; its stream is set per call."""
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
    config.sharedMemBytes = launch.shared_bytes
    config.hStream = driver.CUstream(0)
    config.numAttrs = 0
    if launch.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster = attribute.value.clusterDim
        cluster.x, cluster.y, cluster.z = launch.cluster
        attribute.value.clusterDim = cluster
        config.attrs, config.numAttrs = [attribute], 1
    return config


def set_stream(config: Any, stream: int) -> None:
    """Point a launch config at a stream, given as the handle's integer."""
    config.hStream = bindings().CUstream(stream)


def launcher() -> Launcher:
    """``cuLaunchKernelEx`` itself: (config, function, address of the pointer array, 0) to a 1-tuple of CUresult."""
    function: Launcher = bindings().cuLaunchKernelEx
    return function
