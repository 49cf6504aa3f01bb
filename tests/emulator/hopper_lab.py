"""Hand-written Hopper kernels for tests: tensor-map parameters, clusters, and one launch in any mode."""

from __future__ import annotations

import numpy as np

from kernel_factory.emulator import LaunchConfig, Memory, Result, load, run
from kernel_factory.emulator.tensor_map import TensorMap

HEAD = ".version 9.3\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
REGISTERS = (
    ".reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<256>; .reg .b64 %d<64>;"
    "mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.eq.u32 %p0, %r0, 0;"
)
CODES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "float64": 9, "bf16": 10}


def tensor_map(array: np.ndarray, box: tuple[int, ...], *, bf16: bool = False, address: int = 0, **fields) -> TensorMap:
    """A map over a C-contiguous array; ``box`` has the fastest dimension first."""
    shape = array.shape[::-1]
    strides = tuple(s for s in array.strides[::-1][1:])
    code = CODES["bf16" if bf16 else array.dtype.name]
    return TensorMap(address=address, element=code, extents=shape, strides=strides, box=box, **fields)


def text(body: str, params: list[str], threads: int, cluster: int = 1) -> str:
    """Kernel ``k``: parameters named in ``params``; names that start with ``map`` are tensor maps."""
    kinds = [f".param .align 64 .b8 {p}[128]" if p.startswith("map") else f".param .u64 {p}" for p in params]
    return (
        f"{HEAD}.visible .entry k({', '.join(kinds)})\n.reqntid {threads}, 1, 1\n"
        + "{\n"
        + (REGISTERS + body).replace(";", ";\n")
        + "\nret;\n}\n"
    )


def launch(
    body: str,
    buffers: dict[str, np.ndarray | int],
    maps: dict[str, tuple[str, TensorMap]] | None = None,
    *,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    mode: str = "lockstep",
    seed: int = 0,
    dynamic: int = 8192,
    resident: int | None = None,
) -> tuple[Result, Memory]:
    """Run ``body``: a pointer parameter for each buffer, and a tensor map over one of them for each of ``maps``."""
    memory = Memory(seed)
    params, names = [], []
    for name, content in buffers.items():
        address = memory.poison(name, content) if isinstance(content, int) else memory.add(name, content)
        params.append(address.to_bytes(8, "little"))
        names.append(name)
    for name, (buffer, tmap) in (maps or {}).items():
        params.append(TensorMap(**{**vars(tmap), "address": memory.address(buffer) + tmap.address}).encode())
        names.append(name)
    config = LaunchConfig(
        grid=(grid, 1, 1), block=(threads, 1, 1), dynamic_shared=dynamic, params=tuple(params),
        cluster=(cluster, 1, 1), resident_ctas=resident,
    )  # fmt: skip
    kernel = load(text(body, names, threads)).kernels["k"]
    return run(kernel, config, memory, mode=mode, seed=seed), memory


def findings(result: Result) -> list[str]:
    """The findings as text, for assertion messages."""
    return [str(f) for f in result.findings]
