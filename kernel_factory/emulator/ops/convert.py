"""cvt between integers and floats, and the packing conversions to bf16x2 and f16x2."""

from __future__ import annotations

from ..emitter import NUMPY, Emitter, Modifiers
from ..ptx.records import Instruction
from ..registry import emits
from .packed import decode, encode

_ROUND = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_HALVES = ("bf16", "f16")
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


@emits("cvt")
def convert(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cvt.<modifiers>.<destination>.<source>."""
    if len(mods.left) < 2:
        raise e.fail("cvt needs a destination and a source type")
    source, target = mods.left.pop(), mods.left.pop()
    flush = bool(mods.take("ftz"))
    if target in ("bf16x2", "f16x2") and source == "f32":
        _pack(e, ins, mods, target)
    elif target in _HALVES and source == "f32":
        _to_half(e, ins, mods, target)
    elif target == "tf32" and source == "f32":
        _to_tf32(e, ins, mods)
    elif source in _HALVES and target in ("f32", *_HALVES):
        _from_half(e, ins, mods, target, source)
    elif target in _INTEGERS and source in _INTEGERS:
        _integers(e, ins, mods, target, source)
    elif target in _INTEGERS and source in ("f32", "f64", *_HALVES):
        _float_to_integer(e, ins, mods, target, source, flush)
    elif target in ("f32", "f64") and source in _INTEGERS:
        mods.one("rn")
        dst, a = e.operands(2)
        e.set(dst, f"{e.value(a, NUMPY[source])}.astype({NUMPY[target]})", NUMPY[target])
    elif target in _HALVES and source in _INTEGERS:
        mods.one("rn")
        dst, a = e.operands(2)
        encode(e, dst, [f"to_f32_odd({e.value(a, NUMPY[source])}.astype(f64))"], target)
    elif target in ("f32", "f64") and source in ("f32", "f64"):
        _floats(e, ins, mods, target, source, flush)
    else:
        raise e.fail(f"cvt from .{source} to .{target} is not emulated; add it to ops/convert.py with a test")


def _pack(e: Emitter, ins: Instruction, mods: Modifiers, target: str) -> None:
    rounding = mods.one("rn", "rz")
    relu = mods.take("relu")
    dst, high, low = e.operands(3)
    values = [f"np.maximum({e.value(x, 'f32')}, f32(0))" if relu else e.value(x, "f32") for x in (low, high)]
    if rounding == "rn":
        encode(e, dst, values, target)
    elif target == "bf16x2":
        e.set(dst, f"(bf16_bits_rz({values[0]}) | (bf16_bits_rz({values[1]}) << u32(16)))", "u32")
    else:
        raise e.fail("cvt.rz.f16x2 is not emulated")


def _to_half(e: Emitter, ins: Instruction, mods: Modifiers, target: str) -> None:
    rounding = mods.one("rn", "rz")
    relu = mods.take("relu")
    dst, a = e.operands(2)
    value = f"np.maximum({e.value(a, 'f32')}, f32(0))" if relu else e.value(a, "f32")
    if rounding == "rn":
        encode(e, dst, [value], target)
    elif target == "bf16":
        e.set(dst, f"bf16_bits_rz({value}).astype(u16)", "u16")
    else:
        raise e.fail("cvt.rz.f16 is not emulated")


def _to_tf32(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.one("rna")
    dst, a = e.operands(2)
    e.set(dst, f"(({e.value(a, 'u32')} + u32(0x1000)) & u32(0xffffe000))", "u32")


def _from_half(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    dst, a = e.operands(2)
    value = decode(e, a, source)[0]
    if target == "f32":
        e.set(dst, value, "f32")
    else:
        mods.one("rn")
        encode(e, dst, [value], target)


def _integers(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    dst, a = e.operands(2)
    x = e.value(a, NUMPY[source])
    if mods.take("sat"):
        e.set(dst, f"clamp_integer({x}, {NUMPY[target]})", NUMPY[target])
    else:
        e.set(dst, f"{x}.astype({NUMPY[target]})", NUMPY[target])


def _float_to_integer(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str, flush: bool) -> None:
    rounding = _ROUND[mods.one(*_ROUND)]
    mods.take("sat")  # conversion to an integer always clamps
    dst, a = e.operands(2)
    x = decode(e, a, source)[0] if source in _HALVES else e.value(a, NUMPY[source])
    if flush:
        x = f"ftz({x})"
    e.set(dst, f"saturate({rounding}({x}), {NUMPY[target]})", NUMPY[target])


def _floats(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str, flush: bool) -> None:
    dst, a = e.operands(2)
    code = e.value(a, NUMPY[source])
    if flush:
        code = f"ftz({code})"
    if target == source:
        rounding = mods.take(*_ROUND)
        code = f"{_ROUND[rounding]}({code})" if rounding else code
    elif target == "f32":
        mods.one("rn")
    code = f"{code}.astype({NUMPY[target]})" if target != source else code
    if mods.take("sat"):
        code = f"np.fmin(np.fmax({code}, {NUMPY[target]}(0)), {NUMPY[target]}(1))"
    e.set(dst, f"ftz({code})" if flush and target == "f32" else code, NUMPY[target])
