"""Triton's compiler without a GPU: PTX, block, shared memory and the parameters of a specialised kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    "float32": "*fp32",
    "float64": "*fp64",
    "float16": "*fp16",
    "int32": "*i32",
    "int64": "*i64",
    "int8": "*i8",
    "uint16": "*bf16",
    "uint8": "*u8",
    "uint32": "*u32",
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a launch needs; ``args`` are the run-time arguments in order."""

    ptx: str
    kernel: str
    block: tuple[int, int, int]
    shared: int
    cluster: tuple[int, int, int]
    args: tuple


def compile_kernel(function, values: dict, sm: int, types: dict | None = None, warps: int = 4, stages: int = 3):
    """Compile for one SM. Names in capitals and those that the kernel marks are compile-time constants.

    Arrays become 16-byte aligned pointers (their element type from ``types`` or the array's dtype); integers are
    i32, floats fp32.
    """
    types = types or {}
    constant = {p.name for p in function.params if p.is_constexpr}
    signature, constants, attrs, args = {}, {}, {}, []
    for place, name in enumerate(p.name for p in function.params):
        if name not in values and name not in constant:
            raise KeyError(f"no value for parameter {name}")
        value = values.get(name)
        if name in constant or value is None:
            signature[name] = "constexpr"
            if name in values:
                constants[(place,)] = value
            continue
        if isinstance(value, np.ndarray):
            signature[name] = types.get(name, TYPES[value.dtype.name])
            attrs[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = types.get(name, "fp32" if isinstance(value, float) else "i32")
        args.append(value)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    kernel = triton.compile(
        source, target=GPUTarget("cuda", sm, 32), options={"num_warps": warps, "num_stages": stages}
    )
    meta = kernel.metadata
    return Compiled(
        ptx=kernel.asm["ptx"],
        kernel=meta.name,
        block=(32 * meta.num_warps, 1, 1),
        shared=meta.shared,
        cluster=(meta.num_ctas, 1, 1),
        args=tuple(args),
    )
