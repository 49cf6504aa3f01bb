"""Packed arithmetic: two f32 in 64 bits (sm_100 and later), and bf16 or f16, one or two a word."""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..ptx.records import Instruction
from ..registry import runtime

_LAMBDA = {"add": "lambda a, b: a + b", "sub": "lambda a, b: a - b", "mul": "lambda a, b: a * b", "fma": "fma"}
_HALF = {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "min": "float_min({0}, {1})",
    "max": "float_max({0}, {1})",
    "neg": "(-{0})",
    "abs": "np.abs({0})",
    "fma": "fma_half({0}, {1}, {2})",
}


def pair_arithmetic(e: Emitter, ins: Instruction, mods: Modifiers, kind: str) -> None:
    """add, sub, mul, fma of f32x2."""
    if ins.opcode not in _LAMBDA:
        raise e.fail(f"{ins.opcode}.f32x2 is not emulated")
    mods.take("rn")
    flush = mods.take("ftz")
    dst, *sources = ins.operands
    code = _LAMBDA[ins.opcode]
    if flush:
        names = "abc"[: len(sources)]
        code = f"lambda {', '.join(names)}: ftz(({code})({', '.join(f'ftz({x})' for x in names)}))"
    e.set(dst, f"pair_map({code}, {', '.join(e.value(s, 'u64') for s in sources)})", "u64")


def decode(e: Emitter, operand: object, kind: str) -> list[str]:
    """The f32 values in a bf16, f16, bf16x2 or f16x2 operand, low half first."""
    if kind == "bf16":
        return [f"bf16_value({e.value(operand, 'u16')})"]
    if kind == "f16":
        return [f"{e.value(operand, 'f16')}.astype(f32)"]
    word = e.value(operand, "u32")
    if kind == "bf16x2":
        return [f"low_bf16({word})", f"high_bf16({word})"]
    return [f"{word}.astype(u16).view(f16).astype(f32)", f"({word} >> u32(16)).astype(u16).view(f16).astype(f32)"]


def encode(e: Emitter, dst: object, values: list[str], kind: str) -> None:
    """Round f32 expressions to the half type and store them in ``dst``."""
    bits = [f"{'bf16_bits' if kind.startswith('bf16') else 'f16_bits'}({v})" for v in values]
    if len(bits) == 1:
        e.set(dst, f"{bits[0]}.astype(u16)", "u16")
    else:
        e.set(dst, f"({bits[0]} | ({bits[1]} << u32(16)))", "u32")


def half_arithmetic(e: Emitter, ins: Instruction, mods: Modifiers, kind: str) -> None:
    """Arithmetic through f32, which is wide enough that only the last rounding shows."""
    if ins.opcode not in _HALF:
        raise e.fail(f"{ins.opcode}.{kind} is not emulated")
    mods.take("rn")
    relu, nan, flush, sat = (mods.take(x) for x in ("relu", "NaN", "ftz", "sat"))
    signs = ins.opcode in ("min", "max") and mods.take("xorsign")
    if signs:
        mods.one("abs")
    dst, *sources = ins.operands
    if ins.opcode in ("neg", "abs") and not flush:
        _sign_bits(e, ins, kind, dst, sources[0])
        return
    parts = [decode(e, s, kind) for s in sources]
    if nan and ins.opcode not in ("min", "max"):
        raise e.fail(f".NaN does not go with {ins.opcode}")
    values = []
    for lane in zip(*parts, strict=True):
        lane = [f"flush_half({x}, {kind!r})" for x in lane] if flush else lane
        heads = lane
        lane = [f"np.abs({x})" for x in lane] if signs else lane
        code = _HALF[ins.opcode].format(*lane)
        if nan:
            code = f"nan_if(nan_either({lane[0]}, {lane[1]}), {code})"
        if signs:
            code = f"np.copysign({code}, np.where(np.signbit({heads[0]}) ^ np.signbit({heads[1]}), f32(-1), f32(1)))"
        if sat:
            code = f"np.fmin(np.fmax({code}, f32(0)), f32(1))"
        code = f"np.maximum({code}, f32(0))" if relu else code
        values.append(f"flush_half({code}, {kind!r})" if flush else code)
    encode(e, dst, values, kind)


@runtime
def flush_half(x, kind):
    """Subnormal halves become zeros of the same sign (.ftz on f16)."""
    tiny = np.float32(2.0**-14 if kind.startswith("f16") else 2.0**-126)
    return np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x)


def mixed_arithmetic(e: Emitter, ins: Instruction, mods: Modifiers, kind: str) -> None:
    """add, sub, fma of f32 with bf16 or f16 inputs (sm_100 and later): all but the last source are halves."""
    if ins.opcode not in ("add", "sub", "fma"):
        raise e.fail(f"{ins.opcode}.f32.{kind} is not emulated")
    mods.take("rn")
    dst, *sources = e.operands(4 if ins.opcode == "fma" else 3)
    x = [*(decode(e, s, kind)[0] for s in sources[:-1]), e.value(sources[-1], "f32")]
    code = {"add": "({0} + {1})", "sub": "({0} - {1})", "fma": "fma({0}, {1}, {2})"}[ins.opcode].format(*x)
    if mods.take("sat"):
        code = f"np.fmin(np.fmax({code}, f32(0)), f32(1))"
    e.set(dst, code, "f32")


def _sign_bits(e: Emitter, ins: Instruction, kind: str, dst: object, source: object) -> None:
    dtype = "u32" if kind.endswith("x2") else "u16"
    sign = 0x80008000 if dtype == "u32" else 0x8000
    word = e.value(source, dtype)
    e.set(
        dst,
        f"({word} ^ {dtype}({sign}))"
        if ins.opcode == "neg"
        else f"({word} & {dtype}({sign ^ (2 ** int(dtype[1:]) - 1)}))",
        dtype,
    )


def half_unary(e: Emitter, dst: object, source: object, kind: str, pattern: str) -> None:
    """ex2 and tanh on half types."""
    encode(e, dst, [pattern.format(v) for v in decode(e, source, kind)], kind)
