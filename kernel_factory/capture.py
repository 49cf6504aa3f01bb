"""Capture: run the DSL's own launch code on the CPU and write down the launch.

Grid arithmetic, shared-memory attributes and parameter structs live in host code that the DSL
generates; nobody writes them a second time. Per launch: two address sets give the slots, two
stack fills give the padding, and a third address set must be predicted byte for byte.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kf_runtime.plan import Launch, Slot

from kernel_factory.elf import KernelInfo
from kernel_factory.family import Step
from kernel_factory.toolchain import SHARED_LIMIT

CLUSTER_DIMENSION: Final = 4  # CUlaunchAttributeID
MAX_DYNAMIC_SHARED: Final = 8  # CUfunction_attribute
PORTABLE_CLUSTER: Final = 8  # blocks
_CARRIES_NOTHING: Final = (2, 6)  # cooperative, programmatic serialization: harmless where their value is 0
_SHIM: Final = Path(__file__).with_name("capture_shim.c")


class CaptureError(Exception):
    """The recorded launch does not agree with itself or with the cubin."""


@dataclass(frozen=True, kw_only=True)
class HostCode:
    """A host object to run: its bytes, its function, and what the launch must agree with."""

    object_bytes: bytes
    entry: str
    cubin: str
    kernel: KernelInfo
    sm: str


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """One run of the host code. Equality of two runs is what the cross-checks compare."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    function_attributes: tuple[tuple[int, int], ...]
    images: tuple[bytes, ...]


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int32 * 16))


def capture(host: HostCode, step: Step) -> Launch:
    """The launch that a step makes, with its slots. Raises CaptureError naming what disagrees."""
    recorder = _recorder(host)
    names = step.operands
    one, two, three = (_addresses(names, seed) for seed in (1, 2, 3))
    first = recorder(step, one, 0x00)
    padding = _differing(first, recorder(step, one, 0xA5))
    blank = _without(first, padding)
    second = _without(recorder(step, two, 0x5A), padding)
    slots = _slots(step, blank, second, one, two)
    launch = Launch(
        kernel=step.spec.kernel,
        cubin=host.cubin,
        symbol=host.kernel.symbol,
        grid=first.grid,
        block=first.block,
        cluster=first.cluster,
        shared_bytes=first.shared_bytes,
        function_attributes=_needed(first),
        images=_blanked(blank.images, slots),
        slots=slots,
    )
    _check_prediction(step, launch, _without(recorder(step, three, 0x3C), padding), three)
    _check_budget(host, launch)
    return launch


def _needed(run: _Recorded) -> tuple[tuple[int, int], ...]:
    """The function attributes that a launch cannot do without.

    The DSL's loader asks for the device's largest dynamic shared memory and for non-portable
    clusters whether or not the kernel uses them; the second is an error on SMs without clusters.
    """
    x, y, z = run.cluster
    kept = [
        (k, v) for k, v in run.function_attributes if k not in (MAX_DYNAMIC_SHARED, 14) or x * y * z > PORTABLE_CLUSTER
    ]
    return (*kept, (MAX_DYNAMIC_SHARED, run.shared_bytes))


def _blanked(images: tuple[bytes, ...], slots: Sequence[Slot]) -> tuple[bytes, ...]:
    """Images with a zero at every slot: the addresses of a capture mean nothing later."""
    blank = [bytearray(image) for image in images]
    for slot in slots:
        blank[slot.parameter][slot.offset : slot.offset + 8] = bytes(8)
    return tuple(bytes(image) for image in blank)


def _addresses(names: tuple[str, ...], seed: int) -> dict[str, int]:
    """Distinct fake device addresses, 4 KB aligned, far apart, no two differing by the same amount."""
    draw = random.Random(seed)
    return {name: (0x7F00_0000_0000 + (i << 36) + (draw.randrange(1 << 20) << 12)) for i, name in enumerate(names)}


def _differing(a: _Recorded, b: _Recorded) -> list[set[int]]:
    if (a.grid, a.block, a.cluster, a.shared_bytes) != (b.grid, b.block, b.cluster, b.shared_bytes):
        raise CaptureError("two runs with equal arguments gave different launches; the host code reads its stack")
    return [{i for i in range(len(x)) if x[i] != y[i]} for x, y in zip(a.images, b.images, strict=True)]


def _without(run: _Recorded, padding: list[set[int]]) -> _Recorded:
    images = tuple(
        bytes(0 if i in unused else byte for i, byte in enumerate(image))
        for image, unused in zip(run.images, padding, strict=True)
    )
    return _Recorded(**{**vars(run), "images": images})


def _slots(
    step: Step, one: _Recorded, two: _Recorded, first: dict[str, int], second: dict[str, int]
) -> tuple[Slot, ...]:
    """Every aligned 8-byte word that moved between two address sets, explained by exactly one buffer."""
    slots = []
    for parameter, (a, b) in enumerate(zip(one.images, two.images, strict=True)):
        for offset in range(0, len(a) - 7, 8):
            old, new = (int.from_bytes(image[offset : offset + 8], "little") for image in (a, b))
            if old == new:
                continue
            matches = [n for n in step.operands if old - first[n] == new - second[n] and abs(old - first[n]) < 1 << 31]
            if len(set(matches)) != 1:
                raise CaptureError(
                    f"{step.spec.key}: parameter {parameter} byte {offset} moved with the addresses and "
                    f"{len(set(matches))} buffers explain it; expected one of {', '.join(step.operands)}"
                )
            slots.append(Slot(parameter=parameter, offset=offset, buffer=matches[0], addend=old - first[matches[0]]))
    return tuple(slots)


def _check_prediction(step: Step, launch: Launch, run: _Recorded, addresses: dict[str, int]) -> None:
    predicted = launch.images_at(addresses)
    same = predicted == run.images and (launch.grid, launch.block, launch.cluster, launch.shared_bytes) == (
        run.grid, run.block, run.cluster, run.shared_bytes,
    )  # fmt: skip
    if not same:
        wrong = [i for i, (p, r) in enumerate(zip(predicted, run.images, strict=True)) if p != r]
        raise CaptureError(f"{step.spec.key}: a third run was not predicted byte for byte; parameters {wrong} differ")


def _check_budget(host: HostCode, launch: Launch) -> None:
    limit = SHARED_LIMIT[host.sm]
    if launch.shared_bytes + host.kernel.static_shared > limit:
        raise CaptureError(
            f"{launch.symbol}: {launch.shared_bytes} bytes of dynamic and {host.kernel.static_shared} of static "
            f"shared memory; {host.sm} allows {limit} a block; choose a smaller tile or fewer stages"
        )
    if host.kernel.threads is not None and launch.block != host.kernel.threads:
        raise CaptureError(
            f"{launch.symbol}: launched with block {launch.block}; the cubin needs {host.kernel.threads}"
        )


class _Recorder:
    """A host object, linked with the stand-ins and loaded. Calling it runs the host code once."""

    def __init__(self, host: HostCode) -> None:
        self._host = host
        self._library = _link(host)
        sizes = [parameter.size for parameter in host.kernel.parameters]
        self._value(ctypes.c_int, "kf_parameter_count").value = len(sizes)
        self._value(ctypes.c_int * 128, "kf_parameter_size")[: len(sizes)] = sizes
        self._value(ctypes.c_int, "kf_shared_limit").value = SHARED_LIMIT[host.sm]
        self._attributes: tuple[tuple[int, int], ...] = self._load()

    def __call__(self, step: Step, addresses: dict[str, int], stack: int) -> _Recorded:
        values: list[Any] = [ctypes.c_void_p(addresses[name]) for name in step.operands]
        values += [ctypes.c_int32(value) for value in step.scalars] + [ctypes.c_void_p(0)]
        launches = self._value(ctypes.c_int, "kf_launches")
        before = launches.value
        self._run(self._host.entry, values, stack)
        if launches.value != before + 1:
            raise CaptureError(f"{self._host.entry}: expected one launch; found {launches.value - before}")
        return self._recorded()

    def _load(self) -> tuple[tuple[int, int], ...]:
        """Run the module's loader, which sets the function attributes."""
        handle = ctypes.c_void_p()
        pointer = ctypes.pointer(handle)
        self._run("_mlir_kf_cuda_init", [pointer], 0)
        self._run("_mlir_kf_cuda_load_to_device", [pointer, ctypes.c_int32(0)], 0)
        count = self._value(ctypes.c_int, "kf_function_attribute_count").value
        rows = self._value((ctypes.c_int * 2) * 16, "kf_function_attribute")
        return tuple(sorted({(rows[i][0], rows[i][1]) for i in range(count)}))

    def _run(self, function: str, values: list[Any], stack: int) -> None:
        status = ctypes.c_int32(-1)
        pointers = [ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in [*values, status]]
        array = (ctypes.c_void_p * len(pointers))(*pointers)
        self._library.kf_call(getattr(self._library, function), array, len(pointers), stack)
        if status.value != 0:
            raise CaptureError(f"{function}: the host code returned CUDA error {status.value}; expected 0")

    def _recorded(self) -> _Recorded:
        config = self._value(_Config, "kf_config")
        cluster = (1, 1, 1)
        for attribute in self._value(_Attribute * 16, "kf_attribute")[: config.attribute_count]:
            if attribute.id == CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
            elif attribute.id not in _CARRIES_NOTHING or attribute.value[0] != 0:
                raise CaptureError(f"{self._host.entry}: launch attribute {attribute.id} is not understood")
        raw = bytes(self._value(ctypes.c_ubyte * 16384, "kf_image"))
        images, at = [], 0
        for parameter in self._host.kernel.parameters:
            images.append(raw[at : at + parameter.size])
            at += parameter.size
        return _Recorded(
            grid=tuple(config.grid),
            block=tuple(config.block),
            cluster=cluster,
            shared_bytes=config.shared_bytes,
            function_attributes=self._attributes,
            images=tuple(images),
        )

    def _value(self, kind: Any, name: str) -> Any:
        return kind.in_dll(self._library, name)


@lru_cache(maxsize=512)
def _recorder(host: HostCode) -> _Recorder:
    return _Recorder(host)


def _link(host: HostCode) -> ctypes.CDLL:
    """Link the host object with the stand-ins; the library is unlinked once it is mapped."""
    with tempfile.TemporaryDirectory(prefix="kf-capture-") as folder:
        (Path(folder) / "host.o").write_bytes(host.object_bytes)
        library = Path(folder) / f"capture-{os.getpid()}-{id(host):x}.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-Wl,-z,noexecstack", "-Wl,-Bsymbolic", "-o", str(library)]
        done = subprocess.run([*command, str(_SHIM), f"{folder}/host.o"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CaptureError(f"{host.entry}: linking the host object failed; gcc said:\n{done.stderr}")
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise CaptureError(
                f"{host.entry}: the host code imports a function that has no stand-in: {error}"
            ) from error
