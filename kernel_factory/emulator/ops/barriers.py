"""mbarrier instructions (PTX ISA 9.7.13.15), cp.async.mbarrier.arrive, bar.arrive and bar.red (9.7.13.1).

try_wait and test_wait in a loop that repeats them park the thread until the phase completes: both may legally report
late. When nothing else can run they report False, as the hardware's time limit would, and a deadlock is reported if
that does not help. One that nothing repeats (a peek) reports False at once: it may, and code must not rely on more.
"""

from __future__ import annotations

import numpy as np

from .. import cta_barriers
from ..blocks import Block, successors
from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import settle, spread, threads_of, write_lanes
from ..ptx.records import Instruction
from ..registry import emits, runtime, terminates
from .cluster import cluster_address, cluster_flat

_SHORT_LOOP = 3  # blocks behind a wait within which its loop closes


def _modifiers(mods: Modifiers) -> None:
    """Everything but the operation itself: order and scope matter to the race checker only."""
    mods.type("b64")
    mods.take("release", "acquire", "relaxed")
    mods.take("cta", "cluster")
    mods.take("shared", "shared::cta", "shared::cluster")


def _numbers(x: np.ndarray, n: int, chosen: np.ndarray | None) -> np.ndarray:
    x = spread(x, n).astype(np.int64)
    return x if chosen is None else x[chosen]


@emits("mbarrier.init", "mbarrier.inval", writes=False)
def init(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.init and mbarrier.inval."""
    _modifiers(mods)
    start = ins.modifiers[0] == "init"
    operands = e.operands(2 if start else 1)
    base, offset = cluster_address(e, operands[0])
    count = e.value(operands[1], "u32") if start else "None"
    e.line(f"mbarrier_life(M, sel, {base}, {offset}, {count}, {e.guard()}, {ins.line}, n)")


@runtime
def mbarrier_life(M, sel, base, offset, count, mask, line, n):
    chosen = settle(mask)
    flat = cluster_flat(M, sel, base, offset, 8, chosen, line, n)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    if count is None:
        M.mbarriers.inval(flat, threads, line)
    else:
        M.mbarriers.init(flat, _numbers(count, n, chosen), threads, line)


@emits("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.arrive and arrive_drop, with .expect_tx, .noComplete, a count, and remote (shared::cluster) objects."""
    expect, incomplete = mods.take("expect_tx"), mods.take("noComplete")
    remote = "shared::cluster" in mods.left
    _modifiers(mods)
    state, target, *rest = ins.operands if len(ins.operands) > 1 else (None, *ins.operands)
    if state is not None and remote:
        raise e.fail("an arrive on a shared::cluster mbarrier returns no state; its destination is _")
    if len(rest) > 1 or (expect and not rest):
        raise e.fail("mbarrier.arrive takes an address, and a count or the expected bytes")
    base, offset = cluster_address(e, target)
    extra = e.value(rest[0], "u32") if rest else "None"
    name = e.temp()
    e.line(
        f"{name} = mbarrier_arrive(M, sel, {base}, {offset}, {'None' if expect else extra}, "
        f"{extra if expect else 'None'}, {ins.modifiers[0] == 'arrive_drop'}, {not incomplete}, {e.guard()}, "
        f"{ins.line}, n)"
    )
    e.set(state, name, "u64")


@runtime
def mbarrier_arrive(M, sel, base, offset, count, tx, drop, complete, mask, line, n):
    chosen = settle(mask)
    flat = cluster_flat(M, sel, base, offset, 8, chosen, line, n)
    threads = threads_of(M, sel, chosen)
    out = np.zeros(n, np.uint64)
    if threads.size:
        counts = np.ones(threads.size, np.int64) if count is None else _numbers(count, n, chosen)
        expected = None if tx is None else _numbers(tx, n, chosen)
        token = M.mbarriers.arrive(flat, counts, threads, line, tx=expected, drop=drop, complete=complete)
        out[slice(None) if chosen is None else chosen] = token
    return out


@emits("mbarrier.expect_tx", "mbarrier.complete_tx", writes=False)
def transactions(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.expect_tx, and complete_tx as software may simulate it."""
    _modifiers(mods)
    target, count = e.operands(2)
    base, offset = cluster_address(e, target)
    e.line(
        f"mbarrier_bytes(M, sel, {base}, {offset}, {e.value(count, 'u32')}, {ins.modifiers[0] == 'expect_tx'}, "
        f"{e.guard()}, {ins.line}, n)"
    )


@runtime
def mbarrier_bytes(M, sel, base, offset, count, expect, mask, line, n):
    chosen = settle(mask)
    flat = cluster_flat(M, sel, base, offset, 8, chosen, line, n)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    count = _numbers(count, n, chosen)
    if expect:
        M.mbarriers.expect(flat, count, threads, line)
    else:
        ids = M.mbarriers.find(flat, threads, line, "mbarrier.complete_tx")
        M.mbarriers.complete(ids, count, line, int(threads[0]))


@emits("mbarrier.pending_count")
def pending_count(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.pending_count: the count of pending arrivals in a state."""
    mods.type("b64")
    dst, state = e.operands(2)
    e.set(dst, f"({e.value(state, 'u64')} & u64(0xFFFFF)).astype(u32)", "u32")


# -- waits ------------------------------------------------------------------------------------------------------------
def resolve_wait(M, group, block, sel, n, value) -> None:
    """Threads whose phase is complete get True and go on; the others are parked behind the instruction."""
    base, offset, phase, mask = value
    ins = block.terminator
    chosen = settle(mask)
    following = block.number + 1
    flat = cluster_flat(M, sel, base, offset, 8, chosen, ins.line, n)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        M.go(group, sel, following)
        return
    ids = M.mbarriers.find(flat, threads, ins.line, f"mbarrier.{ins.modifiers[0]}")
    x = _numbers(phase, n, chosen)
    done = M.mbarriers.ready(ids, x) if "parity" in ins.modifiers else M.mbarriers.phase[ids] != x >> 32
    register = ins.operands[0].number
    if M.race and done.any():
        M.race.mbarrier_wait(threads[done], ids[done])
    if done.all():
        if chosen is None:
            _set_true(M, register, sel)
        else:
            write_lanes(M, register, threads, True)
        M.go(group, sel, following)
        return
    write_lanes(M, register, threads[done], True)
    if not _repeats(M.program.blocks, block):
        write_lanes(M, register, threads[~done], False)
        M.go(group, sel, following)
        return
    M.part(group, sel, np.full(n, following))
    M.mbarriers.park(threads[~done], ids[~done], ins.line, register, following)


def _repeats(blocks: list[Block], block: Block) -> bool:
    """Does the code right behind a wait lead back to it?"""
    if block.repeats is None:
        behind = {block.number + 1}
        for _ in range(_SHORT_LOOP):
            behind |= {s for b in behind - {block.number} for s in successors(blocks[b], len(blocks))}
        block.repeats = block.number in behind
    return block.repeats


def _set_true(M, register, sel):
    if sel is None:
        M.R[register] = np.ones(1, bool)
    else:
        write_lanes(M, register, sel, True)


@terminates("mbarrier.try_wait", "mbarrier.test_wait", resolve=resolve_wait, writes=True)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """try_wait and test_wait, on a parity or on a state."""
    parity = mods.take("parity")
    _modifiers(mods)
    if len(ins.operands) not in (3, 4) or not hasattr(ins.operands[0], "number"):
        raise e.fail(f"mbarrier.{ins.modifiers[0]} takes a predicate, an address, a phase, and a time hint")
    base, offset = cluster_address(e, ins.operands[1])
    return f"({base}, {offset}, {e.value(ins.operands[2], 'u32' if parity else 'u64')}, {e.guard()})"


@emits("cp.async.mbarrier.arrive", writes=False)
def arrive_after_copies(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.mbarrier.arrive{.noinc}: arrive once all earlier cp.async of the thread have landed (9.7.13.15.16)."""
    mods.type("b64")
    mods.take("shared", "shared::cta")
    no_increment = bool(mods.take("noinc"))
    base, offset = cluster_address(e, e.operands(1)[0])
    e.line(f"arrive_after(M, sel, {base}, {offset}, {no_increment}, {e.guard()}, {ins.line}, n)")


@runtime
def arrive_after(M, sel, base, offset, no_increment, mask, line, n):
    chosen = settle(mask)
    flat = cluster_flat(M, sel, base, offset, 8, chosen, line, n)
    threads = threads_of(M, sel, chosen)
    if threads.size:
        ids = M.mbarriers.find(flat, threads, line, "cp.async.mbarrier.arrive")
        if not no_increment:
            np.add.at(M.mbarriers.pending, ids, 1)
        M.async_copies.arrive_later(threads, flat, line)


# -- bar.arrive and bar.red -------------------------------------------------------------------------------------------
@emits("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive", writes=False)
def bar_arrive(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """bar.arrive a, b: count at a barrier without waiting."""
    mods.take("aligned")
    number, count = e.operands(2)
    e.line(f"barrier_arrive(M, sel, {e.value(number, 'u32')}, {e.value(count, 'u32')}, {e.guard()}, {ins.line}, n)")


@runtime
def barrier_arrive(M, sel, number, count, mask, line, n):
    chosen = settle(mask)
    threads = threads_of(M, sel, chosen)
    if threads.size:
        cta_barriers.arrive(M, threads, _numbers(number, n, chosen), _numbers(count, n, chosen), line)


def resolve_reduce(M, group, block, sel, n, value) -> None:
    """Wait like bar.sync; the threads that are let go get the reduction."""
    number, count, votes = value
    ins = block.terminator
    what = next(m for m in ins.modifiers if m in ("popc", "and", "or"))
    threads = threads_of(M, sel, None)
    if int(number.max()) > 15:
        raise Fault("unsupported", ins.line, f"barrier number {int(number.max())}",
                    "barriers are numbered 0 to 15", int(threads[0]))  # fmt: skip
    cta_barriers.vote(M, threads, spread(number, n), spread(votes, n), what, ins.operands[0].number)
    M.wait_at_barrier(group, sel, block, number, count)


@terminates("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red", resolve=resolve_reduce, writes=True)
def bar_reduce(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """bar.red.popc.u32 d, a{, b}, {!}c and bar.red.{and,or}.pred."""
    kind = mods.type("u32", "pred")
    mods.one(*(("popc",) if kind == "u32" else ("and", "or")))
    mods.take("aligned")
    if ins.guard or len(ins.operands) not in (3, 4):
        raise e.fail("bar.red is emulated unguarded, with three or four operands")
    count = e.value(ins.operands[2], "u32") if len(ins.operands) == 4 else "None"
    return f"({e.value(ins.operands[1], 'u32')}, {count}, {e.value(ins.operands[-1], 'bool')})"
