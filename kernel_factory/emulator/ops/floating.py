"""f32 and f64 arithmetic, approximations and comparisons' helpers.

The approximate opcodes (ex2, rcp, …) use NumPy's float32 functions: closer to the true value than the GPU's.
"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers
from ..ptx.records import Instruction
from ..registry import emits, runtime

_SIGNS = {"add": "+", "sub": "-", "mul": "*"}


def finish(e: Emitter, mods: Modifiers, code: str, flush: bool) -> str:
    """Saturation to [0, 1] (NaN to +0) and flush to zero of a result."""
    if mods.take("sat"):
        code = f"np.fmin(np.fmax({code}, f32(0)), f32(1))"
    return f"ftz({code})" if flush else code


def arithmetic(e: Emitter, ins: Instruction, mods: Modifiers, kind: str) -> None:
    """add, sub, mul, neg, abs of f32 and f64, and fma, min, max of f32; here only round to nearest even."""
    dtype = NUMPY[kind]
    flush = bool(mods.take("ftz"))
    dst, *sources = ins.operands
    x = [f"ftz({e.value(s, dtype)})" if flush else e.value(s, dtype) for s in sources]
    op = ins.opcode
    if op in ("min", "max"):
        _extreme(e, ins, mods, kind, x, dst)
    elif op in ("neg", "abs"):
        e.set(dst, f"(-{x[0]})" if op == "neg" else f"np.abs({x[0]})", dtype)
    else:
        rounding = mods.take("rn")
        if op in ("fma", "mad"):
            if rounding is None or kind == "f64":
                raise e.fail("fma is emulated for .rn.f32 only")
            code = f"fma({', '.join(x)})"
        else:
            code = f"({x[0]} {_SIGNS[op]} {x[1]})"
        e.set(dst, finish(e, mods, code, flush), dtype)


def _extreme(e: Emitter, ins: Instruction, mods: Modifiers, kind: str, x: list[str], dst: object) -> None:
    nan = mods.take("NaN")
    signs = x
    if mods.take("xorsign"):
        mods.one("abs")
        x = [f"np.abs({v})" for v in x]
    if nan and len(x) == 2:
        code = f"np.{ins.opcode}imum({x[0]}, {x[1]})"
    else:
        code = f"float_{ins.opcode}({x[0]}, {x[1]})"
        if len(x) == 3:
            code = f"float_{ins.opcode}({code}, {x[2]})"
            if nan:
                code = f"nan_if(np.isnan({x[0]}) | np.isnan({x[1]}) | np.isnan({x[2]}), {code})"
    if signs is not x:
        code = f"np.copysign({code}, np.where(np.signbit({signs[0]}) ^ np.signbit({signs[1]}), f32(-1), f32(1)))"
    e.set(dst, f"canonical_nan({code})" if nan and len(x) == 2 else code, "f32")


def division(e: Emitter, ins: Instruction, mods: Modifiers, kind: str) -> None:
    """div.rn, div.full and div.approx."""
    if ins.opcode != "div":
        raise e.fail("rem is for integers")
    approximate = mods.one("rn", "full", "approx") == "approx"
    flush = bool(mods.take("ftz"))
    dst, a, b = e.operands(3)
    x = [f"ftz({e.value(s, NUMPY[kind])})" if flush else e.value(s, NUMPY[kind]) for s in (a, b)]
    below = f"far_is_infinite({x[1]})" if approximate else x[1]
    e.set(dst, finish(e, mods, f"({x[0]} / {below})", flush), NUMPY[kind])


@runtime
def far_is_infinite(x: np.ndarray) -> np.ndarray:
    """div.approx.f32 multiplies by a reciprocal that is zero for denominators past 2**126 (PTX ISA 9.7.3.8)."""
    return np.where(np.abs(x) > np.float32(2.0**126), np.copysign(np.float32(np.inf), x), x)


_UNARY = {
    "ex2": "np.exp2({})",
    "lg2": "np.log2({})",
    "rcp": "(f32(1) / {})",
    "sqrt": "np.sqrt({})",
    "rsqrt": "(1.0 / np.sqrt({}.astype(f64))).astype(f32)",
    "tanh": "np.tanh({})",
    "sin": "np.sin({})",
    "cos": "np.cos({})",
}


@emits(*_UNARY)
def unary(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """ex2, lg2, rcp, sqrt, rsqrt, tanh, sin, cos of f32; ex2 and tanh also of bf16 and f16, one or two a word."""
    halves = ("bf16", "f16", "bf16x2", "f16x2") if ins.opcode in ("ex2", "tanh") else ()
    kind = mods.type("f32", *halves)
    mods.one("approx", *(("rn",) if ins.opcode in ("rcp", "sqrt") else ()))
    flush = bool(mods.take("ftz"))
    dst, a = e.operands(2)
    if kind != "f32":
        from .packed import half_unary

        half_unary(e, dst, a, kind, _UNARY[ins.opcode])
        return
    x = e.value(a, "f32")
    if flush and ins.opcode not in ("ex2", "tanh", "cos"):
        x = f"ftz({x})"
    code = _UNARY[ins.opcode].format(x)
    e.set(dst, f"ftz({code})" if flush and ins.opcode not in ("lg2", "cos") else code, "f32")


@emits("copysign")
def copysign(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Sign of the first operand on the magnitude of the second."""
    dtype = NUMPY[mods.type("f32", "f64")]
    dst, a, b = e.operands(3)
    e.set(dst, f"np.copysign({e.value(b, dtype)}, {e.value(a, dtype)})", dtype)
