"""wgmma: products of warpgroups, in flight until wgmma.wait_group (PTX ISA 9.7.15).

Issue, fence, commit and wait hand over to ``tiles``, which keeps what is in flight.
"""

from __future__ import annotations

import re

import numpy as np

from ..emitter import Emitter, Modifiers
from ..fragments import SIZE
from ..issue import Issue
from ..products import Product
from ..ptx.records import Immediate, Instruction, Register, Vector
from ..registry import emits, runtime

_TYPES = {
    "bf16": ("f32",),
    "f16": ("f32", "f16"),
    "tf32": ("f32",),
    "e4m3": ("f32", "f16"),
    "e5m2": ("f32", "f16"),
    "s8": ("s32",),
    "u8": ("s32",),
}


@emits("wgmma.mma_async", writes=False, collective=128, tiles=True)
def multiply(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wgmma.mma_async.sync.aligned.m64nNkK.d.a.b D, A, B-desc, scale-d{, imm-scale-a, imm-scale-b{, imm-trans…}}."""
    mods.one("sync")
    mods.one("aligned")
    saturate = bool(mods.take("satfinite"))
    b_kind, a_kind = mods.left.pop(), mods.left.pop()
    d_kind = mods.left.pop()
    shape = re.match(r"m64n(\d+)k(\d+)$", mods.left.pop() if mods.left else "")
    if a_kind not in _TYPES or b_kind not in _TYPES or SIZE[a_kind] != SIZE[b_kind] or d_kind not in _TYPES[a_kind]:
        raise e.fail(f"wgmma of .{d_kind}.{a_kind}.{b_kind} is not emulated")
    if not shape or int(shape[2]) * SIZE[a_kind] != 32 or int(shape[1]) % 8 or not 8 <= int(shape[1]) <= 256:
        raise e.fail("the shape must be m64nNkK with N a multiple of 8 up to 256 and K of 32 bytes")
    if saturate:
        raise e.fail("saturating integer wgmma is not emulated")
    if ins.guard:
        raise e.fail("a guarded wgmma is not emulated")
    n = int(shape[1])
    d, a, b, scale_d, *flags = ins.operands
    registers = _registers(e, d, n // 4 if d_kind == "f16" else n // 2)
    flags = [_constant(e, f) for f in flags]
    scales, trans = ((flags[0], flags[1]), flags[2:]) if d_kind != "s32" else ((1, 1), flags)
    from_registers = isinstance(a, Vector)
    wanted = (1 if from_registers else 2) if SIZE[a_kind] == 2 else 0
    if len(trans) != wanted or any(s not in (1, -1) for s in scales) or any(t not in (0, 1) for t in trans):
        raise e.fail("the scale or transpose operands do not fit these types")
    product = Product(
        n=n,
        d=registers,
        d_kind=d_kind,
        a=_registers(e, a, 4) if from_registers else None,
        a_kind=a_kind,
        b_kind=b_kind,
        scale=scales[0] * scales[1],
        a_mn=bool(trans[0]) if wanted == 2 else False,
        b_mn=bool(trans[-1]) if wanted else False,
        line=ins.line,
    )
    a_code = "None" if from_registers else e.value(a, "u64")
    e.line(f"wgmma_issue({e.issue()}, {e.static(product)}, {a_code}, {e.value(b, 'u64')}, {e.value(scale_d, 'bool')})")


def _registers(e: Emitter, operand: object, count: int) -> tuple[int, ...]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != count or not all(isinstance(r, Register) for r in items):
        raise e.fail(f"expected {count} registers, found {len(items)}")
    return tuple(r.number for r in items)


def _constant(e: Emitter, operand: object) -> int:
    if not isinstance(operand, Immediate):
        raise e.fail("the scale and transpose operands of wgmma are constants")
    return operand.value


@runtime
def wgmma_issue(issue: Issue, product: Product, a: np.ndarray | None, b: np.ndarray, scale_d: np.ndarray) -> None:
    issue.M.tiles.issue(issue, product, a, b, scale_d)


@emits("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", writes=False, collective=32)
def steer(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wgmma.fence, commit_group and wait_group N."""
    mods.one("sync")
    mods.one("aligned")
    what = ins.modifiers[0]
    left = _constant(e, e.operands(1)[0]) if what == "wait_group" else e.operands(0) and 0
    e.line(f"wgmma_{what}({e.issue()}, {left or 0})")


def _warps(issue: Issue) -> np.ndarray:
    """Warp numbers (slot * CTAs + CTA) of its threads; without a guard these are whole warps."""
    return issue.threads[::32] >> 5 if issue.chosen is None else np.unique(issue.threads >> 5)


@runtime
def wgmma_fence(issue: Issue, left: int) -> None:
    issue.M.tiles.fence(_warps(issue))


@runtime
def wgmma_commit_group(issue: Issue, left: int) -> None:
    issue.M.tiles.commit(_warps(issue))


@runtime
def wgmma_wait_group(issue: Issue, left: int) -> None:
    issue.M.tiles.wait(_warps(issue), left, issue.line)
