"""Opcodes that stand alone: set, isspacep, movmatrix, failing assertions.

PTX ISA 9.7.6.1 (set), 9.7.9.18 (isspacep), 9.7.14.5.16 (movmatrix).
"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers
from ..errors import Fault
from ..lanes import threads_of
from ..ptx.records import Instruction
from ..registry import emits, runtime, terminates
from .move import _LOGIC, _compare, _halves, _operand
from .packed import encode

_SPACES = {"shared": 1, "local": 2, "param": 4}


@emits("set")
def set_word(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Compare, and write all ones (integers) or 1.0 (floats) where it holds."""
    source = mods.type()
    target = mods.type("u32", "s32", "f32", "u16", "s16", "f16", "bf16", "f16x2", "bf16x2")
    flush = mods.take("ftz")
    compare = mods.left.pop(0) if mods.left else ""
    logic = mods.take(*_LOGIC)
    dst, a, b, *rest = ins.operands
    if len(rest) != bool(logic):
        raise e.fail("set takes a third source with .and, .or or .xor only")
    third = e.value(rest[0], "bool") if logic else ""
    if source in ("f16x2", "bf16x2"):
        pairs = zip(_halves(e, a, source, flush), _halves(e, b, source, flush), strict=True)
        found = [_compare(e, source[:-2], compare, x, y) for x, y in pairs]
    else:
        found = [_compare(e, source, compare, _operand(e, a, source, flush), _operand(e, b, source, flush))]
    if logic:
        found = [f"({x} {_LOGIC[logic]} {third})" for x in found]
    if target in ("f16", "bf16", "f16x2", "bf16x2"):
        encode(e, dst, [f"{x}.astype(f32)" for x in found], target)
    elif target == "f32":
        e.set(dst, f"{found[0]}.astype(f32)", "f32")
    elif len(found) == 2:
        low, high = (f"(-{x}.astype(i32)).astype(u32)" for x in found)
        e.set(dst, f"(({low} & u32(0xffff)) | ({high} << u32(16)))", "u32")
    else:
        dtype = NUMPY[target]
        e.set(dst, f"(-{found[0]}.astype(i32)).astype({dtype})", dtype)


@emits("isspacep")
def is_space(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Does a generic address lie in a state space?"""
    space = mods.one("global", "shared", "shared::cta", "local", "param", "param::entry", "const").split("::")[0]
    dst, a = e.operands(2)
    top = f"({e.value(a, 'u64')} >> u64(60))"
    code = f"({top} == u64({_SPACES[space]}))" if space in _SPACES else f"({top} == u64(0))"
    e.set(dst, code, "bool")


@emits("movmatrix", collective=32)
def transpose_matrix(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """movmatrix.sync.aligned.m8n8.trans.b16: the transpose of an 8x8 matrix held across the warp."""
    mods.type("b16")
    for name in ("sync", "aligned", "m8n8", "trans"):
        mods.one(name)
    if ins.guard:
        raise e.fail("a guarded movmatrix is not emulated")
    dst, a = e.operands(2)
    e.set(dst, f"matrix_transposed({e.value(a, 'u32')}, n)", "u32")


@runtime
def matrix_transposed(a, n):
    halves = np.ascontiguousarray(np.broadcast_to(a, n)).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1).view(np.uint32)


@emits("brkpt", "pmevent", writes=False)
def marker(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Debugger marks: nothing happens."""
    mods.left.clear()


def resolve_assertion(M, group, block, sel, n, failed) -> None:
    """__assertfail ends the run."""
    ids = threads_of(M, sel)
    raise Fault(
        "assertion",
        block.terminator.line,
        "a device assertion failed",
        "see the condition that guards the call",
        int(ids[0]),
    )


@terminates("assertfail", resolve=resolve_assertion)
def assertion(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """What a call of __assertfail becomes."""
    return "None"
