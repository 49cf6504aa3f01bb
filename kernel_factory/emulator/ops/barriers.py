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
from ..issue import Issue
from ..lanes import spread, threads_of, write_lanes
from ..mbarriers import Arrival
from ..ptx.records import Instruction
from ..registry import emits, runtime, terminates
from .cluster import cluster_flat

_SHORT_LOOP = 3  # blocks behind a wait within which its loop closes


def _modifiers(mods: Modifiers) -> None:
    """Everything but the operation itself: order and scope matter to the race checker only."""
    mods.type("b64")
    mods.take("release", "acquire", "relaxed")
    mods.take("cta", "cluster")
    mods.take("shared", "shared::cta", "shared::cluster")


def _numbers(issue: Issue, x: np.ndarray) -> np.ndarray:
    return issue.each(x).astype(np.int64)


@emits("mbarrier.init", "mbarrier.inval", writes=False)
def init(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.init and mbarrier.inval."""
    _modifiers(mods)
    start = ins.modifiers[0] == "init"
    operands = e.operands(2 if start else 1)
    count = e.value(operands[1], "u32") if start else "None"
    e.line(f"mbarrier_life({e.issue()}, {e.cluster_place(operands[0])}, {count})")


@runtime
def mbarrier_life(issue: Issue, place: tuple, count: np.ndarray | None) -> None:
    M, threads = issue.M, issue.threads
    flat = cluster_flat(issue, place, 8)
    if not threads.size:
        return
    if count is None:
        M.mbarriers.inval(flat, threads, issue.line)
    else:
        M.mbarriers.init(flat, _numbers(issue, count), threads, issue.line)


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
    how = e.static(Arrival(expects=bool(expect), drop=ins.modifiers[0] == "arrive_drop", complete=not incomplete))
    extra = e.value(rest[0], "u32") if rest else "None"
    name = e.temp()
    e.line(f"{name} = mbarrier_arrive({e.issue()}, {e.cluster_place(target)}, {how}, {extra})")
    e.set(state, name, "u64")


@runtime
def mbarrier_arrive(issue: Issue, place: tuple, how: Arrival, extra: np.ndarray | None) -> np.ndarray:
    """The states of the phases that the arrivals joined; ``extra`` is the count, or the bytes that are expected."""
    flat = cluster_flat(issue, place, 8)
    if not issue.threads.size:
        return np.zeros(issue.n, np.uint64)
    number = np.ones(issue.count, np.int64) if extra is None else _numbers(issue, extra)
    return issue.back(issue.M.mbarriers.arrive(flat, number, issue.threads, issue.line, how))


@emits("mbarrier.expect_tx", "mbarrier.complete_tx", writes=False)
def transactions(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.expect_tx, and complete_tx as software may simulate it."""
    _modifiers(mods)
    target, count = e.operands(2)
    expect = ins.modifiers[0] == "expect_tx"
    e.line(f"mbarrier_bytes({e.issue()}, {e.cluster_place(target)}, {e.value(count, 'u32')}, {expect})")


@runtime
def mbarrier_bytes(issue: Issue, place: tuple, count: np.ndarray, expect: bool) -> None:
    M, threads = issue.M, issue.threads
    flat = cluster_flat(issue, place, 8)
    if not threads.size:
        return
    count = _numbers(issue, count)
    if expect:
        M.mbarriers.expect(flat, count, threads, issue.line)
    else:
        ids = M.mbarriers.find(flat, threads, issue.line, "mbarrier.complete_tx")
        M.mbarriers.complete(ids, count, issue.line, int(threads[0]))


@emits("mbarrier.pending_count")
def pending_count(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mbarrier.pending_count: the count of pending arrivals in a state."""
    mods.type("b64")
    dst, state = e.operands(2)
    e.set(dst, f"({e.value(state, 'u64')} & u64(0xFFFFF)).astype(u32)", "u32")


# -- waits ------------------------------------------------------------------------------------------------------------
def resolve_wait(M, group, block, sel, n, value) -> None:
    """Threads whose phase is complete get True and go on; the others are parked behind the instruction."""
    issue, place, phase = value
    ins, threads = block.terminator, issue.threads
    following = block.number + 1
    flat = cluster_flat(issue, place, 8)
    if not threads.size:
        M.go(group, sel, following)
        return
    ids = M.mbarriers.find(flat, threads, ins.line, f"mbarrier.{ins.modifiers[0]}")
    x = _numbers(issue, phase)
    done = M.mbarriers.ready(ids, x) if "parity" in ins.modifiers else M.mbarriers.phase[ids] != x >> 32
    register = ins.operands[0].number
    if M.race and done.any():
        M.race.mbarrier_wait(threads[done], ids[done], ins.line)
    if done.all():
        if issue.chosen is None:
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
    phase = e.value(ins.operands[2], "u32" if parity else "u64")
    return f"({e.issue()}, {e.cluster_place(ins.operands[1])}, {phase})"


@emits("cp.async.mbarrier.arrive", writes=False)
def arrive_after_copies(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.mbarrier.arrive{.noinc}: arrive once all earlier cp.async of the thread have landed (9.7.13.15.16)."""
    mods.type("b64")
    mods.take("shared", "shared::cta")
    no_increment = bool(mods.take("noinc"))
    e.line(f"arrive_after({e.issue()}, {e.cluster_place(e.operands(1)[0])}, {no_increment})")


@runtime
def arrive_after(issue: Issue, place: tuple, no_increment: bool) -> None:
    M, threads = issue.M, issue.threads
    flat = cluster_flat(issue, place, 8)
    if threads.size:
        ids = M.mbarriers.find(flat, threads, issue.line, "cp.async.mbarrier.arrive")
        if not no_increment:
            np.add.at(M.mbarriers.pending, ids, 1)
        M.async_copies.arrive_later(threads, flat, issue.line)


# -- bar.arrive and bar.red -------------------------------------------------------------------------------------------
@emits("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive", writes=False)
def bar_arrive(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """bar.arrive a, b: count at a barrier without waiting."""
    mods.take("aligned")
    number, count = e.operands(2)
    e.line(f"barrier_arrive({e.issue()}, {e.value(number, 'u32')}, {e.value(count, 'u32')})")


@runtime
def barrier_arrive(issue: Issue, number: np.ndarray, count: np.ndarray) -> None:
    if issue.threads.size:
        cta_barriers.arrive(issue.M, issue.threads, _numbers(issue, number), _numbers(issue, count), issue.line)


def resolve_reduce(M, group, block, sel, n, value) -> None:
    """Wait like bar.sync; the threads that are let go get the reduction."""
    number, count, votes = value
    ins = block.terminator
    what = next(m for m in ins.modifiers if m in ("popc", "and", "or"))
    threads = threads_of(M, sel)
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
