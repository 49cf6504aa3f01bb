"""tcgen05.cp (PTX ISA 9.7.16.9): shared memory to TMEM, in the issuing CTA's queue. tcgen05.shift is refused.

Row r of the matrix that the descriptor names (K-major, 32 or 16 bytes a row) goes to these lanes, from the address on:

    128x256b, 128x128b        r
    4x256b                    32 r
    64x128b.warpx2::02_13     r and r + 64
    64x128b.warpx2::01_23     64 (r // 32) + r % 32, and 32 above it
    32x128b.warpx4            r, r + 32, r + 64 and r + 96
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..ptx.records import Address, Instruction
from ..registry import emits, runtime
from ..tensor_core import Work
from ..tensor_descriptors import DescriptorError
from ..tensor_operands import Matrix, SharedOperand, shared_operand
from ..tmem import Area
from .tcgen05_alloc import cta_group
from .tcgen05_ldst import tmem_address

_SHAPES = {"128x256b": (128, 2), "4x256b": (4, 2), "128x128b": (128, 1), "64x128b": (64, 1), "32x128b": (32, 1)}
_MULTICAST = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}


def lanes_of(shape: str, multicast: str | None) -> np.ndarray:
    """(copies, rows) lanes relative to the address."""
    rows = np.arange(_SHAPES[shape][0])
    if shape == "4x256b":
        return 32 * rows[None]
    if multicast == "warpx2::01_23":
        first = 64 * (rows // 32) + rows % 32
        return np.stack([first, first + 32])
    steps = {"warpx2::02_13": (0, 64), "warpx4": (0, 32, 64, 96)}.get(multicast, (0,))
    return rows[None] + np.array(steps)[:, None]


@emits("tcgen05.cp", writes=False)
def copy(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.cp.cta_group.shape{.multicast} [taddr], descriptor."""
    group = cta_group(e, mods)
    shape = mods.one(*_SHAPES)
    multicast = mods.one(*_MULTICAST[shape]) if shape in _MULTICAST else None
    if mods.left:
        raise e.fail(f"decompression (.{mods.left[0]}) is not emulated; add it to ops/tcgen05_cp.py with a test")
    target, source = e.operands(2)
    if not isinstance(target, Address):
        raise e.fail("the TMEM address must stand in brackets")
    form = f"{shape!r}, {multicast!r}, {group}"
    e.line(f"tensor_copy({e.issue()}, {tmem_address(e, target)}, {e.value(source, 'u64')}, {form})")


@runtime
def tensor_copy(
    issue: Issue, target: np.ndarray, source: np.ndarray, shape: str, multicast: str | None, group: int
) -> None:
    M, line = issue.M, issue.line
    rows, width = _SHAPES[shape]
    places = lanes_of(shape, multicast)
    targets, sources = issue.each(target).tolist(), issue.each(source).tolist()
    for i, thread in enumerate(issue.threads.tolist()):
        address, cta = targets[i], int(M.cta[thread])
        ctas = [cta] if group == 1 else [cta, M.tensor.memory.peer(cta)]
        lane, column, columns = address >> 16, address & 0xFFFF, 4 * width
        area = Area(lane=lane, lanes=int(places.max()) + 1, column=column, columns=columns)
        M.tensor.memory.check(np.array(ctas), area, line, thread)
        try:
            matrix = shared_operand(M, Matrix(word=sources[i], rows=rows, width=width), line, thread)
        except DescriptorError as wrong:
            cure = "build a K-major descriptor of whole core matrices"
            raise issue.fault("tcgen05-descriptor", str(wrong), cure, i) from None
        work = Copy(
            cta=cta, thread=thread, line=line, cells=[(c, column, column + columns) for c in ctas], ctas=ctas,
            matrix=matrix, lanes=lane + places, column=column, columns=columns,
        )  # fmt: skip
        if M.count:
            M.count.tensor_memory("cp", len(ctas) * places.size * columns * 4)
        if M.tensor.races:
            M.tensor.races.copy(work)
        M.tensor.issue(work)


@dataclass(kw_only=True)
class Copy(Work):
    """One tcgen05.cp; with a pair each CTA copies from its own shared memory."""

    ctas: list[int]
    matrix: SharedOperand
    lanes: np.ndarray
    column: int
    columns: int

    def land(self, M: object) -> None:
        for cta in self.ctas:
            words = self.matrix.raw(M, cta).reshape(self.matrix.rows, -1).view(np.uint32)
            for lanes in self.lanes:
                M.tensor.memory.data[cta, lanes, self.column : self.column + self.columns] = words


@emits("tcgen05.shift", writes=False)
def shift(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.shift is for convolutions."""
    raise e.fail("tcgen05.shift is not emulated; add it to ops/tcgen05_cp.py with a test")
