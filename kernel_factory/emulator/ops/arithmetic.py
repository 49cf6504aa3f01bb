"""Rounding modes other than nearest, and f64 (PTX ISA 9.7.3: add, sub, mul, fma, div, rcp, sqrt, rsqrt, min, max)."""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers
from ..ptx.records import Instruction
from ..registry import emits, runtime
from .floating import finish

_ROUNDED = ("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt")
_NAMES = [f"{op}.{r}" for op in _ROUNDED for r in ("rz", "rm", "rp")]


@emits(*_NAMES, "fma.rn.f64", "mad.rn.f64", "rcp.rn.f64", "sqrt.rn.f64")
def rounded(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """One correctly rounded operation in any of the four modes."""
    rounding = ins.modifiers[0]
    if ins.modifiers[:2] == ("rn", "f64"):
        mods.left.append("f64")  # it is part of the registered name
    pairs = ("f32x2",) if ins.opcode in ("add", "sub", "mul", "fma") else ()
    kind = mods.type("f32", "f64", *pairs)
    flush = bool(mods.take("ftz"))
    dst, *sources = e.operands({"fma": 4, "mad": 4, "rcp": 2, "sqrt": 2}.get(ins.opcode, 3))
    if kind == "f32x2":
        names = [f"x{i}" for i in range(len(sources))]
        shown = [f"ftz({x})" if flush else x for x in names]
        code = f"lambda {', '.join(names)}: {_call(ins.opcode, shown, rounding)}"
        if flush:
            code = f"lambda {', '.join(names)}: ftz({_call(ins.opcode, shown, rounding)})"
        e.set(dst, f"pair_map({code}, {', '.join(e.value(s, 'u64') for s in sources)})", "u64")
        return
    dtype = NUMPY[kind]
    x = [f"ftz({e.value(s, dtype)})" if flush else e.value(s, dtype) for s in sources]
    code = _call(ins.opcode, x, rounding)
    if ins.opcode == "rcp":
        code = f"divide_rounded(np.ones(1, {dtype}), {x[0]}, {rounding!r})"
    e.set(dst, finish(e, mods, code, flush) if kind == "f32" else code, dtype)


def _call(op: str, x: list[str], rounding: str) -> str:
    name = {
        "add": "add_rounded",
        "sub": "add_rounded",
        "mul": "multiply_rounded",
        "fma": "fma_rounded",
        "mad": "fma_rounded",
        "div": "divide_rounded",
        "rcp": "divide_rounded",
        "sqrt": "root_rounded",
    }[op]
    if op == "sub":
        x = [x[0], f"(-{x[1]})"]
    return f"{name}({', '.join(x)}, {rounding!r})"


@emits("min.f64", "max.f64")
def extreme(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """min and max of f64: a NaN loses, and -0 is less than +0."""
    dst, a, b = e.operands(3)
    e.set(dst, f"double_extreme({e.value(a, 'f64')}, {e.value(b, 'f64')}, {ins.opcode == 'max'})", "f64")


@runtime
def double_extreme(a, b, largest):
    out = (np.fmax if largest else np.fmin)(a, b)
    sign = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
    return np.where((a == 0) & (b == 0), np.where(sign, -0.0, 0.0), out)


@emits("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64")
def approximate(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Approximations of f64; the .ftz forms give the upper 32 bits only and a zero lower word."""
    dst, a = e.operands(2)
    coarse = "ftz" in ins.modifiers
    e.set(dst, f"coarse_f64({e.value(a, 'f64')}, {ins.opcode == 'rsqrt'}, {coarse})", "f64")


@runtime
def coarse_f64(x, root, coarse):
    out = 1.0 / (np.sqrt(x) if root else x)
    if not coarse:
        return out
    subnormal = np.abs(x) < np.finfo(np.float64).tiny
    out = np.where(subnormal, np.copysign(np.inf, x), out)
    words = np.ascontiguousarray(out).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    return words.view(np.float64)


_CLASSES = {
    "finite": "np.isfinite({0})",
    "infinite": "np.isinf({0})",
    "number": "(~np.isnan({0}))",
    "notanumber": "np.isnan({0})",
    "normal": "(np.isfinite({0}) & (np.abs({0}) >= np.finfo({1}).tiny))",
    "subnormal": "(({0} != 0) & (np.abs({0}) < np.finfo({1}).tiny))",
}


@emits("testp")
def test_class(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """testp: is a float finite, infinite, a number, NaN, normal or subnormal?"""
    dtype = NUMPY[mods.type("f32", "f64")]
    code = _CLASSES[mods.one(*_CLASSES)]
    dst, a = e.operands(2)
    e.set(dst, code.format(e.value(a, dtype), dtype), "bool")
