"""Inspect: cubin, PTX and captured launch -> Facts."""

from __future__ import annotations

import re
from math import prod
from typing import Final

from kf_runtime.plan import Launch

from kernel_factory import elf
from kernel_factory.artifact import Facts

# Slow or inaccurate on the hot path: exact reciprocal and division, and tanh.approx (2e-2 off on closed gates).
FORBIDDEN: Final = ("rcp.rn", "div.rn.f32", "div.full.f32", "tanh.approx", "ld.local", "st.local")


class InspectError(Exception):
    """Cubin, PTX and launch do not describe the same kernel."""


def only_kernel(cubin: bytes, symbol: str) -> elf.KernelInfo:
    """The cubin's one kernel, which must be ``symbol``. Raises InspectError."""
    found = elf.kernels(cubin)
    if len(found) != 1 or found[0].symbol != symbol:
        raise InspectError(f"expected one kernel {symbol}; the cubin has {', '.join(k.symbol for k in found)}")
    return found[0]


def ptx_parameter_sizes(ptx: str, symbol: str) -> tuple[int, ...]:
    """Bytes of each ``.param`` of an entry, in order."""
    head = ptx[ptx.index(f".entry {symbol}(") :]
    body = head[: head.index(")\n")]
    scalar = {"8": 1, "16": 2, "32": 4, "64": 8}
    sizes = []
    for line in body.splitlines():
        found = re.search(r"\.param .*?\.[busf](8|16|32|64)\s.*?(?:\[(\d+)\])?,?$", line.strip())
        if found:
            sizes.append(scalar[found.group(1)] * int(found.group(2) or 1))
    return tuple(sizes)


def inspect(cubin: bytes, ptx: str, launch: Launch) -> Facts:
    """The facts of one kernel. Raises InspectError where ELF, PTX and launch disagree."""
    info = only_kernel(cubin, launch.symbol)
    of_elf = tuple(p.size for p in info.parameters)
    of_ptx = ptx_parameter_sizes(ptx, launch.symbol)
    of_launch = tuple(len(image) for image in launch.images)
    if not of_elf == of_ptx == of_launch:
        raise InspectError(f"{launch.symbol}: parameter sizes differ: ELF {of_elf}, PTX {of_ptx}, launch {of_launch}")
    return Facts(
        kernel=launch.kernel,
        symbol=launch.symbol,
        parameters=tuple((p.offset, p.size) for p in info.parameters),
        registers=info.registers,
        stack_bytes=info.frame_bytes,
        static_shared=info.static_shared,
        dynamic_shared=launch.shared_bytes,
        threads=prod(launch.block),
        code_bytes=info.code_bytes,
        forbidden_opcodes=tuple(op for op in FORBIDDEN if re.search(rf"^\s*(@!?%p\d+\s+)?{re.escape(op)}", ptx, re.M)),
    )
