"""mma.sync beyond 16-bit inputs with f32 sums: TF32, FP8, INT8, F64, and f16 accumulators (PTX ISA 9.7.14.5).

One instruction at a time: fragments are gathered into matrices, multiplied, and handed back. All m16n8 shapes share
one rule: with e elements a register and lane = 4 g + t, register r of A holds row g + 8 (r & 1) and columns
e t + i + 4 e (r >> 1); register r of B holds rows e t + i + 4 e r of column g. Sums are exact for integers and f64
order is NumPy's; TF32 inputs lose their low 13 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..emitter import Emitter, Modifiers
from ..numerics import bf16_value, f16_bits
from ..ptx.records import Instruction, Vector
from ..registry import emits, runtime
from ..small_floats import table

_FP8 = ("e4m3", "e5m2")
_SMALL = (*_FP8, "e2m1", "e2m3", "e3m2")
_ELEMENT = {"f64": 8, "tf32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, **dict.fromkeys(_SMALL, 1)}


def _variants() -> list[tuple[str, str, str, str, str, str]]:
    """(prefix before the types, shape, d, a, b, c)."""
    plain = "mma.sync.aligned"
    out = [(plain, shape, "f16", "f16", "f16", "f16") for shape in ("m16n8k8", "m16n8k16")]
    out += [(plain, shape, "f32", "tf32", "tf32", "f32") for shape in ("m16n8k4", "m16n8k8")]
    out += [(plain, shape, "f64", "f64", "f64", "f64") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")]
    for a in ("s8", "u8"):
        for b in ("s8", "u8"):
            out += [(plain, shape, "s32", a, b, "s32") for shape in ("m8n8k16", "m16n8k16", "m16n8k32")]
    for d in ("f16", "f32"):
        out += [(plain, s, d, a, b, d) for s in ("m16n8k16", "m16n8k32") for a in _FP8 for b in _FP8]
        out += [("mma.sync.aligned.kind::f8f6f4", "m16n8k32", d, a, b, d) for a in _SMALL for b in _SMALL]
        out += [(f"{plain}+", "m16n8k32", d, a, b, d) for a in _SMALL for b in _SMALL]
    return out


def _names() -> list[str]:
    names = []
    for prefix, shape, *types in _variants():
        kind = prefix.endswith("+")  # kind:: may follow the shape's layout
        prefix = prefix.rstrip("+")
        middle = ".kind::f8f6f4" if kind else ""
        names.append(f"{prefix}.{shape}.row.col{middle}.{'.'.join(types)}")
        if types[0] == "s32":
            names.append(f"{prefix}.{shape}.row.col.satfinite.{'.'.join(types)}")
    return names


@emits(*_names(), collective=32)
def multiply_other(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """d = a b + c."""
    d, a, b, _ = ins.modifiers[-4:]
    shape = next(m for m in ins.modifiers if m[0] == "m" and "n" in m)
    rows, depth = (8 if shape.startswith("m8") else 16), int(shape.split("k")[1])
    if ins.guard:
        raise e.fail("a guarded mma is not emulated")
    operands = e.operands(4)
    vectors = [x.items if isinstance(x, Vector) else (x,) for x in operands]
    elements = 1 if a in ("f64", "tf32") else 4 // _ELEMENT[a]
    want = [rows // 8 * (1 if d == "f16" else 2), rows // 8 * depth // (4 * elements), depth // (4 * elements)]
    have = [len(vectors[0]), len(vectors[1]), len(vectors[2])]
    if have != want or len(vectors[3]) != want[0]:
        raise e.fail(f"mma.{shape} takes {want} registers of d, a and b, found {have}")
    word = "u64" if d == "f64" else "u32"
    lists = [f"[{', '.join(e.value(x, word) for x in v)}]" for v in vectors[1:]]
    name = e.temp()
    form = e.static(Form(a=a, b=b, d=d, rows=rows, clamp="satfinite" in ins.modifiers))
    e.line(f"{name} = mma_any({form}, {', '.join(lists)}, n)")
    for i, item in enumerate(vectors[0]):
        e.set(item, f"{name}[{i}]", word)


def _elements(word: np.ndarray, kind: str, n: int) -> np.ndarray:
    """One register of every lane to (warps, 8, 4, elements) values."""
    word = np.ascontiguousarray(np.broadcast_to(word, n))
    if kind == "f64":
        out = word.view(np.float64)
    elif kind == "tf32":
        out = (word & np.uint32(0xFFFFE000)).view(np.float32)
    elif kind == "f16":
        out = word.view(np.float16).astype(np.float32)
    elif kind == "bf16":
        out = bf16_value(word.view(np.uint16))
    elif kind in ("s8", "u8"):
        out = word.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)
    else:
        codes = word.view(np.uint8)
        codes = codes >> 2 if kind == "e2m1" else codes  # 4-bit values sit in the middle of their byte
        out = table(kind)[codes & (table(kind).shape[0] - 1)]
    return out.reshape(n // 32, 8, 4, -1)


def rows_matrix(words: list, kind: str, halves: int, n: int) -> np.ndarray:
    """A: (warps, 8 halves, k)."""
    parts = [_elements(w, kind, n) for w in words]
    steps = len(words) // halves
    out = np.stack(parts).reshape(steps, halves, *parts[0].shape)  # step, half, warp, g, t, i
    return np.ascontiguousarray(out.transpose(2, 1, 3, 0, 4, 5)).reshape(n // 32, 8 * halves, -1)


def columns_matrix(words: list, kind: str, n: int) -> np.ndarray:
    """B: (warps, k, 8)."""
    out = np.stack([_elements(w, kind, n) for w in words])  # step, warp, g, t, i
    return np.ascontiguousarray(out.transpose(1, 0, 3, 4, 2)).reshape(n // 32, -1, 8)


@dataclass(frozen=True, kw_only=True)
class Form:
    """Types of A, B and of the result, the rows of A, and whether integer sums are clamped."""

    a: str
    b: str
    d: str
    rows: int
    clamp: bool


@runtime
def mma_any(form: Form, a: list, b: list, c: list, n: int) -> np.ndarray:
    """The destination registers of one mma of every warp."""
    halves = form.rows // 8
    product = np.matmul(rows_matrix(a, form.a, halves, n), columns_matrix(b, form.b, n))
    start = np.stack([np.broadcast_to(x, n) for x in c])
    if form.d == "f16":
        pairs = np.ascontiguousarray(start).view(np.float16).reshape(halves, n // 32, 8, 8).astype(np.float32)
        total = product.reshape(n // 32, halves, 8, 8) + pairs.transpose(1, 0, 2, 3)
        bits = f16_bits(total.astype(np.float32)).astype(np.uint16)
        return np.ascontiguousarray(bits.transpose(1, 0, 2, 3)).view(np.uint32).reshape(halves, n)
    number = {"s32": np.int32, "f32": np.float32, "f64": np.float64}[form.d]
    start = np.ascontiguousarray(start).view(number).reshape(halves, 2, n // 32, 8, 4).transpose(2, 0, 3, 4, 1)
    product = product.reshape(n // 32, halves, 8, 4, 2)
    if form.d == "s32":
        total = product.astype(np.int64) + start
        total = np.clip(total, -(2**31), 2**31 - 1) if form.clamp else total
        total = total.astype(np.int32)
    else:
        total = (product + start).astype(number)
    out = np.ascontiguousarray(total.transpose(1, 4, 0, 2, 3)).reshape(2 * halves, n)
    return out.view(np.uint64 if form.d == "f64" else np.uint32)
