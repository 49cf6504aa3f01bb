"""wmma.load, wmma.store and wmma.mma (PTX ISA 9.7.14.4).

The manual leaves open which lane holds which element. Here element slot j = lane x (elements a lane) + e holds the
element with row-major number j modulo the matrix size (f16 A and B fragments have room for every element twice).
"""

from __future__ import annotations

import numpy as np

from ..emitter import Emitter, Modifiers
from ..numerics import bf16_value, f16_bits
from ..ptx.records import Immediate, Instruction, Vector
from ..registry import emits, runtime
from .generic_access import _generic
from .memory_access import global_base, load_global, load_shared, shared_base, store_global, store_shared

_SHAPES = {
    "m16n16k16": (16, 16, 16),
    "m32n8k16": (32, 8, 16),
    "m8n32k16": (8, 32, 16),
    "m16n16k8": (16, 16, 8),
    "m8n8k4": (8, 8, 4),
}
_WORDS = {"f16": "u16", "bf16": "u16", "tf32": "u32", "f32": "u32", "s32": "u32", "s8": "u8", "u8": "u8", "f64": "u64"}


def _extent(name: str, shape: str) -> tuple[int, int]:
    m, n, k = _SHAPES[shape]
    return {"a": (m, k), "b": (k, n)}.get(name, (m, n))


def _access(e: Emitter, ins: Instruction, mods: Modifiers) -> tuple[str, str, bool, str, str]:
    """Matrix name, shape, column-major, space and type."""
    name = mods.one("a", "b", "c", "d")
    for word in ("sync", "aligned"):
        mods.one(word)
    column = mods.one("row", "col") == "col"
    shape = mods.one(*_SHAPES)
    space = (mods.take("global", "shared", "shared::cta") or "generic").split("::")[0]
    if ins.guard:
        raise e.fail("a guarded wmma is not emulated")
    return name, shape, column, space, mods.one(*_WORDS)


def _place(e: Emitter, operands: tuple, column: bool, extent: tuple[int, int]) -> str:
    base, offset = e.address(operands[0])
    stride = e.value(operands[1], "u32") if len(operands) > 1 else ""
    if not stride:
        stride = e.value(Immediate(extent[0] if column else extent[1]), "u32")
    register = getattr(base, "type", "b64")
    address = e.value(base, "u64") if register.endswith("64") else f"{e.value(base, 'u32')}.astype(u64)"
    return f"{address}, {offset}, {stride}"


@emits("wmma.load", collective=32)
def load_fragment(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wmma.load.{a,b,c}: a fragment from memory."""
    name, shape, column, space, kind = _access(e, ins, mods)
    extent = _extent(name, shape)
    dst, *source = ins.operands
    items = dst.items if isinstance(dst, Vector) else (dst,)
    temp = e.temp()
    place = _place(e, tuple(source), column, extent)
    e.line(
        f"{temp} = wmma_load(M, sel, {space!r}, {place}, {extent}, {column}, {len(items)}, {_WORDS[kind]}, "
        f"{ins.line}, n)"
    )
    for i, item in enumerate(items):
        e.set(item, f"{temp}[{i}]", "u64" if kind == "f64" else "u32")


@emits("wmma.store", collective=32, writes=False)
def store_fragment(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wmma.store.d: a fragment to memory."""
    name, shape, column, space, kind = _access(e, ins, mods)
    extent = _extent(name, shape)
    target, source, *stride = ins.operands
    words = ", ".join(e.values(source, "u64" if kind == "f64" else "u32"))
    place = _place(e, (target, *stride), column, extent)
    e.line(f"wmma_store(M, sel, {space!r}, {place}, {extent}, {column}, [{words}], {_WORDS[kind]}, {ins.line}, n)")


@emits("wmma.mma", collective=32)
def multiply_fragments(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wmma.mma: d = a b + c."""
    for word in ("sync", "aligned"):
        mods.one(word)
    mods.left = [m for m in mods.left if m not in ("row", "col")]
    shape, clamp = mods.one(*_SHAPES), bool(mods.take("satfinite"))
    mods.take("rn")
    kinds = mods.left[:]
    mods.left.clear()
    if len(kinds) == 2:  # f16 inputs are not named
        kinds = [kinds[0], "f16", "f16", kinds[1]]
    if len(kinds) != 4 or any(k not in _WORDS for k in kinds) or ins.guard:
        raise e.fail(f"wmma.mma of types {', '.join(kinds)} is not emulated")
    d, a, b, c = e.operands(4)
    lists = []
    for operand, kind in ((a, kinds[1]), (b, kinds[2]), (c, kinds[3])):
        lists.append(f"[{', '.join(e.values(operand, 'u64' if kind == 'f64' else 'u32'))}]")
    items = d.items if isinstance(d, Vector) else (d,)
    temp = e.temp()
    e.line(f"{temp} = wmma_product({', '.join(lists)}, {_SHAPES[shape]}, {kinds}, {clamp}, n)")
    for i, item in enumerate(items):
        e.set(item, f"{temp}[{i}]", "u64" if kinds[0] == "f64" else "u32")


def _offsets(stride, extent, column, each, size, n):
    """Byte offsets of each lane's elements, (n, each)."""
    number = (np.arange(32)[:, None] * each + np.arange(each)) % (extent[0] * extent[1])
    row, col = number // extent[1], number % extent[1]
    lead, rest = (col, row) if column else (row, col)
    lead, rest = (np.tile(x, (n // 32, 1)) for x in (lead, rest))
    return (lead * np.broadcast_to(stride, n)[:, None].astype(np.int64) + rest) * size


def _points(M, sel, space, address, line):
    if space == "generic":
        space, base = _generic(M, sel, address, None, line)
        return space, base[0] if space == "global" else base[0] - M.cta_shared[slice(None) if sel is None else sel]
    return space, address.astype(np.int64)


@runtime
def wmma_load(M, sel, space, address, offset, stride, extent, column, registers, dtype, line, n):
    size = np.dtype(dtype).itemsize
    width = 8 if size == 8 else 4
    each = registers * width // size
    space, start = _points(M, sel, space, address, line)
    offsets = _offsets(stride, extent, column, each, size, n)
    out = np.empty((n, each), dtype)
    for i in range(each):
        at = np.broadcast_to(start, n) + offset + offsets[:, i]
        if space == "shared":
            out[:, i] = load_shared(M, sel, shared_base(M, sel, at), 0, dtype, 1, None, line, n)[0]
        else:
            out[:, i] = load_global(M, sel, global_base(at.view(np.uint64)), 0, dtype, 1, None, line, n)[0]
    return np.ascontiguousarray(out.view(f"u{width}").T)


@runtime
def wmma_store(M, sel, space, address, offset, stride, extent, column, words, dtype, line, n):
    size = np.dtype(dtype).itemsize
    data = np.ascontiguousarray(np.stack([np.broadcast_to(w, n) for w in words], axis=1)).view(dtype)
    space, start = _points(M, sel, space, address, line)
    offsets = _offsets(stride, extent, column, data.shape[1], size, n)
    for i in range(data.shape[1]):
        at = np.broadcast_to(start, n) + offset + offsets[:, i]
        value = [np.ascontiguousarray(data[:, i])]
        if space == "shared":
            store_shared(M, sel, shared_base(M, sel, at), 0, dtype, value, None, line, n)
        else:
            store_global(M, sel, global_base(at.view(np.uint64)), 0, dtype, value, None, line, n)


def _matrix(words, kind, extent, n):
    """(warps, rows, columns) values of a fragment."""
    data = np.ascontiguousarray(np.stack([np.broadcast_to(w, n) for w in words], axis=1)).reshape(n // 32, -1)
    if kind == "bf16":
        data = bf16_value(data.view(np.uint16))
    elif kind == "tf32":
        data = (data & np.uint32(0xFFFFE000)).view(np.float32)
    else:
        data = data.view({"f16": "f2", "f32": "f4", "s32": "i4", "s8": "i1", "u8": "u1", "f64": "f8"}[kind])
    wide = np.float32 if kind in ("f16", "bf16", "tf32", "f32") else np.float64
    return data[:, : extent[0] * extent[1]].astype(wide).reshape(-1, *extent)


@runtime
def wmma_product(a, b, c, shape, kinds, clamp, n):
    m, cols, k = shape
    product = np.matmul(_matrix(a, kinds[1], (m, k), n), _matrix(b, kinds[2], (k, cols), n))
    total = product + _matrix(c, kinds[3], (m, cols), n)
    flat = total.reshape(n, -1)
    if kinds[0] == "s32":
        whole = flat.astype(np.int64)
        flat = (np.clip(whole, -(2**31), 2**31 - 1) if clamp else whole).astype(np.int32)
    elif kinds[0] == "f16":
        flat = f16_bits(flat.astype(np.float32)).astype(np.uint16)
    else:
        flat = flat.astype(np.float64 if kinds[0] == "f64" else np.float32)
    words = np.ascontiguousarray(flat).view(np.uint64 if kinds[0] == "f64" else np.uint32)
    return np.ascontiguousarray(words.reshape(n, -1).T)
