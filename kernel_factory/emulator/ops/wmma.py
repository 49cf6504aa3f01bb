"""wmma.load, wmma.store and wmma.mma (PTX ISA 9.7.14.4).

The manual leaves open which lane holds which element. Here element slot j = lane x (elements a lane) + e holds the
element with row-major number j modulo the matrix size (f16 A and B fragments have room for every element twice).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..emitter import DTYPES, Emitter, Modifiers
from ..issue import Issue
from ..numerics import bf16_value, f16_bits
from ..ptx.records import Immediate, Instruction, Vector
from ..registry import RUNTIME, emits, runtime
from .generic_access import space_of
from .memory_access import global_base, shared_base

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


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Rows and columns of a matrix in memory, its order there, and the words of its elements and registers."""

    extent: tuple[int, int]
    column: bool
    dtype: type

    @property
    def size(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def width(self) -> int:
        """Bytes of a register."""
        return 8 if self.size == 8 else 4

    def offsets(self, stride: np.ndarray, each: int, n: int) -> np.ndarray:
        """Byte offsets of the ``each`` elements of every lane, (n, each)."""
        rows, columns = self.extent
        number = (np.arange(32)[:, None] * each + np.arange(each)) % (rows * columns)
        row, col = number // columns, number % columns
        lead, rest = (col, row) if self.column else (row, col)
        lead, rest = (np.tile(x, (n // 32, 1)) for x in (lead, rest))
        return (lead * np.broadcast_to(stride, n)[:, None].astype(np.int64) + rest) * self.size


def _access(e: Emitter, ins: Instruction, mods: Modifiers) -> tuple[Fragment, str, str]:
    """The fragment, the space that it lies in, and the type of its registers."""
    name = mods.one("a", "b", "c", "d")
    for word in ("sync", "aligned"):
        mods.one(word)
    column = mods.one("row", "col") == "col"
    shape = mods.one(*_SHAPES)
    space = (mods.take("global", "shared", "shared::cta") or "generic").split("::")[0]
    if ins.guard:
        raise e.fail("a guarded wmma is not emulated")
    kind = mods.one(*_WORDS)
    fragment = Fragment(extent=_extent(name, shape), column=column, dtype=DTYPES[_WORDS[kind]])
    return fragment, space, "u64" if kind == "f64" else "u32"


def _place(e: Emitter, fragment: Fragment, address: object, *stride: object) -> str:
    """The place of the first element, and the stride in elements."""
    base, offset = e.address(address)
    step = e.value(stride[0] if stride else Immediate(fragment.extent[0 if fragment.column else 1]), "u32")
    wide = getattr(base, "type", "b64").endswith("64")
    start = e.value(base, "u64") if wide else f"{e.value(base, 'u32')}.astype(u64)"
    return f"({start}, {offset}), {step}"


@emits("wmma.load", collective=32)
def load_fragment(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wmma.load.{a,b,c}: a fragment from memory."""
    fragment, space, word = _access(e, ins, mods)
    dst, *source = ins.operands
    items = dst.items if isinstance(dst, Vector) else (dst,)
    temp, place = e.temp(), _place(e, fragment, *source)
    e.line(f"{temp} = wmma_load({e.issue()}, {e.static(fragment)}, {space!r}, {place}, {len(items)})")
    for i, item in enumerate(items):
        e.set(item, f"{temp}[{i}]", word)


@emits("wmma.store", collective=32, writes=False)
def store_fragment(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """wmma.store.d: a fragment to memory."""
    fragment, space, word = _access(e, ins, mods)
    target, source, *stride = ins.operands
    words, place = ", ".join(e.values(source, word)), _place(e, fragment, target, *stride)
    e.line(f"wmma_store({e.issue()}, {e.static(fragment)}, {space!r}, {place}, [{words}])")


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
    form = e.static(Form(shape=_SHAPES[shape], kinds=tuple(kinds), clamp=clamp))
    e.line(f"{temp} = wmma_product({form}, {', '.join(lists)}, n)")
    for i, item in enumerate(items):
        e.set(item, f"{temp}[{i}]", "u64" if kinds[0] == "f64" else "u32")


def _points(issue: Issue, space: str, place: tuple, offsets: np.ndarray) -> Iterator[tuple[str, tuple]]:
    """The space and the place of each lane's first, second… element."""
    if space == "generic":
        space, (base, offset) = space_of(issue, place)
        start = base if space == "cluster" else base[0]
        if space == "shared":
            start = start - issue.M.cta_shared[slice(None) if issue.sel is None else issue.sel]
    else:
        start, offset = place[0].astype(np.int64), place[1]
    for column in offsets.T:
        at = np.broadcast_to(start, issue.n) + offset + column
        if space != "cluster":
            at = shared_base(issue.M, issue.sel, at) if space == "shared" else global_base(at.view(np.uint64))
        yield space, (at, 0)


@runtime
def wmma_load(
    issue: Issue, fragment: Fragment, space: str, place: tuple, stride: np.ndarray, registers: int
) -> np.ndarray:
    offsets = fragment.offsets(stride, registers * fragment.width // fragment.size, issue.n)
    out = np.empty(offsets.shape, fragment.dtype)
    for i, (where, at) in enumerate(_points(issue, space, place, offsets)):
        (out[:, i],) = RUNTIME[f"load_{where}"](issue, at, fragment.dtype, 1)
    return np.ascontiguousarray(out.view(f"u{fragment.width}").T)


@runtime
def wmma_store(issue: Issue, fragment: Fragment, space: str, place: tuple, stride: np.ndarray, words: list) -> None:
    data = np.ascontiguousarray(np.stack([np.broadcast_to(w, issue.n) for w in words], axis=1)).view(fragment.dtype)
    offsets = fragment.offsets(stride, data.shape[1], issue.n)
    for i, (where, at) in enumerate(_points(issue, space, place, offsets)):
        RUNTIME[f"store_{where}"](issue, at, fragment.dtype, [np.ascontiguousarray(data[:, i])])


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


@dataclass(frozen=True, kw_only=True)
class Form:
    """Rows, columns and depth of a product, the types of d, a, b and c, and whether integer sums are clamped."""

    shape: tuple[int, int, int]
    kinds: tuple[str, str, str, str]
    clamp: bool


@runtime
def wmma_product(form: Form, a: list, b: list, c: list, n: int) -> np.ndarray:
    (m, cols, k), kinds = form.shape, form.kinds
    product = np.matmul(_matrix(a, kinds[1], (m, k), n), _matrix(b, kinds[2], (k, cols), n))
    total = product + _matrix(c, kinds[3], (m, cols), n)
    flat = total.reshape(n, -1)
    if kinds[0] == "s32":
        whole = flat.astype(np.int64)
        flat = (np.clip(whole, -(2**31), 2**31 - 1) if form.clamp else whole).astype(np.int32)
    elif kinds[0] == "f16":
        flat = f16_bits(flat.astype(np.float32)).astype(np.uint16)
    else:
        flat = flat.astype(np.float64 if kinds[0] == "f64" else np.float32)
    words = np.ascontiguousarray(flat).view(np.uint64 if kinds[0] == "f64" else np.uint32)
    return np.ascontiguousarray(words.reshape(n, -1).T)
