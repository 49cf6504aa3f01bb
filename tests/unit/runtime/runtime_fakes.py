"""A fake ``cuda.bindings.driver`` and a small wheel folder, for tests of the runtime without any driver."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kf_runtime import manifest
from kf_runtime.cell import Cell
from kf_runtime.manifest import CubinRecord, KernelFacts, Manifest, Proof
from kf_runtime.ops import trimul_arguments
from kf_runtime.plan import Buffer, Launch, Plan, Slot

#: An empty ELF: 64 bytes of header that say so.
IMAGE = b"\x7fELF" + bytes(28) + (64).to_bytes(8, "little") + bytes(24)
SHA = hashlib.sha256(IMAGE).hexdigest()
EMULATED = "KF Emulated sm_90a"


class Result(IntEnum):
    """The CUresults that the fake returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_LAUNCH_FAILED = 719


@dataclass
class FakeDriver:
    """Answers as cuda.bindings.driver does; records calls; ``on_launch`` sees (function, pointer array address)."""

    product: str = EMULATED
    capability: tuple[int, int] = (9, 0)
    version: int = 13000
    calls: list[str] = field(default_factory=list)
    images: list[bytes] = field(default_factory=list)
    launches: list[tuple[Any, int, Any]] = field(default_factory=list)
    on_launch: Callable[[str, int], None] = lambda function, parameters: None
    results: dict[str, list[Result]] = field(default_factory=dict)
    context: int = 1
    capturing: bool = False

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def answer(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            planned = self.results.get(name, [])
            result = planned.pop(0) if planned else Result.CUDA_SUCCESS
            return (result,) if result else (result, *self._value(name, arguments))

        return answer

    def _value(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuLibraryLoadData":
            self.images.append(arguments[0])
        if name == "cuCtxSetCurrent":
            self.context = arguments[0]
        values: dict[str, Any] = {
            "cuDeviceGetCount": 1,
            "cuDeviceGet": 0,
            "cuDeviceGetName": self.product.encode() + b"\0",
            "cuDriverGetVersion": self.version,
            "cuDevicePrimaryCtxRetain": 7,
            "cuCtxGetCurrent": self.context,
            "cuFuncIsLoaded": 1,
            "cuStreamIsCapturing": int(self.capturing),
            "cuCtxPopCurrent": 1,
            "cuLibraryLoadData": "library",
            "cuGetErrorString": b"said by the fake",
        }
        if name == "cuDeviceGetAttribute":
            return (self.capability[arguments[0] - 75],)
        if name == "cuLibraryGetKernel":
            return (arguments[1].decode(),)
        if name == "cuKernelGetFunction":
            return (arguments[0],)
        return (values[name],) if name in values else ()

    def CUlaunchConfig(self) -> Any:
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def CUfunction_attribute(self, value: int) -> int:
        return value

    def CUstream(self, value: int) -> int:
        return value

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[Any]:
        self.calls.append("cuLaunchKernelEx")
        planned = self.results.get("cuLaunchKernelEx", [])
        if planned:
            return (planned.pop(0),)
        self.launches.append((function, parameters, config))
        self.on_launch(function, parameters)
        return (Result.CUDA_SUCCESS,)


def read_pointer(parameters: int, index: int, offset: int = 0) -> int:
    """The 8-byte value at ``offset`` of parameter ``index``, as the driver would copy it."""
    image = ctypes.c_void_p.from_address(parameters + 8 * index).value
    assert image is not None
    return ctypes.c_uint64.from_address(image + offset).value


def copy_launch(function: str, parameters: int) -> None:
    """A kernel ``copy(x, out)``: 64 bytes from parameter 0 to parameter 1."""
    if function == "finalize":
        ctypes.memmove(read_pointer(parameters, 1), read_pointer(parameters, 0), 64)


def trimul_cell(**changes: Any) -> Cell:
    """A small cell: N=8, C=D=16, outgoing, masked, on sm_90a."""
    base: dict[str, Any] = {
        "op": "triangle_multiplicative_update",
        "B": 1,
        "N": 8,
        "C": 16,
        "D": 16,
        "direction": "outgoing",
        "mask": True,
        "sm": "sm_90a",
    }
    return Cell(**{**base, **changes})


def trimul_plan(cell: Cell) -> Plan:
    """Three launches with a plan's usual buffers; ``finalize`` takes (x, out) and a struct that holds ``ab`` + 16."""
    shapes = trimul_arguments.shapes(cell.C, cell.D)
    names = [n for n in shapes if cell.biases or not (n.endswith("bias") and n[:2] in ("p_", "g_"))]
    pair = (cell.B, cell.N, cell.N, cell.C)
    buffers = [Buffer.contiguous("x", "input", "bf16", pair)]
    if cell.mask:
        buffers.append(Buffer.contiguous("mask", "input", "bf16", pair[:-1]))
    buffers += [Buffer.contiguous(name, "input", "bf16", shapes[name]) for name in names]
    buffers += [
        Buffer.contiguous("out", "output", "bf16", pair),
        Buffer.contiguous("ab", "scratch", "bf16", (2 * cell.D, cell.B, cell.N, cell.N)),
        Buffer.contiguous("t", "scratch", "bf16", (cell.D, cell.B, cell.N, cell.N)),
    ]
    launches = (
        _launch("project", ("x", "ab")),
        _launch("contract", ("ab", "t"), cluster=(2, 1, 1)),
        _launch("finalize", ("x", "out"), extra=Slot(parameter=2, offset=8, buffer="ab", addend=16)),
    )
    return Plan(buffers=tuple(buffers), launches=launches)


def _launch(
    symbol: str, buffers: tuple[str, str], cluster: tuple[int, int, int] = (1, 1, 1), extra: Slot | None = None
) -> Launch:
    slots = tuple(Slot(parameter=i, offset=0, buffer=name) for i, name in enumerate(buffers))
    return Launch(
        kernel=symbol,
        cubin=SHA,
        symbol=symbol,
        grid=(1, 1, 1),
        block=(128, 1, 1),
        cluster=cluster,
        shared_bytes=1024,
        function_attributes=((8, 1024),),
        images=(bytes(8), bytes(8), b"\x05" * 24),
        slots=(*slots, extra) if extra else slots,
    )


def small_manifest(
    *cells: Cell, product: str = EMULATED, required_driver: int = 0, parameters: tuple[str, ...] = ("bf16",)
) -> Manifest:
    """A manifest of these cells, all on the one fake cubin, for parameters of these dtypes."""
    cells = cells or (trimul_cell(),)
    facts = {name: KernelFacts(registers=32, static_shared=0) for name in ("project", "contract", "finalize")}
    record = CubinRecord(sha256=SHA, size=len(IMAGE), sm="sm_90a", kernels=facts, ptx_sha256="0" * 64, toolchain="t")
    proofs = (Proof(product=product, level="emulated"),)
    return manifest.build(
        generator="test",
        cubins=[record],
        cells=[(cell, trimul_plan(cell), proofs, "e" * 64) for cell in cells],
        parameter_dtypes=dict.fromkeys(cells, parameters),
        required_driver={"sm_90a": required_driver} if required_driver else {},
    )


def write_wheel(folder: Path, found: Manifest) -> Path:
    """A wheel's data folder with this manifest and the fake cubin."""
    data = manifest.to_bytes(found)
    (folder / "cubins").mkdir(parents=True)
    (folder / manifest.FILE).write_bytes(data)
    (folder / manifest.SIDECAR).write_bytes(manifest.sidecar(data))
    (folder / "cubins" / f"{SHA}.cubin").write_bytes(IMAGE)
    return folder


def operands(cell: Cell, seed: int = 0) -> dict[str, torch.Tensor]:
    """BF16 tensors for a call of this cell, by argument name."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"x": (cell.B, cell.N, cell.N, cell.C)}
    if cell.mask:
        shapes["mask"] = (cell.B, cell.N, cell.N)
    for name, shape in trimul_arguments.shapes(cell.C, cell.D).items():
        if cell.biases or not (name.endswith("bias") and name[:2] in ("p_", "g_")):
            shapes[name] = shape
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
