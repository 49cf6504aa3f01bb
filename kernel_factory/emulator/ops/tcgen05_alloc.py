"""tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.7.16.7)."""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..lanes import spread
from ..ptx.records import Instruction
from ..registry import emits, runtime, terminates
from ..tmem import Request, park
from .memory_access import shared_flat


def cta_group(e: Emitter, mods: Modifiers) -> int:
    """1 or 2; every tcgen05 instruction of a kernel must say the same."""
    own = mods.one("cta_group::1", "cta_group::2")
    for other in e.kernel.instructions:
        if other.opcode == "tcgen05":
            groups = [m for m in other.modifiers if m.startswith("cta_group::") and m != own]
            if groups:
                raise e.fail(f"{own} here and {groups[0]} at line {other.line}: a kernel must use one cta_group")
    return int(own[-1])


def collective(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """The .sync.aligned of an instruction that a whole warp executes."""
    mods.one("sync")
    mods.one("aligned")
    if ins.guard:
        raise e.fail(f"a guarded {ins.opcode}.{ins.modifiers[0]} is not emulated: whole warps take part")


def warp_value(issue: Issue, x: np.ndarray, what: str) -> np.ndarray:
    """The one value that all lanes of each warp hold."""
    rows = spread(x, issue.n).reshape(-1, 32)
    if (rows != rows[:, :1]).any():
        bad = int(np.flatnonzero((rows != rows[:, :1]).any(axis=1))[0])
        raise issue.fault(
            "tcgen05-operand",
            f"the lanes of a warp differ in the {what} of a .sync.aligned instruction",
            "compute the operand from values that all lanes share",
            bad * 32,
        )
    return rows[:, 0]


def resolve_alloc(M, group, block, sel, n, value) -> None:
    """Every warp queues a request; those that fit go on at once."""
    issue, place, columns, cta_pair = value
    flat = shared_flat(issue, place, 4)
    park(M, group, sel, block)
    where = warp_value(issue, flat, "address")
    sizes = warp_value(issue, columns, "size")
    for i in range(n // 32):
        own = issue.threads[i * 32 : i * 32 + 32]
        M.tensor.memory.request(
            Request(
                threads=own,
                cta=int(M.cta[own[0]]),
                flat=int(where[i]),
                columns=int(sizes[i]),
                group=cta_pair,
                line=issue.line,
            )
        )
    M.tensor.memory.grant()


@terminates("tcgen05.alloc", resolve=resolve_alloc, collective=32)
def alloc(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """tcgen05.alloc.cta_group.sync.aligned{.shared::cta}.b32 [address], columns."""
    group = cta_group(e, mods)
    collective(e, ins, mods)
    mods.take("shared::cta")
    mods.type("b32")
    target, columns = e.operands(2)
    return f"({e.issue()}, {e.shared_place(target)}, {e.value(columns, 'u32')}, {group})"


@emits("tcgen05.dealloc", writes=False, collective=32)
def dealloc(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.dealloc.cta_group.sync.aligned.b32 address, columns. A pair's CTAs free their own columns each."""
    cta_group(e, mods)
    collective(e, ins, mods)
    mods.type("b32")
    address, columns = e.operands(2)
    e.line(f"tmem_free({e.issue()}, {e.value(address, 'u32')}, {e.value(columns, 'u32')})")


@runtime
def tmem_free(issue: Issue, address: np.ndarray, columns: np.ndarray) -> None:
    M = issue.M
    addresses, sizes = warp_value(issue, address, "address"), warp_value(issue, columns, "size")
    for i, thread in enumerate(issue.threads[::32].tolist()):
        M.tensor.memory.release(int(M.cta[thread]), int(addresses[i]), int(sizes[i]), thread, issue.line)


@emits("tcgen05.relinquish_alloc_permit", writes=False, collective=32)
def relinquish(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """After it the CTA may not allocate."""
    cta_group(e, mods)
    collective(e, ins, mods)
    e.operands(0)
    e.line(f"tmem_relinquish({e.issue()})")


@runtime
def tmem_relinquish(issue: Issue) -> None:
    issue.M.tensor.memory.relinquished[issue.M.cta[issue.threads]] = issue.line
