"""What the emulated driver does in Python: find the PTX of a cubin, and run a launch."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
NO_BINARY_FOR_GPU: Final = 209
NOT_FOUND: Final = 500
ILLEGAL_ADDRESS: Final = 700
LAUNCH_FAILED: Final = 719


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


_CLUSTER_DIMENSION = 4  # CUlaunchAttributeID
_FATBIN: Final = 0xBA55ED50
_FATBIN_ELF: Final = 2  # the kind of an entry that holds a cubin


def cluster_of(config: _Config) -> tuple[int, int, int]:
    """The cluster attribute of a launch, (1, 1, 1) without one."""
    if config.attribute_count:
        for attribute in (_Attribute * config.attribute_count).from_address(config.attributes):
            if attribute.id == _CLUSTER_DIMENSION:
                x, y, z = attribute.value[:3]
                return x, y, z
    return 1, 1, 1


_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
_HAS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p)
)


def default_lookup() -> Callable[[str], str | None]:
    """PTX by cubin hash from the factory's store (``KF_STORE``, else ``.store`` of this checkout).

    Read from the store's files alone: the emulator imports no stage of the factory.
    """
    root = Path(os.environ.get("KF_STORE") or Path(__file__).resolve().parents[3] / ".store")

    def lookup(cubin: str) -> str | None:
        for kind in ("artifact", "jit"):
            for path in sorted((root / "records" / kind).glob("*.json")):
                body = json.loads(path.read_bytes())["body"]
                if body["cubin"] == cubin:
                    return (root / "blobs" / body["ptx"][:2] / body["ptx"]).read_text()
        return None

    return lookup


def elf_size(header: bytes, read: Callable[[int, int], bytes]) -> int:
    """Bytes of an ELF image that is known by its start alone: the end of its last table or section.

    ``cuLibraryLoadData`` takes a pointer without a length. ``read(offset, size)`` reads the image.
    """
    if header[:4] != b"\x7fELF":
        return 0
    phoff, shoff = struct.unpack_from("<QQ", header, 0x20)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", header, 0x36)
    end = max(phoff + phentsize * phnum, shoff + shentsize * shnum)
    for i in range(shnum):
        section = read(shoff + i * shentsize, shentsize)
        kind, offset, size = struct.unpack_from("<I", section, 4)[0], *struct.unpack_from("<QQ", section, 0x18)
        if kind != 8:  # SHT_NOBITS takes no bytes
            end = max(end, offset + size)
    return end


def cubin_of(read: Callable[[int, int], bytes]) -> bytes:
    """The cubin of an image that ``cuLibraryLoadData`` was given: an ELF, or a fatbin that holds one uncompressed.

    ``read(offset, size)`` reads the image. Empty where there is none. The layout of a fatbin, as the
    DSL writes it: a header (magic, version, its own size, bytes that follow), then entries of a
    header (kind, version, its own size, payload bytes) and a payload.
    """
    magic, _, at, length = struct.unpack("<IHHQ", read(0, 16))
    if magic != _FATBIN:
        size = elf_size(read(0, 64), read)
        return read(0, size) if size else b""
    end = at + length
    while at < end:
        kind, _, header, payload = struct.unpack("<HHIQ", read(at, 16))
        image = read(at + header, payload)
        if kind == _FATBIN_ELF and image[:4] == b"\x7fELF":
            return image
        at += header + payload
    return b""


class Service:
    """Modules by number, and the callbacks that libcuda.c calls. Launches are serialised."""

    def __init__(self, lookup: Callable[[str], str | None]) -> None:
        self._lookup = lookup
        self._modules: list[Any] = []
        self._lock = threading.Lock()
        self.findings: list[str] = []
        self.recording: list[tuple[Any, Any]] | None = None

    def connect(self, library: ctypes.CDLL) -> None:
        """Hand the callbacks to the C library; they are kept alive here."""
        self._callbacks = (_LOAD(self._load), _HAS(self._has), _LAUNCH(self._launch))
        for name, callback in zip(("kf_load", "kf_has", "kf_launch"), self._callbacks, strict=True):
            ctypes.c_void_p.in_dll(library, name).value = ctypes.cast(callback, ctypes.c_void_p).value

    def _load(self, code: int, out: Any) -> int:
        from kernel_factory import emulator

        image = cubin_of(lambda at, count: ctypes.string_at(code + at, count))
        text = self._lookup(hashlib.sha256(image).hexdigest()) if image else None
        if text is None:
            return NO_BINARY_FOR_GPU
        loaded = emulator.load(text)
        with self._lock:
            self._modules.append(loaded)
            out[0] = len(self._modules) - 1
        return SUCCESS

    def _has(self, module: int, name: bytes) -> int:
        return SUCCESS if name.decode() in self._modules[module].kernels else NOT_FOUND

    def _launch(self, module: int, name: bytes, config: Any, parameters: Any) -> int:
        try:
            with self._lock:
                return self._run(self._modules[module].kernels[name.decode()], config.contents, parameters)
        except Exception as error:  # the border to C: an exception cannot cross it
            self._report(f"{name.decode()}: {type(error).__name__}: {error}")
            return LAUNCH_FAILED

    def _run(self, kernel: Any, config: _Config, parameters: Any) -> int:
        from kernel_factory import emulator

        images = tuple(ctypes.string_at(parameters[i], p.size) for i, p in enumerate(kernel.params))
        request = emulator.LaunchConfig(
            grid=tuple(config.grid),
            block=tuple(config.block),
            dynamic_shared=config.shared_bytes,
            params=images,
            cluster=cluster_of(config),
        )
        if self.recording is not None:
            self.recording.append((kernel, request))
            return SUCCESS
        return self.execute(kernel, request)

    def execute(self, kernel: Any, request: Any) -> int:
        """Run one launch on the emulator."""
        from kernel_factory import emulator

        result = emulator.run(kernel, request, emulator.HostMemory(), mode="lockstep", counters=False)
        for finding in result.findings:
            self._report(str(finding))
        return LAUNCH_FAILED if result.findings else SUCCESS

    def _report(self, text: str) -> None:
        self.findings.append(text)
        print(f"KF emulated driver: {text}", file=sys.stderr)
