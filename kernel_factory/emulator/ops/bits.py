"""Integer opcodes beyond the common ones: carry chains, 24-bit products, dot products, byte selections.

PTX ISA 9.7.1 (mul24, mad24, sad, dp4a, dp2a, fns, szext, bmsk, packed 16-bit add, min, max), 9.7.2 (add.cc, addc …)
and 9.7.8 (prmt modes). The carry flag is a predicate register that the parser adds as an operand.
"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers, size_of
from ..numerics import multiply_high_64
from ..ptx.records import Immediate, Instruction, Vector
from ..registry import emits, runtime

_WORDS = ("u32", "s32", "u64", "s64")


@emits("add.cc", "sub.cc", "addc", "subc", "mad.lo.cc", "mad.hi.cc", "madc")
def carry(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Extended-precision add, subtract and multiply-add; the flag holds carry or borrow."""
    mods.take("cc")
    kind = mods.type(*_WORDS)
    dst, *sources = ins.operands
    inward = ins.opcode in ("addc", "subc", "madc")
    if len(sources) != (3 if ins.opcode in ("mad", "madc") else 2) + inward:
        raise e.fail("wrong number of operands")
    flag = e.value(sources[-1], "bool") if inward else "None"
    dtype = NUMPY[kind]
    x = [e.value(s, dtype) for s in sources[: len(sources) - inward]]
    if ins.opcode in ("mad", "madc"):
        high = "hi" in ins.modifiers
        if ins.opcode == "madc":
            mods.one("lo", "hi")
        x = [f"half_product({x[0]}, {x[1]}, {high})", x[2]]
    name = e.temp()
    e.line(f"{name} = carried({x[0]}, {x[1]}, {flag}, {ins.opcode in ('sub', 'subc')})")
    items = dst.items if isinstance(dst, Vector) else (dst,)
    e.set(items[0], f"{name}[0]", f"u{8 * size_of(dtype)}")
    if len(items) > 1:
        e.set(items[1], f"{name}[1]", "bool")


@runtime
def half_product(a, b, high):
    if not high:
        return a * b
    if a.dtype.itemsize == 8:
        return multiply_high_64(a, b)
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


@runtime
def carried(a, b, flag, subtract):
    """Sum or difference, and whether it carried or borrowed."""
    kind = f"u{a.dtype.itemsize}"
    a, b = a.view(kind), b.view(kind)
    extra = np.zeros(1, kind) if flag is None else flag.astype(kind)
    if subtract:
        first = a - b
        return first - extra, (a < b) | (first < extra)
    first = a + b
    second = first + extra
    return second, (first < a) | (second < first)


@emits("mul24", "mad24")
def product24(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Products of the low 24 bits: .lo is the low 32 bits of the 48, .hi the high 32."""
    kind = mods.type("u32", "s32")
    high = mods.one("lo", "hi") == "hi"
    dst, *sources = e.operands(4 if ins.opcode == "mad24" else 3)
    dtype = NUMPY[kind]
    code = f"multiply24({e.value(sources[0], dtype)}, {e.value(sources[1], dtype)}, {high})"
    if ins.opcode == "mad24":
        code = f"({code} + {e.value(sources[2], dtype)})"
    e.set(dst, code, dtype)


@runtime
def multiply24(a, b, high):
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    x, y = (((v.astype(wide) << wide(40)) >> wide(40)) for v in (a, b))
    product = x * y
    return ((product >> wide(16)) if high else product).astype(a.dtype)


@emits("sad")
def absolute_difference(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """c + |a - b|."""
    dtype = NUMPY[mods.type("u16", "s16", "u32", "s32", "u64", "s64")]
    dst, a, b, c = e.operands(4)
    x, y = e.value(a, dtype), e.value(b, dtype)
    e.set(dst, f"({e.value(c, dtype)} + np.where({x} < {y}, {y} - {x}, {x} - {y}))", dtype)


@emits("dp4a", "dp2a")
def dot(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """c + the dot product of four bytes, or of two halves with the low or high two bytes."""
    kind_b = mods.type("u32", "s32")
    kind_a = mods.type("u32", "s32")
    part = mods.one("lo", "hi") if ins.opcode == "dp2a" else ""
    dst, a, b, c = e.operands(4)
    words = f"{e.value(a, 'u32')}, {e.value(b, 'u32')}, {e.value(c, 'u32')}"
    e.set(dst, f"dot_bytes({words}, {kind_a == 's32'}, {kind_b == 's32'}, {part!r})", "u32")


@runtime
def dot_bytes(a, b, c, signed_a, signed_b, part):
    bytes_b = np.ascontiguousarray(b).view(np.int8 if signed_b else np.uint8).reshape(-1, 4).astype(np.int64)
    if part:
        left = np.ascontiguousarray(a).view(np.int16 if signed_a else np.uint16).reshape(-1, 2).astype(np.int64)
        bytes_b = bytes_b[:, :2] if part == "lo" else bytes_b[:, 2:]
    else:
        left = np.ascontiguousarray(a).view(np.int8 if signed_a else np.uint8).reshape(-1, 4).astype(np.int64)
    return ((left * bytes_b).sum(1) + c.astype(np.int64)).astype(np.uint32)


@emits("fns")
def nth_bit(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Position of the n-th set bit from a base, or 0xffffffff."""
    mods.type("b32")
    dst, mask, base, offset = e.operands(4)
    code = f"find_nth({e.value(mask, 'u32')}, {e.value(base, 'u32')}, {e.value(offset, 'i32')})"
    e.set(dst, code, "u32")


@runtime
def find_nth(mask, base, offset):
    mask, base, offset = np.broadcast_arrays(mask, base & np.uint32(31), offset)
    out = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
    for i, (m, b, n) in enumerate(zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True)):
        up = n >= 0
        spots = [p for p in (range(b, 32) if up else range(b, -1, -1)) if m >> p & 1]
        if n == 0:
            spots, want = ([b] if m >> b & 1 else []), 1
        else:
            want = abs(n)
        if want <= len(spots):
            out[i] = spots[want - 1]
    return out


@emits("szext")
def extend(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Sign- or zero-extend the low b bits."""
    dtype = NUMPY[mods.type("u32", "s32")]
    wrap = mods.one("wrap", "clamp") == "wrap"
    dst, a, b = e.operands(3)
    e.set(dst, f"extended({e.value(a, dtype)}, {e.value(b, 'u32')}, {wrap})", dtype)


@runtime
def extended(a, b, wrap):
    bits = ((b & np.uint32(31)) if wrap else np.minimum(b, np.uint32(32))).astype(np.int64)
    wide = a.astype(np.int64) & 0xFFFFFFFF
    low = wide & ((np.int64(1) << bits) - 1)
    sign = (bits > 0) & ((low >> np.maximum(bits - 1, 0)) & 1 == 1)
    return (np.where(sign, low - (np.int64(1) << bits), low) if a.dtype.kind == "i" else low).astype(a.dtype)


@emits("bmsk.wrap")
def mask_wrap(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """A mask of b bits from position a, both modulo 32."""
    mods.type("b32")
    dst, a, b = e.operands(3)
    e.set(dst, f"wrapped_mask({e.value(a, 'u32')}, {e.value(b, 'u32')})", "u32")


@runtime
def wrapped_mask(a, b):
    a, b = (a & np.uint32(31)).astype(np.uint64), (b & np.uint32(31)).astype(np.uint64)
    return (((np.uint64(1) << b) - np.uint64(1)) << a).astype(np.uint32)


_PRMT = {
    "f4e": lambda c: [c, c + 1, c + 2, c + 3],
    "b4e": lambda c: [c, c - 1, c - 2, c - 3],
    "rc8": lambda c: [c, c, c, c],
    "ecl": lambda c: [np.maximum(c, i) for i in range(4)],
    "ecr": lambda c: [np.minimum(c, i) for i in range(4)],
    "rc16": lambda c: [2 * (c & 1), 2 * (c & 1) + 1, 2 * (c & 1), 2 * (c & 1) + 1],
}


@emits(*(f"prmt.b32.{mode}" for mode in _PRMT))
def permute_mode(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Byte permutes of the named patterns."""
    dst, *sources = e.operands(4)
    words = ", ".join(e.value(s, "u32") for s in sources)
    e.set(dst, f"permute_pattern({words}, {ins.modifiers[1]!r})", "u32")


@runtime
def permute_pattern(a, b, c, mode):
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    out = np.zeros(1, np.uint32)
    for i, index in enumerate(_PRMT[mode]((c & np.uint32(3)).astype(np.int64))):
        byte = (both >> ((index & 7).astype(np.uint64) << np.uint64(3))) & np.uint64(0xFF)
        out = out | (byte.astype(np.uint32) << np.uint32(8 * i))
    return out


_PAIRS = [f"{op}.{kind}" for op in ("add", "min", "max") for kind in ("u16x2", "s16x2")]


@emits(*_PAIRS, "min.relu.s16x2", "max.relu.s16x2", "min.relu.s32", "max.relu.s32")
def pairs(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Two 16-bit values a word, and the .relu forms of min and max."""
    kind = {"u16x2": "u2", "s16x2": "i2", "s32": "i4"}[ins.modifiers[-1]]
    dst, a, b = e.operands(3)
    words = f"{e.value(a, 'u32')}, {e.value(b, 'u32')}"
    e.set(dst, f"word_pairs({words}, {ins.opcode!r}, {kind!r}, {'relu' in ins.modifiers})", "u32")


@runtime
def word_pairs(a, b, op, kind, relu):
    a, b = np.broadcast_arrays(a, b)
    x, y = (np.ascontiguousarray(v).view(kind) for v in (a, b))
    out = {"add": np.add, "min": np.minimum, "max": np.maximum}[op](x, y)
    return np.ascontiguousarray(np.maximum(out, 0) if relu else out).view(np.uint32)


@emits("lop3.and", "lop3.or", "lop3.xor")
def logic3_predicate(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """lop3 whose result's truth is combined with a predicate."""
    mods.type("b32")
    dst, a, b, c, table, q = e.operands(6)
    if not isinstance(table, Immediate) or not isinstance(dst, Vector) or len(dst.items) != 2:
        raise e.fail("lop3 with a predicate writes word|predicate and takes a constant table")
    word = f"logic3({e.value(a, 'u32')}, {e.value(b, 'u32')}, {e.value(c, 'u32')}, {table.value & 255})"
    name = e.temp()
    e.line(f"{name} = {word}")
    sign = {"and": "&", "or": "|", "xor": "^"}[ins.modifiers[0]]
    e.set(dst.items[0], name, "u32")
    e.set(dst.items[1], f"(({name} != u32(0)) {sign} {e.value(q, 'bool')})", "bool")
