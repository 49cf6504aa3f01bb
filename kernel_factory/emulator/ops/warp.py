"""Warp collectives: shfl, vote, match, redux, elect, activemask, bar.warp.sync (PTX ISA 9.7.9.6, 9.7.13).

Whole warps with a full member mask take the short path. Otherwise lanes are laid out as rows of 32 with the lanes
that are here, and every lane acts within its own mask; a mask that names a lane which is neither here nor done is a
finding, and so is a lane outside of its own mask.
"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers
from ..issue import Issue
from ..lanes import spread, threads_of
from ..ptx.records import Immediate, Instruction, Vector
from ..registry import emits, runtime
from .reductions import UFUNCS

_FULL = 0xFFFFFFFF
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
DONE = 3


def member_mask(e: Emitter, operand: object) -> str:
    """Expression of a member mask; "None" for the full one."""
    if isinstance(operand, Immediate) and operand.value & _FULL == _FULL:
        return "None"
    return e.value(operand, "u32")


def _unguarded(e: Emitter, ins: Instruction) -> None:
    if ins.guard:
        raise e.fail(f"a guarded {ins.opcode} is not emulated")


class Rows:
    """Lanes of some warps as rows of 32: who is here, each lane's members, and the way back."""

    def __init__(self, issue: Issue, mask: np.ndarray | None) -> None:
        ids, n = issue.threads, issue.n
        warps, row = np.unique(ids >> 5, return_inverse=True)
        self.at, self.shape, self.n = (row, ids & 31), (warps.shape[0], 32), n
        self.here = self.put(np.ones(n, bool))
        word = np.full(n, _FULL, np.uint32) if mask is None else spread(mask, n)
        self.mask = self.put(word)
        gone = (issue.M.state.reshape(-1, 32)[warps] == DONE) & ~self.here
        self.present = (self.here * _BITS).sum(1, dtype=np.uint32)[:, None]
        missing = self.here & ((self.mask & ~self.present & ~(gone * _BITS).sum(1, dtype=np.uint32)[:, None]) != 0)
        outside = self.here & ((self.mask & _BITS) == 0)
        for bad, what in ((missing, "names lanes that do not arrive"), (outside, "leaves out the lane itself")):
            if bad.any():
                at = int(np.flatnonzero(bad[self.at])[0])
                raise issue.fault(
                    "deadlock" if what.startswith("names") else "member-mask",
                    f"member mask {int(word[at]):#x} {what}",
                    "name exactly the lanes that execute the collective together",
                    at,
                )

    def put(self, x: np.ndarray) -> np.ndarray:
        out = np.zeros(self.shape, x.dtype)
        out[self.at] = spread(x, self.n)
        return out

    def take(self, x: np.ndarray) -> np.ndarray:
        return x[self.at]

    @property
    def members(self) -> np.ndarray:
        """(warps, lane, other lane): others that are here and in the lane's mask."""
        return ((self.mask & self.present)[:, :, None] & _BITS) != 0


def rows_of(issue: Issue, mask: np.ndarray | None) -> Rows | None:
    """None for whole warps with full masks."""
    sel = issue.sel
    if isinstance(sel, np.ndarray):
        whole = issue.n % 32 == 0 and not (sel[::32] & 31).any() and (sel[31::32] - sel[::32] == 31).all()
        if not whole:
            return Rows(issue, mask)
    return None if mask is None or (mask == np.uint32(_FULL)).all() else Rows(issue, mask)


@emits("shfl.sync", collective=32, partial=True)
def shuffle(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """shfl.sync.{up,down,bfly,idx}.b32 with the optional predicate."""
    _unguarded(e, ins)
    mods.type("b32")
    mode = mods.one("up", "down", "bfly", "idx")
    dst, a, b, c, mask = e.operands(5)
    name = e.temp()
    values = ", ".join(e.value(x, "u32") for x in (a, b, c))
    e.line(f"{name} = shuffled({e.issue()}, {member_mask(e, mask)}, {values}, {mode!r})")
    targets = dst.items if isinstance(dst, Vector) else (dst,)
    e.set(targets[0], f"{name}[0]", "u32")
    if len(targets) > 1:
        e.set(targets[1], f"{name}[1]", "bool")


@runtime
def shuffled(issue: Issue, mask, a, b, c, mode: str):
    """Value of the source lane, and whether that lane was in range (PTX ISA 9.7.9.6)."""
    rows = rows_of(issue, mask)
    lane = np.arange(32)[None, :]
    if rows is None:
        a, b, c = (spread(x, issue.n).reshape(-1, 32) for x in (a, b, c))
    else:
        a, b, c = rows.put(a), rows.put(b), rows.put(c)
    b, c = b.astype(np.int64) & 31, c.astype(np.int64)
    clamp, segment = c & 31, (c >> 8) & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        j = lane - b
        good = j >= highest
    else:
        j = {"down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}[mode]
        good = j <= highest
    source = np.where(good, j, lane)
    out = np.take_along_axis(a, source, 1)
    if rows is None:
        return out.reshape(-1), np.ascontiguousarray(np.broadcast_to(good, a.shape)).reshape(-1)
    known = np.take_along_axis(rows.members, source[:, :, None], 2)[..., 0]
    out = np.where(known, out, np.uint32(_FULL))  # a lane that takes no part: undefined, hence poison
    return rows.take(out), rows.take(np.broadcast_to(good, a.shape))


@emits("vote.sync", collective=32, partial=True)
def vote(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """vote.sync.{all,any,uni}.pred and vote.sync.ballot.b32."""
    _unguarded(e, ins)
    kind = mods.type("pred", "b32")
    mode = mods.one("ballot") if kind == "b32" else mods.one("all", "any", "uni")
    dst, p, mask = e.operands(3)
    code = f"voted({e.issue()}, {member_mask(e, mask)}, {e.value(p, 'bool')}, {mode!r})"
    e.set(dst, code, "u32" if kind == "b32" else "bool")


@runtime
def voted(issue: Issue, mask, p, mode: str):
    rows = rows_of(issue, mask)
    p = spread(p, issue.n).reshape(-1, 32) if rows is None else rows.put(p)
    ballot = (p * _BITS).sum(1, dtype=np.uint32)[:, None]
    members = np.uint32(_FULL) if rows is None else rows.mask & rows.present
    yes = np.broadcast_to(ballot & members, p.shape)
    out = {"ballot": yes, "all": yes == members, "any": yes != 0, "uni": (yes == members) | (yes == 0)}[mode]
    return np.ascontiguousarray(out).reshape(-1) if rows is None else rows.take(out)


@emits("match.any.sync", "match.all.sync", collective=32, partial=True)
def match(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """match.{any,all}.sync.{b32,b64}: lanes that hold the same value."""
    _unguarded(e, ins)
    dtype = NUMPY[mods.type("b32", "b64")]
    every = ins.modifiers[0] == "all"
    dst, a, mask = e.operands(3)
    name = e.temp()
    e.line(f"{name} = matched({e.issue()}, {member_mask(e, mask)}, {e.value(a, dtype)}, {every})")
    targets = dst.items if isinstance(dst, Vector) else (dst,)
    e.set(targets[0], f"{name}[0]", "u32")
    if len(targets) > 1:
        if not every:
            raise e.fail("match.any has no predicate")
        e.set(targets[1], f"{name}[1]", "bool")


@runtime
def matched(issue: Issue, mask, a, every: bool):
    rows = rows_of(issue, mask) or Rows(issue, mask)
    a = rows.put(a)
    equal = (a[:, :, None] == a[:, None, :]) & rows.members
    same = (equal * _BITS).sum(2, dtype=np.uint32)
    all_equal = same == (rows.mask & rows.present)
    out = np.where(all_equal, same, np.uint32(0)) if every else same
    return rows.take(out), rows.take(all_equal)


@emits("redux.sync", collective=32, partial=True)
def reduce_warp(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """redux.sync of integers and words, and min and max of f32 with .abs and .NaN."""
    _unguarded(e, ins)
    kind = mods.type("u32", "s32", "b32", "f32")
    allowed = {"b32": ("and", "or", "xor"), "f32": ("min", "max")}.get(kind, ("add", "min", "max"))
    op = mods.one(*allowed)
    absolute, nan = (bool(mods.take(x)) if kind == "f32" else False for x in ("abs", "NaN"))
    dst, a, mask = e.operands(3)
    value = f"np.abs({e.value(a, 'f32')})" if absolute else e.value(a, NUMPY[kind])
    code = f"reduced({e.issue()}, {member_mask(e, mask)}, {value}, {op!r}, {nan})"
    e.set(dst, code, NUMPY[kind])


@runtime
def reduced(issue: Issue, mask, a, op: str, nan: bool):
    rows = rows_of(issue, mask)
    ufunc = UFUNCS[op]
    if a.dtype == np.float32 and not nan:
        ufunc = {"min": np.fmin, "max": np.fmax}[op]
    if rows is None:
        return np.repeat(ufunc.reduce(spread(a, issue.n).reshape(-1, 32), axis=1, dtype=a.dtype), 32)
    values = rows.put(a)[:, None, :]
    neutral = np.take_along_axis(values, rows.members.argmax(2)[:, :, None], 2)  # the first member's own value
    chosen = np.where(rows.members, values, neutral)
    if op in ("add", "xor"):
        chosen = np.where(rows.members, values, a.dtype.type(0))
    return rows.take(ufunc.reduce(chosen, axis=2, dtype=a.dtype))


@emits("elect.sync", collective=32, partial=True)
def elect(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """elect.sync: the lowest lane of the mask is the leader."""
    _unguarded(e, ins)
    dst, mask = e.operands(2)
    targets = dst.items if isinstance(dst, Vector) else (dst,)
    members = member_mask(e, mask)
    name = e.temp()
    e.line(f"{name} = leaders({e.issue()}, {members})")
    e.set(targets[0], f"{name}[0]", "u32")
    if len(targets) > 1:
        e.set(targets[1], f"{name}[1]", "bool")


@runtime
def leaders(issue: Issue, mask):
    rows = rows_of(issue, mask)
    if rows is None:
        return np.zeros(1, np.uint32), np.arange(issue.n) % 32 == 0
    lowest = rows.members.argmax(2)
    return rows.take(lowest.astype(np.uint32)), rows.take(lowest == np.arange(32))


@emits("activemask")
def active_mask(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Lanes of the warp that run this instruction now."""
    mods.type("b32")
    (dst,) = e.operands(1)
    e.set(dst, "active_lanes(M, sel)", "u32")


@runtime
def active_lanes(M, sel):
    ids = threads_of(M, sel)
    words = np.zeros(M.T // 32, np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words[ids >> 5]


@emits("bar.warp.sync", collective=32, writes=False, partial=True)
def warp_barrier(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """bar.warp.sync: orders the lanes' memory accesses; its lanes are here already."""
    _unguarded(e, ins)
    (mask,) = e.operands(1)
    e.line(f"warp_synced({e.issue()}, {member_mask(e, mask)})")


@runtime
def warp_synced(issue: Issue, mask):
    rows, race, threads = rows_of(issue, mask), issue.M.race, issue.threads
    if race and rows is None:
        race.warp_barrier(threads)
    elif race:
        race.partial_warp_barrier(threads, rows.take(rows.members))
