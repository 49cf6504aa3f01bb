"""clusterlaunchcontrol (PTX ISA 9.7.13.17): a running cluster takes over one that has not started yet.

Here every cluster of the grid starts, so that each request is declined: the schedule of a device on which the whole
grid is resident. The answer lands in shared memory like a copy and completes on the mbarrier with its 16 bytes. Its
format is the machine's own: all zeros, "declined"; the CTA numbers of a declined answer are undefined, hence poison.
"""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..ptx.records import Instruction, Vector
from ..registry import emits, runtime
from .bulk import Line
from .cluster import cluster_flat

_ANSWER = 16


@emits("clusterlaunchcontrol.try_cancel.async", writes=False)
def try_cancel(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """try_cancel.async{.shared::cta}.mbarrier::complete_tx::bytes{.multicast::cluster::all}.b128 [answer], [mbar]."""
    mods.type("b128")
    mods.one("mbarrier::complete_tx::bytes")
    mods.take("shared::cta")
    everywhere = bool(mods.take("multicast::cluster::all"))
    target, barrier = e.operands(2)
    e.line(f"launch_declined({e.issue()}, {e.cluster_place(target)}, {e.cluster_place(barrier)}, {everywhere})")


@runtime
def launch_declined(issue: Issue, target: tuple, barrier: tuple, everywhere: bool) -> None:
    M, threads = issue.M, issue.threads
    if not threads.size:
        return
    flat, objects = cluster_flat(issue, target, _ANSWER), cluster_flat(issue, barrier, 8)
    if everywhere:
        ranks = np.arange(M.cluster_size)[:, None]
        first = M.cluster_start[M.cta[threads]]
        flat, objects = (((first + ranks) * M.shared_stride + x % M.shared_stride).reshape(-1) for x in (flat, objects))
        threads = np.tile(threads, M.cluster_size)
    ids = M.mbarriers.find(objects, threads, issue.line, "clusterlaunchcontrol.try_cancel")
    if M.race:
        M.race.async_write(threads, flat[:, None], _ANSWER, ids, issue.line)

    def move(M, i):
        M.shared_views[16][flat[i] >> 4] = 0
        if M.race:
            M.race.async_landed(flat[i : i + 1, None], _ANSWER, ids[i : i + 1])

    M.async_copies.load(Line(move, threads, issue.line, np.full(threads.size, _ANSWER), ids))


@emits("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """query_cancel.is_canceled.pred.b128 p, answer."""
    mods.type("b128")
    mods.one("pred")
    dst, answer = e.operands(2)
    e.set(dst, f"(answer_word({e.value(answer, 'c16')}, 0) != u32(0))", "bool")


_AXES = {f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}": i for i, axis in enumerate("xyz")}


@emits("clusterlaunchcontrol.query_cancel.get_first_ctaid", *_AXES)
def first_cta(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """query_cancel.get_first_ctaid{::axis}.b32.b128, or .v4.b32.b128 with all three."""
    mods.type("b128")
    mods.type("b32")
    whole = bool(mods.take("v4"))
    dst, answer = e.operands(2)
    axis = _AXES.get(".".join((ins.opcode, *ins.modifiers[:2])))
    if whole != (axis is None) or whole != isinstance(dst, Vector):
        raise e.fail("get_first_ctaid gives one axis, or with .v4 all of them")
    for item, word in [(x, i + 1) for i, x in enumerate(dst.items[:3])] if whole else [(dst, axis + 1)]:
        e.set(item, f"answer_word({e.value(answer, 'c16')}, {word})", "u32")


@runtime
def answer_word(answer, index):
    """Word 0: taken over or not. The others: the CTA, poison in a declined answer."""
    words = np.ascontiguousarray(answer).view(np.uint32).reshape(-1, 4)
    if index == 0:
        return words[:, 0].copy()
    return np.where(words[:, 0] != 0, words[:, index], np.uint32(0xFFFFFFFF))
