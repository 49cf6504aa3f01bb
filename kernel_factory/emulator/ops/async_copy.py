"""cp.async: data is captured at issue and lands only at the wait that covers it, the latest moment that is legal.

Eager completion would hide every missing wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..lanes import spread
from ..ptx.records import Immediate, Instruction
from ..registry import emits, runtime
from .memory_access import WORDS, global_take, shared_flat


@emits("cp.async.ca", "cp.async.cg", writes=False)
def issue(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async of 4, 8 or 16 bytes; with a source size, the rest of the bytes are zeros."""
    mods.one("shared", "shared::cta")
    mods.one("global")
    policy = bool(mods.take("L2::cache_hint"))  # one operand more, ignored
    mods.ignore("L2::64B", "L2::128B", "L2::256B")
    target, source, size, *rest = ins.operands
    rest = rest[: len(rest) - policy]
    allowed = (16,) if ins.modifiers[1] == "cg" else (4, 8, 16)
    if not isinstance(size, Immediate) or size.value not in allowed:
        raise e.fail(f"the size of cp.async.{ins.modifiers[1]} must be one of {allowed}")
    if len(rest) > 1:
        raise e.fail("cache-policy operands of cp.async are not emulated")
    places = f"{e.shared_place(target)}, {e.global_place(source)}"
    count = e.value(rest[0], "u32") if rest else "None"
    e.line(f"async_issue({e.issue()}, {places}, {size.value}, {count})")


@emits("cp.async.commit_group", writes=False)
def commit(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Close the group of copies issued so far."""
    if ins.guard:
        raise e.fail("a guarded commit_group is not emulated")
    e.line("async_commit(M, sel)")


@emits("cp.async.wait_group", "cp.async.wait_all", writes=False)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Land the groups that the wait covers."""
    if ins.guard:
        raise e.fail("a guarded wait_group is not emulated")
    if ins.modifiers[1] == "wait_all":
        e.line(f"async_wait(M, sel, -1, {ins.line})")
    else:
        (left,) = e.operands(1)
        if not isinstance(left, Immediate):
            raise e.fail("the count of wait_group is no constant")
        e.line(f"async_wait(M, sel, {left.value}, {ins.line})")


@dataclass(slots=True)
class Copy:
    """One issued instruction: its threads, shared positions, data, and each thread's group number."""

    lanes: object
    threads: np.ndarray
    flat: np.ndarray
    data: np.ndarray
    group: np.ndarray
    size: int
    line: int

    def part(self, keep: np.ndarray) -> Copy:
        return Copy(None, self.threads[keep], self.flat[keep], self.data[keep], self.group[keep], self.size, self.line)

    def land(self, M: object) -> None:
        M.shared_views[self.size][self.flat >> (self.size.bit_length() - 1)] = self.data
        if M.race:
            M.race.landed(self.threads, self.flat, self.size, self.line)


@runtime
def async_issue(issue: Issue, target: tuple, source: tuple, size: int, count: np.ndarray | None) -> None:
    M, threads = issue.M, issue.threads
    flat = shared_flat(issue, target, size)
    if threads.size == 0:
        return
    if count is None:
        data = spread(global_take(issue, source, size), threads.size)
    else:
        data = _with_zeros(issue, source, size, issue.each(count))
    if M.race:
        M.race.launched(threads, flat, size, issue.line)
    if M.count:
        M.count.shared(issue, flat, size, "cp.async")
    lanes = issue.sel if issue.chosen is None and isinstance(issue.sel, slice) else None
    M.copies.append(Copy(lanes, threads, flat, data, M.groups[threads], size, issue.line))


def _with_zeros(issue: Issue, source: tuple, size: int, count: np.ndarray) -> np.ndarray:
    """Data of copies with a source size: bytes past it are zeros, and a size of zero reads nothing."""
    reading = np.flatnonzero(count > 0)
    out = np.zeros((count.shape[0], size), np.uint8)
    if reading.size:
        some = issue if reading.size == count.shape[0] else issue.narrowed(issue.lanes[reading])
        got = spread(global_take(some, source, size), reading.size)
        out[reading] = got.view(np.uint8).reshape(-1, size)
        short = np.flatnonzero(count < size)
        if short.size:
            out[short] *= np.arange(size)[None, :] < count[short, None]
    return out.view(WORDS[size]).reshape(-1)


@runtime
def async_commit(M, sel):
    if sel is None:
        M.groups += 1
    else:
        M.groups[sel] += 1


@runtime
def async_wait(M, sel, left, line):
    """Land every group but the newest ``left`` of these threads (-1: also what was never committed)."""
    limit = np.full(M.T, -1, np.int32)
    lanes = slice(None) if sel is None else sel
    limit[lanes] = M.groups[lanes] - left
    waiting = []
    for copy in M.copies:
        if copy.lanes is not None and isinstance(sel, slice) and copy.lanes != sel:
            waiting.append(copy)
            continue
        done = copy.group < limit[copy.threads]
        if done.all():
            copy.land(M)
        elif done.any():
            copy.part(done).land(M)
            waiting.append(copy.part(~done))
        else:
            waiting.append(copy)
    M.copies = waiting
