"""A PTX emulator that validates our kernels on a CPU: numerics, races, bounds, and counts of what a GPU would do.

It validates the kernels written here; it is no product target. NumPy and the standard library only.
``install_driver`` (the emulated libcuda) is loaded on first use.
"""

from typing import Any

from .counters import Counters
from .errors import Finding, LaunchError, PtxError
from .launch import LaunchConfig, Result, run
from .memory import HostMemory, Memory
from .module import Kernel, Module, load
from .ptx import Param

__all__ = [
    "Counters",
    "Finding",
    "HostMemory",
    "Kernel",
    "LaunchConfig",
    "LaunchError",
    "Memory",
    "Module",
    "Param",
    "PtxError",
    "Result",
    "install_driver",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "install_driver":
        from .driver import install_driver

        return install_driver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
