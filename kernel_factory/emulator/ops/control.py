"""Branches, exits, barriers, and opcodes that change nothing that is emulated."""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import threads_of
from ..ptx.records import Instruction
from ..registry import emits, terminates


def _guard(e: Emitter) -> str:
    return e.guard()


def resolve_branch(M, group, block, sel, n, taken) -> None:
    """Taken threads go to the target, the others on; a uniform outcome keeps the group together."""
    if taken is None or ((taken.shape[0] == 1 or taken[0] == taken[-1]) and (taken == taken[0]).all()):
        M.go(group, sel, block.target if taken is None or taken[0] else block.number + 1)
    else:
        M.part(group, sel, np.where(taken, block.target, block.number + 1))


@terminates("bra", resolve=resolve_branch)
def branch(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """bra and bra.uni."""
    mods.take("uni")
    return _guard(e)


def resolve_exit(M, group, block, sel, n, leaving) -> None:
    """Threads that leave are done; barriers no longer wait for them."""
    if leaving is None or leaving.all():
        M.finish(group, sel)
    elif not leaving.any():
        M.go(group, sel, block.number + 1)
    else:
        ids = threads_of(M, sel)
        M.part(group, sel, np.full(n, block.number + 1))
        M.finish(group, ids[leaving])


@terminates("ret", "exit", resolve=resolve_exit)
def leave(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """ret and exit of a kernel."""
    mods.take("uni")
    return _guard(e)


def resolve_trap(M, group, block, sel, n, trapped) -> None:
    """A trap by any thread is a finding that stops the run."""
    if trapped is None or trapped.any():
        ids = threads_of(M, sel)
        at = 0 if trapped is None or trapped.shape[0] == 1 else int(np.flatnonzero(trapped)[0])
        raise Fault(
            "trap",
            block.terminator.line,
            "the kernel executed trap",
            "a check in the kernel failed: see its condition",
            int(ids[at]),
        )
    M.go(group, sel, block.number + 1)


@terminates("trap", resolve=resolve_trap)
def trap(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """trap."""
    return _guard(e)


def resolve_barrier(M, group, block, sel, n, value) -> None:
    """All of the CTA pass at once when everybody is here; otherwise threads wait by barrier number."""
    number, count = value
    if int(number.max()) > 15:
        raise Fault(
            "unsupported",
            block.terminator.line,
            f"barrier number {int(number.max())}",
            "barriers are numbered 0 to 15",
            int(threads_of(M, sel)[0]),
        )
    everybody = group.lanes is None and sel is None and number.shape[0] == 1
    if everybody and (count is None or (count == M.cta_threads).all()):
        if M.race:
            M.race.cta_barrier()
        M.go(group, sel, block.number + 1)
    else:
        M.wait_at_barrier(group, sel, block, number, count)


@terminates("bar.sync", "barrier.sync", "bar.cta.sync", "barrier.cta.sync", resolve=resolve_barrier)
def barrier(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """bar.sync a{, b}: barrier number and thread count."""
    mods.take("aligned")
    if ins.guard or len(ins.operands) not in (1, 2):
        raise e.fail("bar.sync is emulated unguarded, with one or two operands")
    count = e.value(ins.operands[1], "u32") if len(ins.operands) == 2 else "None"
    return f"({e.value(ins.operands[0], 'u32')}, {count})"


@emits("nanosleep", "prefetch", "prefetchu", "discard", "applypriority", writes=False)
def nothing(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """No effect here: there is no cache and no clock. prefetch.tensormap is one of these."""
    mods.left.clear()
