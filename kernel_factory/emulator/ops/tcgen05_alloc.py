"""tcgen05.alloc, dealloc and relinquish_alloc_permit (PTX ISA 9.7.16.7)."""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import spread, threads_of
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


def warp_value(x: np.ndarray, n: int, line: int, what: str, threads: np.ndarray) -> np.ndarray:
    """The one value that all lanes of each warp hold."""
    rows = spread(x, n).reshape(-1, 32)
    if (rows != rows[:, :1]).any():
        bad = int(np.flatnonzero((rows != rows[:, :1]).any(axis=1))[0])
        raise Fault(
            "tcgen05-operand", line, f"the lanes of a warp differ in the {what} of a .sync.aligned instruction",
            "compute the operand from values that all lanes share", int(threads[bad * 32]),
        )  # fmt: skip
    return rows[:, 0]


def resolve_alloc(M, group, block, sel, n, value) -> None:
    """Every warp queues a request; those that fit go on at once."""
    base, offset, columns, cta_pair, line = value
    flat = spread(shared_flat(M, sel, base, offset, 4, None, line), n)
    threads = park(M, group, sel, block)
    where = warp_value(flat, n, line, "address", threads)
    sizes = warp_value(columns, n, line, "size", threads)
    for i in range(n // 32):
        own = threads[i * 32 : i * 32 + 32]
        M.tensor.memory.request(
            Request(
                threads=own,
                cta=int(M.cta[own[0]]),
                flat=int(where[i]),
                columns=int(sizes[i]),
                group=cta_pair,
                line=line,
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
    base, offset = e.shared_address(target)
    return f"({base}, {offset}, {e.value(columns, 'u32')}, {group}, {ins.line})"


@emits("tcgen05.dealloc", writes=False, collective=32)
def dealloc(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.dealloc.cta_group.sync.aligned.b32 address, columns. A pair's CTAs free their own columns each."""
    cta_group(e, mods)
    collective(e, ins, mods)
    mods.type("b32")
    address, columns = e.operands(2)
    e.line(f"tmem_free(M, sel, {e.value(address, 'u32')}, {e.value(columns, 'u32')}, {ins.line}, n)")


@runtime
def tmem_free(M, sel, address, columns, line, n):
    threads = threads_of(M, sel, None)
    addresses = warp_value(address, n, line, "address", threads)
    sizes = warp_value(columns, n, line, "size", threads)
    for i in range(n // 32):
        thread = int(threads[i * 32])
        M.tensor.memory.release(int(M.cta[thread]), int(addresses[i]), int(sizes[i]), thread, line)


@emits("tcgen05.relinquish_alloc_permit", writes=False, collective=32)
def relinquish(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """After it the CTA may not allocate."""
    cta_group(e, mods)
    collective(e, ins, mods)
    e.operands(0)
    e.line(f"tmem_relinquish(M, sel, {ins.line})")


@runtime
def tmem_relinquish(M, sel, line):
    M.tensor.memory.relinquished[M.cta[threads_of(M, sel, None)]] = line
