"""The emulated driver: a libcuda.so.1 whose launches run on the emulator.

``install_driver`` must run before anything maps another libcuda. After it, cuda.bindings in this
process reaches the emulator: the wheel's own code runs unchanged, on host tensors, on a product
named ``KF Emulated <sm>``.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal

from kernel_factory.emulator.driver.service import Service, default_lookup
from kernel_factory.toolchain import SHARED_LIMIT

PRODUCT: Final = "KF Emulated {sm}"
DRIVER_VERSION: Final = 13030
CAPABILITY: Final = {
    "sm_80": (8, 0),
    "sm_89": (8, 9),
    "sm_90a": (9, 0),
    "sm_100a": (10, 0),
    "sm_103a": (10, 3),
    "sm_120a": (12, 0),
}
_SOURCE: Final = Path(__file__).with_name("libcuda.c")


class DriverInstallError(RuntimeError):
    """The emulated driver cannot take libcuda's place in this process."""


class InstalledDriver:
    """The driver of this process: its counters, its launch reports and its mode."""

    def __init__(self, library: ctypes.CDLL, service: Service, sm: str) -> None:
        self._library = library
        self.service = service
        self.sm = sm
        self.product = PRODUCT.format(sm=sm)

    @property
    def launches(self) -> int:
        """Launches accepted so far, stubbed ones included."""
        return ctypes.c_long.in_dll(self._library, "kf_launch_count").value

    @property
    def loads(self) -> int:
        """Libraries loaded so far."""
        return ctypes.c_long.in_dll(self._library, "kf_load_count").value

    @property
    def open_libraries(self) -> int:
        """Libraries loaded and not unloaded."""
        return self.loads - ctypes.c_long.in_dll(self._library, "kf_unload_count").value

    @property
    def capture_violations(self) -> int:
        """Loads and waits that were asked for, and refused, while a stream was capturing."""
        return ctypes.c_long.in_dll(self._library, "kf_capture_violations").value

    @contextmanager
    def capture(self) -> Iterator[Capture]:
        """Streams capture inside this context: launches are recorded, not run; loads and waits are refused."""
        recorded = Capture(self.service)
        flag = ctypes.c_int.in_dll(self._library, "kf_capturing")
        self.service.recording, flag.value = recorded.launches, 1
        try:
            yield recorded
        finally:
            self.service.recording, flag.value = None, 0

    @contextmanager
    def fault(self, call: str, result: int, skip: int = 0, times: int = 1) -> Iterator[None]:
        """Inside this context ``call`` returns ``result``, after ``skip`` more calls and ``times`` times."""
        if self._library.kf_arm(call.encode(), result, skip, times) != 0:
            raise ValueError("too many faults at once")
        try:
            yield
        finally:
            self._library.kf_disarm()

    def set_launches(self, mode: Literal["run", "stub"]) -> None:
        """``run`` executes every launch on the emulator; ``stub`` counts it and returns, in C."""
        ctypes.c_int.in_dll(self._library, "kf_stub").value = int(mode == "stub")


class Capture:
    """Launches that a capturing stream recorded, their parameters copied as the driver copies them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.launches: list[tuple[Any, Any]] = []

    def replay(self) -> None:
        """Run what was recorded, in order. Raises RuntimeError where a launch fails."""
        for kernel, request in self.launches:
            if self._service.execute(kernel, request) != 0:
                raise RuntimeError(f"replay of {kernel.name} failed")


_installed: InstalledDriver | None = None


def install_driver(
    sm: str = "sm_90a",
    launches: Literal["run", "stub"] = "run",
    lookup: Callable[[str], str | None] | None = None,
    driver_version: int = DRIVER_VERSION,
    devices: int = 1,
) -> InstalledDriver:
    """Put the emulated driver in place of libcuda for this process.

    ``lookup`` maps a cubin's sha256 to its PTX text, or None for a hash it does not know, which
    the driver reports as CUDA_ERROR_NO_BINARY_FOR_GPU; the default looks in the factory's store.
    ``driver_version`` is the CUDA version that the driver claims, 13030 for 13.3; ``devices`` how many
    devices it has, all of the same product.
    A second call with the same ``sm`` returns the driver that is there, in the new mode. Raises
    DriverInstallError if another libcuda is mapped, or this one is on another SM.
    """
    global _installed
    if sm not in CAPABILITY:
        raise DriverInstallError(f"sm: expected one of {', '.join(CAPABILITY)}; found {sm!r}")
    if _installed is None:
        _refuse_other_driver()
        _installed = _load(sm, lookup or default_lookup(), driver_version, devices)
        _verify(_installed.product)
        # kf_runtime asks the loader for a libcuda again only after an import.
        sys.modules.setdefault("kernel_factory.emulator.driver.mapped", ModuleType("mapped"))
    elif _installed.sm != sm:
        raise DriverInstallError(f"sm: this process already emulates {_installed.sm}; start another for {sm}")
    _installed.set_launches(launches)
    return _installed


def _refuse_other_driver() -> None:
    """The loader hands out the first libcuda.so.1 it mapped: a second one would never be reached."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line}
    if mapped:
        raise DriverInstallError(
            f"another libcuda is mapped already: {', '.join(sorted(mapped))}; expected none; "
            "call install_driver() before anything touches CUDA"
        )


def _load(sm: str, lookup: Callable[[str], str | None], driver_version: int, devices: int) -> InstalledDriver:
    folder = Path(tempfile.mkdtemp(prefix="kf-driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O2", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DriverInstallError(f"gcc could not build the emulated driver:\n{done.stderr}")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    major, minor = CAPABILITY[sm]
    (ctypes.c_char * 256).in_dll(library, "kf_product").value = PRODUCT.format(sm=sm).encode()
    numbers = {
        "kf_major": major,
        "kf_minor": minor,
        "kf_multiprocessors": 132,
        "kf_shared_limit": SHARED_LIMIT[sm],
        "kf_driver_version": driver_version,
        "kf_devices": devices,
    }
    for name, value in numbers.items():
        ctypes.c_int.in_dll(library, name).value = value
    service = Service(lookup)
    service.connect(library)
    return InstalledDriver(library, service, sm)


def _verify(product: str) -> None:
    """Ask through cuda.bindings who answers: a real GPU must never be handed a host pointer."""
    from cuda.bindings import driver

    (status,) = driver.cuInit(0)
    status, name = driver.cuDeviceGetName(256, 0) if status == 0 else (status, b"")
    found = name.split(b"\0")[0].decode()
    if found != product:
        raise DriverInstallError(f"expected the driver to answer as {product!r}; found {found!r} (status {status})")
