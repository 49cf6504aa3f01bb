"""Integer, bit-field and predicate-logic opcodes. (add, sub, mul… dispatch here or to the float groups by type.)"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers, size_of
from ..ptx.records import Immediate, Instruction
from ..registry import emits
from . import floating, packed

INTEGERS = ("s16", "s32", "s64", "u16", "u32", "u64")
BITS = ("b16", "b32", "b64")
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_FLOAT_EMITTERS = {
    "f32": floating.arithmetic,
    "f64": floating.arithmetic,
    "f32x2": packed.pair_arithmetic,
    "bf16x2": packed.half_arithmetic,
    "f16x2": packed.half_arithmetic,
    "bf16": packed.half_arithmetic,
    "f16": packed.half_arithmetic,
}


def wider(dtype: str) -> str:
    return f"{dtype[0]}{2 * int(dtype[1:])}"


@emits("add", "sub", "mul", "min", "max", "neg", "abs", "fma", "mad")
def arithmetic(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Opcodes that integers and floats share, by type."""
    kind = mods.type()
    if kind in ("bf16", "f16") and mods.take("f32"):
        packed.mixed_arithmetic(e, ins, mods, kind)
        return
    if kind in _FLOAT_EMITTERS:
        _FLOAT_EMITTERS[kind](e, ins, mods, kind)
        return
    if kind not in INTEGERS or ins.opcode == "fma":
        raise e.fail(f"{ins.opcode} of type .{kind} is not emulated")
    dtype = NUMPY[kind]
    dst, *sources = ins.operands
    if ins.opcode in ("mul", "mad"):
        _multiply(e, ins, mods, dtype)
        return
    x = [e.value(s, dtype) for s in sources]
    if ins.opcode in ("neg", "abs"):
        e.set(dst, f"(-{x[0]})" if ins.opcode == "neg" else f"np.abs({x[0]})", dtype)
    elif ins.opcode in ("min", "max"):
        e.set(dst, f"np.{ins.opcode}imum({x[0]}, {x[1]})", dtype)
    else:
        sign = "+" if ins.opcode == "add" else "-"
        if mods.take("sat"):
            if kind != "s32":
                raise e.fail("saturation is defined for .s32 only")
            e.set(dst, f"clamp_integer({x[0]}.astype(i64) {sign} {x[1]}, i32)", dtype)
        else:
            e.set(dst, f"({x[0]} {sign} {x[1]})", dtype)


def _multiply(e: Emitter, ins: Instruction, mods: Modifiers, dtype: str) -> None:
    part = mods.one("lo", "hi", "wide")
    dst, a, b = ins.operands[:3]
    x, y = e.value(a, dtype), e.value(b, dtype)
    wide, bits = wider(dtype), 8 * size_of(dtype)
    result = dtype
    if part == "lo":
        code = f"({x} * {y})"
    elif bits == 64:
        if part == "wide":
            raise e.fail("there is no 128-bit product")
        code = f"multiply_high_64({x}, {y})"
    elif part == "wide":
        code, result = f"({x}.astype({wide}) * {y}.astype({wide}))", wide
    else:
        code = f"(({x}.astype({wide}) * {y}.astype({wide})) >> {wide}({bits})).astype({dtype})"
    if ins.opcode == "mad":
        code = f"({code} + {e.value(ins.operands[3], result)})"
    e.set(dst, code, result)


@emits("and", "or", "xor", "not", "cnot")
def logic(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Bitwise logic on words and predicates."""
    dtype = NUMPY[mods.type("pred", *BITS)]
    dst, *sources = ins.operands
    x = [e.value(s, dtype) for s in sources]
    if ins.opcode == "not":
        e.set(dst, f"(~{x[0]})", dtype)
    elif ins.opcode == "cnot":
        e.set(dst, f"({x[0]} == {dtype}(0)).astype({dtype})", dtype)
    else:
        e.set(dst, f"({x[0]} {_LOGIC[ins.opcode]} {x[1]})", dtype)


@emits("shl", "shr")
def shift(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Shifts; amounts past the word clamp to its width (NumPy then shifts everything out, as PTX wants)."""
    dtype = NUMPY[mods.type(*BITS, *INTEGERS)]
    dst, a, b = e.operands(3)
    bits = 8 * size_of(dtype)
    if isinstance(b, Immediate):
        amount = e.value(Immediate(min(b.value & 0xFFFFFFFF, bits)), dtype)
    else:
        amount = f"np.minimum({e.value(b, 'u32')}, u32({bits})).astype({dtype})"
    e.set(dst, f"({e.value(a, dtype)} {'<<' if ins.opcode == 'shl' else '>>'} {amount})", dtype)


@emits("shf")
def funnel(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Funnel shift."""
    mods.type("b32")
    left = mods.one("l", "r") == "l"
    wrap = mods.one("wrap", "clamp") == "wrap"
    dst, a, b, c = e.operands(4)
    e.set(dst, f"funnel_shift({e.value(a, 'u32')}, {e.value(b, 'u32')}, {e.value(c, 'u32')}, {left}, {wrap})", "u32")


@emits("div", "rem")
def division(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Integer division and remainder; float division goes to its group."""
    kind = mods.type("f32", "f64", *INTEGERS)
    if kind in ("f32", "f64"):
        floating.division(e, ins, mods, kind)
        return
    dst, a, b = e.operands(3)
    name = "divide" if ins.opcode == "div" else "remainder"
    e.set(dst, f"{name}({e.value(a, NUMPY[kind])}, {e.value(b, NUMPY[kind])})", NUMPY[kind])


@emits("prmt")
def permute(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Byte permute, default mode."""
    mods.type("b32")
    dst, *sources = e.operands(4)
    e.set(dst, f"permute_bytes({', '.join(e.value(s, 'u32') for s in sources)})", "u32")


@emits("lop3")
def logic3(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Three-input logic by truth table."""
    mods.type("b32")
    dst, a, b, c, table = e.operands(5)
    if not isinstance(table, Immediate):
        raise e.fail("the truth table of lop3 is no constant")
    e.set(dst, f"logic3({e.value(a, 'u32')}, {e.value(b, 'u32')}, {e.value(c, 'u32')}, {table.value & 255})", "u32")


@emits("bfe")
def field_extract(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Bit-field extract."""
    dtype = NUMPY[mods.type("u32", "u64", "s32", "s64")]
    dst, a, b, c = e.operands(4)
    e.set(dst, f"extract_bits({e.value(a, dtype)}, {e.value(b, 'u32')}, {e.value(c, 'u32')})", dtype)


@emits("bfi")
def field_insert(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Bit-field insert."""
    dtype = NUMPY[mods.type("b32", "b64")]
    dst, a, b, c, d = e.operands(5)
    e.set(
        dst, f"insert_bits({e.value(a, dtype)}, {e.value(b, dtype)}, {e.value(c, 'u32')}, {e.value(d, 'u32')})", dtype
    )


@emits("popc", "clz", "brev")
def bit_counts(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Bit counts and reversal."""
    dtype = NUMPY[mods.type("b32", "b64")]
    dst, a = e.operands(2)
    name = {"popc": "count_bits", "clz": "leading_zeros", "brev": "reverse_bits"}[ins.opcode]
    e.set(dst, f"{name}({e.value(a, dtype)})", dtype if ins.opcode == "brev" else "u32")


@emits("bfind")
def find_bit(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Most significant bit."""
    dtype = NUMPY[mods.type("u32", "u64", "s32", "s64")]
    dst, a = e.operands(2)
    e.set(dst, f"find_leading({e.value(a, dtype)}, {bool(mods.take('shiftamt'))})", "u32")


@emits("bmsk")
def bit_mask(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """A mask of b bits from position a."""
    mods.type("b32")
    mods.one("clamp")
    dst, a, b = e.operands(3)
    ones = e.constant(np.uint32(0xFFFFFFFF))
    zero = e.constant(np.uint32(0))
    position, length = (f"np.minimum({e.value(x, 'u32')}, u32(32))" for x in (a, b))
    e.set(dst, f"insert_bits({ones}, {zero}, {position}, {length})", "u32")
