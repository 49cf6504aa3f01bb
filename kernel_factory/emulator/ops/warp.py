"""Warp collectives: shfl, vote, redux, elect, match-free; all 32 lanes of a warp must take part."""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers
from ..errors import Fault
from ..lanes import spread, threads_of
from ..ptx.records import Immediate, Instruction, Vector
from ..registry import emits, runtime

_FULL = 0xFFFFFFFF


def member_mask(e: Emitter, operand: object) -> None:
    """Only full warps are emulated; a constant mask is checked now, a register when it runs."""
    if isinstance(operand, Immediate):
        if operand.value & _FULL != _FULL:
            raise e.fail(f"member mask {operand.value:#x}: only full warps (0xffffffff) are emulated")
    else:
        e.line(f"full_mask(M, sel, {e.value(operand, 'u32')}, {e.ins.line})")


@runtime
def full_mask(M, sel, mask, line):
    if (mask != np.uint32(_FULL)).any():
        raise Fault(
            "unsupported",
            line,
            f"member mask {int(mask.min()):#x} of a warp collective",
            "only full warps (0xffffffff) are emulated; extend ops/warp.py",
            int(threads_of(M, sel, None)[0]),
        )


def _unguarded(e: Emitter, ins: Instruction) -> None:
    if ins.guard:
        raise e.fail(f"a guarded {ins.opcode} is not emulated")


@emits("shfl.sync", collective=32)
def shuffle(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """shfl.sync.{up,down,bfly,idx}.b32 with the optional predicate."""
    _unguarded(e, ins)
    mods.type("b32")
    mode = mods.one("up", "down", "bfly", "idx")
    dst, a, b, c, mask = e.operands(5)
    member_mask(e, mask)
    name = e.temp()
    e.line(f"{name} = shuffled({e.value(a, 'u32')}, {e.value(b, 'u32')}, {e.value(c, 'u32')}, {mode!r}, n)")
    targets = dst.items if isinstance(dst, Vector) else (dst,)
    e.set(targets[0], f"{name}[0]", "u32")
    if len(targets) > 1:
        e.set(targets[1], f"{name}[1]", "bool")


@runtime
def shuffled(a, b, c, mode, n):
    """Value of the source lane, and whether that lane was in range (PTX ISA 9.7.9.6)."""
    lane = np.arange(32)[None, :]
    a = spread(a, n).reshape(-1, 32)
    b = np.broadcast_to(b, n).reshape(-1, 32).astype(np.int64) & 31
    c = np.broadcast_to(c, n).reshape(-1, 32).astype(np.int64)
    clamp, segment = c & 31, (c >> 8) & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        j = lane - b
        good = j >= highest
    else:
        j = {"down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}[mode]
        good = j <= highest
    return np.take_along_axis(a, np.where(good, j, lane), 1).reshape(-1), np.ascontiguousarray(
        np.broadcast_to(good, a.shape)
    ).reshape(-1)


@emits("vote.sync", collective=32)
def vote(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """vote.sync.{all,any,uni}.pred and vote.sync.ballot.b32."""
    _unguarded(e, ins)
    kind = mods.type("pred", "b32")
    mode = mods.one("ballot") if kind == "b32" else mods.one("all", "any", "uni")
    dst, p, mask = e.operands(3)
    member_mask(e, mask)
    e.set(dst, f"voted({e.value(p, 'bool')}, {mode!r}, n)", "u32" if kind == "b32" else "bool")


@runtime
def voted(p, mode, n):
    p = np.broadcast_to(p, n).reshape(-1, 32)
    if mode == "ballot":
        out = (p.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
    else:
        out = {"all": p.all(1), "any": p.any(1), "uni": p.all(1) | ~p.any(1)}[mode]
    return np.repeat(out, 32)


@emits("redux.sync", collective=32)
def reduce_warp(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """redux.sync of integers and words, and min and max of f32."""
    _unguarded(e, ins)
    kind = mods.type("u32", "s32", "b32", "f32")
    allowed = {"b32": ("and", "or", "xor"), "f32": ("min", "max")}.get(kind, ("add", "min", "max"))
    op = mods.one(*allowed)
    dst, a, mask = e.operands(3)
    member_mask(e, mask)
    e.set(dst, f"reduced({e.value(a, NUMPY[kind])}, {op!r}, n)", NUMPY[kind])


@runtime
def reduced(a, op, n):
    ufunc = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[op]
    if a.dtype == np.float32 and op in ("min", "max"):
        ufunc = {"min": np.fmin, "max": np.fmax}[op]
    return np.repeat(ufunc.reduce(spread(a, n).reshape(-1, 32), axis=1, dtype=a.dtype), 32)


@emits("elect.sync", collective=32)
def elect(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """elect.sync: lane 0 is the leader."""
    _unguarded(e, ins)
    dst, mask = e.operands(2)
    member_mask(e, mask)
    targets = dst.items if isinstance(dst, Vector) else (dst,)
    e.set(targets[0], e.constant(np.uint32(0)), "u32")
    e.set(targets[1], "leaders(n)", "bool")


@runtime
def leaders(n):
    return np.arange(n) % 32 == 0


@emits("activemask")
def active_mask(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Lanes of the warp that run this instruction now."""
    mods.type("b32")
    (dst,) = e.operands(1)
    e.set(dst, "active_lanes(M, sel)", "u32")


@runtime
def active_lanes(M, sel):
    ids = threads_of(M, sel, None)
    words = np.zeros(M.T // 32, np.uint32)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return words[ids >> 5]


@emits("bar.warp.sync", collective=32, writes=False)
def warp_barrier(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """bar.warp.sync: orders the lanes' memory accesses; whole warps are here already."""
    _unguarded(e, ins)
    member_mask(e, e.operands(1)[0])
    e.line("warp_synced(M, sel)")


@runtime
def warp_synced(M, sel):
    if M.race:
        M.race.warp_barrier(threads_of(M, sel, None))
