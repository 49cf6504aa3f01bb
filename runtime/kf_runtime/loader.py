"""Loader: from a cubin's sha256 to kernels ready for launch on one device.

The bytes that are hashed are the very bytes that the driver gets. Handles are cached per
device and cubin; a lock guards loading only, never a launch.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kf_runtime import driver
from kf_runtime.errors import CubinCorrupt, CubinMissing
from kf_runtime.plan import Launch, Plan

if TYPE_CHECKING:
    from kf_runtime.manifest import CubinRecord, Manifest


def read_cubin(folder: Path, record: CubinRecord) -> bytes:
    """The proved bytes of a cubin. Raises CubinMissing or CubinCorrupt; there is no switch to skip the check."""
    file = folder / record.file
    try:
        image = file.read_bytes()
    except OSError as cause:
        raise CubinMissing(file, record.sha256) from cause
    found = hashlib.sha256(image).hexdigest()
    if found != record.sha256:
        raise CubinCorrupt(file, expected=record.sha256, found=found)
    return image


class Loader:
    """Loads the cubins of one manifest folder onto one device, each at most once."""

    def __init__(self, manifest: Manifest, folder: Path, ordinal: int) -> None:
        self._manifest = manifest
        self._folder = folder
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._libraries: dict[str, Any] = {}
        self._functions: dict[tuple[str, str, tuple[tuple[int, int], ...]], Any] = {}

    def functions(self, plan: Plan) -> tuple[Any, ...]:
        """One CUfunction a launch of ``plan``, loaded into the device's context. Raises Unavailable."""
        with self._lock, driver.in_context(self._ordinal):
            return tuple(self._function(launch) for launch in plan.launches)

    def _function(self, launch: Launch) -> Any:
        key = (launch.cubin, launch.symbol, launch.function_attributes)
        if key not in self._functions:
            kernel = driver.get_kernel(self._library(launch.cubin), launch.symbol)
            self._functions[key] = driver.prepare(kernel, launch.function_attributes, self._ordinal)
        return self._functions[key]

    def _library(self, sha256: str) -> Any:
        if sha256 not in self._libraries:
            image = read_cubin(self._folder, self._manifest.cubins[sha256])
            self._libraries[sha256] = driver.load_library(image)
        return self._libraries[sha256]
