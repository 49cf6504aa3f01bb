"""cvt between integers and floats of every size, with packing (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

import numpy as np

from ..directed import narrow, round_to_odd, step
from ..emitter import NUMPY, Emitter, Modifiers
from ..numerics import bf16_bits, bf16_value, f16_bits, to_f32_odd
from ..ptx.records import Instruction
from ..registry import emits, runtime
from .packed import decode, encode

_ROUND = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
_MODES = ("rn", "rz", "rm", "rp")
_HALVES = ("bf16", "f16")
_PAIRS = ("bf16x2", "f16x2")
_FLOATS = ("f16", "bf16", "f32", "f64")
_SMALL = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


@emits("cvt")
def convert(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cvt.<modifiers>.<destination>.<source>."""
    if len(mods.left) < 2:
        raise e.fail("cvt needs a destination and a source type")
    source, target = mods.left.pop(), mods.left.pop()
    if target in _SMALL or source in _SMALL or "ue8m0x2" in (target, source):
        _small(e, ins, mods, target, source)
    elif target in _PAIRS and source == "f32":
        _pack(e, ins, mods, target)
    elif target == "tf32" and source == "f32":
        _to_tf32(e, ins, mods)
    elif target in _INTEGERS and source in _INTEGERS:
        _integers(e, ins, mods, target, source)
    elif target in _INTEGERS and source in _FLOATS:
        _float_to_integer(e, ins, mods, target, source)
    elif target in _FLOATS and source in _INTEGERS:
        _integer_to_float(e, ins, mods, target, source)
    elif target in _FLOATS and source in _FLOATS:
        _floats(e, ins, mods, target, source)
    else:
        raise e.fail(f"cvt from .{source} to .{target} is not emulated; add it to ops/convert.py with a test")


def _value(e: Emitter, operand: object, kind: str) -> str:
    return decode(e, operand, kind)[0] if kind in _HALVES else e.value(operand, NUMPY[kind])


def _pack(e: Emitter, ins: Instruction, mods: Modifiers, target: str) -> None:
    rounding = mods.one("rn", "rz")
    relu, finite = bool(mods.take("relu")), bool(mods.take("satfinite"))
    dst, high, low = e.operands(3)
    if rounding == "rn" and not relu and not finite:
        encode(e, dst, [e.value(x, "f32") for x in (low, high)], target)
        return
    bits = [f"half_bits({e.value(x, 'f32')}, {target[:-2]!r}, {rounding!r}, {relu}, {finite})" for x in (low, high)]
    e.set(dst, f"({bits[0]} | ({bits[1]} << u32(16)))", "u32")


def _to_tf32(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    rounding = mods.one("rna", "rn", "rz")
    relu, finite = bool(mods.take("relu")), bool(mods.take("satfinite"))
    dst, a = e.operands(2)
    e.set(dst, f"tf32_bits({e.value(a, 'f32')}, {rounding!r}, {finite}, {relu})", "u32")


def _integers(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    dst, a = e.operands(2)
    x = e.value(a, NUMPY[source])
    if mods.take("sat"):
        e.set(dst, f"clamp_integer({x}, {NUMPY[target]})", NUMPY[target])
    else:
        e.set(dst, f"{x}.astype({NUMPY[target]})", NUMPY[target])


def _float_to_integer(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    rounding = _ROUND[mods.one(*_ROUND)]
    flush = mods.take("ftz")
    mods.take("sat")  # conversion to an integer always clamps
    dst, a = e.operands(2)
    x = _value(e, a, source)
    if flush:
        x = f"ftz({x})"
    e.set(dst, f"saturate({rounding}({x}), {NUMPY[target]})", NUMPY[target])


def _integer_to_float(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    rounding = mods.one(*_MODES)
    sat = bool(mods.take("sat"))
    dst, a = e.operands(2)
    x = e.value(a, NUMPY[source])
    if target in _HALVES:
        wide = f"odd_f64({x})" if source in ("u64", "s64") else f"({x}).astype(f64)"
        e.set(dst, f"half_bits({wide}, {target!r}, {rounding!r}, False, False).astype(u16)", "u16")
        return
    code = (
        f"{x}.astype({NUMPY[target]})" if rounding == "rn" else f"integer_rounded({x}, {NUMPY[target]}, {rounding!r})"
    )
    e.set(dst, f"np.clip({code}, 0, 1).astype({NUMPY[target]})" if sat else code, NUMPY[target])


def _floats(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    flush = bool(mods.take("ftz"))
    integral = mods.take(*_ROUND)
    rounding = mods.take(*_MODES)
    relu, finite, sat = bool(mods.take("relu")), bool(mods.take("satfinite")), bool(mods.take("sat"))
    dst, a = e.operands(2)
    code = _value(e, a, source)
    if flush and source == "f32":
        code = f"ftz({code})"
    if integral:
        code = f"{_ROUND[integral]}({code})"
    narrower = (source, target) in (("f64", "f32"), *((s, t) for s in ("f64", "f32") for t in _HALVES))
    if narrower and rounding is None and not integral:
        raise e.fail(f"cvt from .{source} to .{target} needs a rounding mode")
    if target in _HALVES:
        code = f"np.fmin(np.fmax({code}, 0), 1).astype({'f64' if source == 'f64' else 'f32'})" if sat else code
        code = f"half_bits({code}, {target!r}, {rounding or 'rn'!r}, {relu}, {finite})"
        e.set(dst, f"{code}.astype(u16)", "u16")
        return
    if source == "f64" and target == "f32":
        if rounding == "rn" or rounding is None:
            code = f"{code}.astype(f32)"
        else:
            code = f"narrow({code}, np.zeros(1), {rounding!r}, np.isfinite({code}))"
    elif target == "f64" and source != "f64":
        code = f"{code}.astype(f64)"
    if sat:
        code = f"np.fmin(np.fmax({code}, {NUMPY[target]}(0)), {NUMPY[target]}(1))"
    e.set(dst, f"ftz({code})" if flush and target == "f32" else code, NUMPY[target])


def _small(e: Emitter, ins: Instruction, mods: Modifiers, target: str, source: str) -> None:
    """Pairs of 4-, 6- and 8-bit floats; the first source goes to the upper half."""
    relu, finite, up = bool(mods.take("relu")), bool(mods.take("satfinite")), False
    rounding = mods.one("rn", "rz", "rp")
    if target == "ue8m0x2":
        up = rounding == "rp"
    elif rounding != "rn":
        raise e.fail(f".{rounding} goes with .ue8m0x2 only")
    if source in _PAIRS or source == "f32":
        dst, *sources = e.operands(3 if source == "f32" else 2)
        values = [e.value(x, "f32") for x in reversed(sources)] if source == "f32" else decode(e, sources[0], source)
        if target == "ue8m0x2":
            low, high = (f"scale_bits({v}, {up})" for v in values)
        else:
            low, high = (f"small_bits({v}, {target[:-2]!r}, {finite}, {relu})" for v in values)
        width = 4 if target == "e2m1x2" else 8
        e.set(dst, f"({low} | ({high} << u32({width}))).astype(u16)", "u16")
    elif target in _PAIRS:
        dst, a = e.operands(2)
        width = 4 if source == "e2m1x2" else 8
        word = e.value(a, "u16")
        mask = (1 << width) - 1
        codes = [f"({word} & u16({mask}))", f"(({word} >> u16({width})) & u16({mask}))"]
        values = [f"small_value({c}, {source[:-2]!r})" for c in codes]
        values = [f"np.where({v} < 0, f32(0), {v})" for v in values] if relu else values
        encode(e, dst, values, target)
    else:
        raise e.fail(f"cvt from .{source} to .{target} is not emulated; add it to ops/convert.py with a test")


@emits("cvt.pack")
def convert_pack(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cvt.pack.sat: two s32 clamped to 16 bits, or to 8 bits below a third word's low half."""
    mods.one("sat")
    last = mods.take("b32")
    mods.type("s32")
    kind = mods.type("u16", "s16", "u8", "s8")
    if (kind in ("u8", "s8")) != bool(last):
        raise e.fail("cvt.pack to 8 bits takes a third source of type .b32, to 16 bits none")
    dst, a, b, *rest = e.operands(4 if last else 3)
    bits = int(kind[1:])
    low, high = (f"(clamp_integer({e.value(x, 'i32')}, {NUMPY[kind]}).view(u{bits}).astype(u32))" for x in (b, a))
    code = f"({low} | ({high} << u32({bits})))"
    if rest:
        code = f"({code} | ({e.value(rest[0], 'u32')} << u32(16)))"
    e.set(dst, code, "u32")


@runtime
def integer_rounded(x: np.ndarray, kind: type, rounding: str) -> np.ndarray:
    """Integers to floats in a rounding mode other than nearest."""
    s = x.astype(kind)
    error = x.astype(np.longdouble) - s.astype(np.longdouble)
    return step(s, error, rounding)


@runtime
def odd_f64(x: np.ndarray) -> np.ndarray:
    """64-bit integers as f64 with the last bit set where something is lost: a later rounding is the only one."""
    y = x.astype(np.float64)
    return round_to_odd(y, (x.astype(np.longdouble) - y).astype(np.float64))


@runtime
def half_bits(x: np.ndarray, kind: str, rounding: str, relu: bool, finite: bool) -> np.ndarray:
    """f32 or f64 to f16 or bf16 bits in a u32, in any rounding mode."""
    if relu:
        x = np.where(np.isnan(x), x, np.maximum(x, 0)).astype(x.dtype)
    wide = x
    if x.dtype == np.float64 and kind == "bf16":
        x = to_f32_odd(x)
    bits = bf16_bits(x) if kind == "bf16" else f16_bits(x)
    largest = np.uint32(0x7F7F if kind == "bf16" else 0x7BFF)
    if rounding != "rn":
        got = bf16_value(bits.astype(np.uint16)) if kind == "bf16" else bits.astype(np.uint16).view(np.float16)
        got = got.astype(np.float64)
        magnitude, sign = bits & np.uint32(0x7FFF), bits & np.uint32(0x8000)
        down = (np.abs(got) > np.abs(wide)) & np.isfinite(wide)
        short = (np.abs(got) < np.abs(wide)) & np.isfinite(wide)
        outward = np.signbit(wide) if rounding == "rm" else ~np.signbit(wide)
        outward = outward & np.bool_(rounding != "rz")
        magnitude = np.where(down & ~outward, magnitude - np.uint32(1), magnitude)
        magnitude = np.where(short & outward, magnitude + np.uint32(1), magnitude)
        bits = magnitude | np.where(np.signbit(wide) & ~np.isnan(wide), np.uint32(0x8000), sign)
    if finite:
        over = (bits & np.uint32(0x7FFF)) > largest
        bits = np.where(over & ~np.isnan(wide), (bits & np.uint32(0x8000)) | largest, bits)
    return bits.astype(np.uint32)


runtime(narrow)
