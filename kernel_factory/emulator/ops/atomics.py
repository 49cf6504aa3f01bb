"""atom and red on global and shared memory (PTX ISA 9.7.13.5 and 9.7.13.7).

Threads act one after the other in thread order, so results are the same on every run; scopes and orderings change
nothing here, because memory is sequentially consistent. On global memory atom.add.f32 flushes subnormals, as the
manual says.
"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers, size_of
from ..lanes import settle, spread, threads_of
from ..numerics import bf16_bits, bf16_value, ftz
from ..ptx.records import Instruction, Vector
from ..race_atomics import shared_atomic
from ..registry import emits, runtime
from .cluster import cluster_address, cluster_flat
from .generic_access import _generic, generic_masks
from .memory_access import global_parts, shared_flat

_ORDER = ("relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "L2::cache_hint", "L1::", "L2::")
_OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_TYPES = {
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"),
    "min": ("u32", "s32", "u64", "s64", "f32", "f16", "f16x2", "bf16", "bf16x2"),
    "and": ("b32", "b64"),
    "exch": ("b32", "b64", "b128"),
    "cas": ("b16", "b32", "b64", "b128"),
    "inc": ("u32",),
}
_TYPES["max"] = _TYPES["min"]
_TYPES["or"] = _TYPES["xor"] = _TYPES["and"]
_TYPES["dec"] = _TYPES["inc"]


@emits("atom")
def atomic(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """atom: the destination receives the old value."""
    _emit(e, ins, mods, ins.operands[0] if ins.operands else None, ins.operands[1:])


@emits("red", writes=False)
def reduction(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """red: atom without a result."""
    _emit(e, ins, mods, None, ins.operands)


def _emit(e: Emitter, ins: Instruction, mods: Modifiers, dst: object, sources: tuple) -> None:
    op = mods.one(*_OPS)
    hint = "L2::cache_hint" in mods.left
    mods.ignore(*_ORDER)
    count = int((mods.take("v2", "v4", "v8") or "v1")[1:])
    space = mods.take("global", "shared", "shared::cta", "shared::cluster") or "generic"
    space = "cluster" if space == "shared::cluster" else space.split("::")[0]
    mods.take("noftz")
    kind = mods.one(*_TYPES[op])
    if len(sources) != (3 if op == "cas" else 2) + hint:
        raise e.fail(f"expected {2 + (op == 'cas')} source operands, found {len(sources)}")
    dtype = NUMPY[kind]
    storage = dtype if kind not in ("f16", "bf16") else "u16"
    values = e.values(sources[2 if op == "cas" else 1], storage)
    compare = e.value(sources[1], storage) if op == "cas" else "None"
    if len(values) != count or (count > 1 and (space in ("shared", "cluster") or op not in ("add", "min", "max"))):
        raise e.fail(f"{ins.opcode}.{op} of {len(values)} values in .{space} is not emulated")
    base, offset = _address(e, sources[0], space)
    name = e.temp()
    e.line(
        f"{name} = atomic_{space}(M, sel, {base}, {offset}, {op!r}, {kind!r}, {storage}, [{', '.join(values)}], "
        f"{compare}, {dst is not None}, {e.guard()}, {ins.line}, n)"
    )
    items = dst.items if isinstance(dst, Vector) else (dst,)
    for i, item in enumerate(items):
        e.set(item, f"{name}[{i}]", f"u{8 * size_of(storage)}" if storage != "c16" else "c16")


def _address(e: Emitter, operand: object, space: str) -> tuple[str, int]:
    if space == "global":
        return e.global_address(operand)
    if space == "shared":
        return e.shared_address(operand)
    if space == "cluster":
        return cluster_address(e, operand)
    base, offset = e.address(operand)
    return e.value(base, "u64"), offset


@runtime
def atomic_generic(M, sel, address, offset, op, kind, dtype, values, compare, want, mask, line, n):
    masks = generic_masks(address, mask, n)
    if masks is not None:
        args = (offset, op, kind, dtype, values, compare, want)
        parts = [atomic_generic(M, sel, address, *args, one, line, n) for one in masks]
        return [np.select(masks, [p[i] for p in parts]) if want else None for i in range(len(values))]
    space, base = _generic(M, sel, address, mask, line)
    call = {"shared": atomic_shared, "cluster": atomic_cluster}.get(space, atomic_global)
    return call(M, sel, base, offset, op, kind, dtype, values, compare, want, mask, line, n)


@runtime
def atomic_shared(M, sel, base, offset, op, kind, dtype, values, compare, want, mask, line, n):
    chosen = settle(mask)
    flat = shared_flat(M, sel, base, offset, np.dtype(dtype).itemsize, chosen, line)
    return _on_shared(M, sel, flat, op, kind, dtype, values, compare, want, chosen, line, n)


@runtime
def atomic_cluster(M, sel, base, offset, op, kind, dtype, values, compare, want, mask, line, n):
    chosen = settle(mask)
    flat = cluster_flat(M, sel, base, offset, np.dtype(dtype).itemsize, chosen, line, n)
    return _on_shared(M, sel, flat, op, kind, dtype, values, compare, want, chosen, line, n)


def _on_shared(M, sel, flat, op, kind, dtype, values, compare, want, chosen, line, n):
    """An atomic at these positions of the batch's shared memory, of whichever CTA."""
    size = np.dtype(dtype).itemsize
    threads = threads_of(M, sel, chosen)
    if M.race:
        shared_atomic(M.race, threads, flat, size, line)
    if M.count:
        M.count.shared(M, sel, chosen, flat, size, line, "atom")
    view = M.shared_views[size].view(dtype)
    at = flat >> (size.bit_length() - 1)
    picked = [_pick(x, n, chosen) for x in (values[0], compare)]
    at = spread(at, threads.shape[0])
    before = view[at]
    old = update(view, at, op, kind, *picked, want, False)
    _changed(M, before, view[at])
    return [_back(old, chosen, n)] if want else [None]


@runtime
def atomic_global(M, sel, base, offset, op, kind, dtype, values, compare, want, mask, line, n):
    chosen = settle(mask)
    size = np.dtype(dtype).itemsize
    count, m = len(values), n if chosen is None else chosen.shape[0]
    out = [np.zeros(m, dtype) for _ in values] if want else [None] * count
    for lanes, at, buffer in global_parts(M, sel, base, offset, size * count, chosen, True, line, n):
        at = spread(at, m if lanes is None else lanes.shape[0])
        if M.global_race:
            M.global_race.atomic(threads_of(M, sel, chosen), lanes, at, size * count, buffer)
        if M.count:
            M.count.memory(M, sel, chosen, lanes, at, size * count, buffer, "write", line, n)
        view = buffer.view(size).view(dtype)
        for i, value in enumerate(values):
            picked = [_pick(x, n, chosen) for x in (value, compare)]
            if lanes is not None:
                picked = [x if x is None else x[lanes] for x in picked]
            before = view[at * count + i]
            old = update(view, at * count + i, op, kind, *picked, want, kind == "f32" and op == "add" and count == 1)
            _changed(M, before, view[at * count + i])
            if want:
                out[i][slice(None) if lanes is None else lanes] = old
    return [_back(x, chosen, n) for x in out] if want else out


def _changed(M: object, before: np.ndarray, after: np.ndarray) -> None:
    """A failed compare-and-swap changes nothing, and those who spin on it must let others run."""
    if (before != after).any():
        M.changed()


def _pick(x: np.ndarray | None, n: int, chosen: np.ndarray | None) -> np.ndarray | None:
    if x is None:
        return None
    x = spread(x, n)
    return x if chosen is None else x[chosen]


def _back(old: np.ndarray, chosen: np.ndarray | None, n: int) -> np.ndarray:
    words = old if old.dtype.kind == "c" else old.view(f"u{old.dtype.itemsize}")
    if chosen is None:
        return words
    full = np.zeros(n, words.dtype)
    full[chosen] = words
    return full


# -- one memory cell after the other ----------------------------------------------------------------------------------
def update(view, at, op, kind, value, compare, want, flush):
    """Apply the operation at ``at``, in order where positions repeat; the old values if wanted."""
    if at.shape[0] == 0:
        return np.zeros(0, view.dtype)
    order = np.argsort(at, kind="stable")
    cells = at[order]
    first = np.ones(cells.shape, bool)
    first[1:] = cells[1:] != cells[:-1]
    start = np.maximum.accumulate(np.where(first, np.arange(cells.shape[0]), 0))
    rank = np.arange(cells.shape[0]) - start
    deepest = int(rank.max())
    if deepest > 16:
        done, old = _at_once(view, cells, op, kind, value[order], want, flush, start)
        if done:
            return _unsort(old, order) if want else None
    old = np.empty(at.shape, view.dtype)
    for turn in range(deepest + 1):
        now = order[rank == turn] if deepest else order
        where = at[now]
        before = view[where]
        old[now] = before
        view[where] = result(before, op, kind, value[now], None if compare is None else compare[now], flush)
    return old


def _unsort(old: np.ndarray, order: np.ndarray) -> np.ndarray:
    out = np.empty_like(old)
    out[order] = old
    return out


def _at_once(view, cells, op, kind, value, want, flush, start):
    """Many threads on few cells: sums and extremes that need no order, and integer prefix sums for old values."""
    if kind in ("u32", "s32", "u64", "s64") and op == "add":
        before = view[cells]
        running = np.cumsum(value, dtype=value.dtype) - value
        np.add.at(view, cells, value)
        return True, before + (running - running[start])
    ufunc = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.get(op)
    if kind in ("u32", "s32", "u64", "s64") and op in ("min", "max"):
        ufunc = np.minimum if op == "min" else np.maximum
    elif op == "add" and kind in ("f32", "f64") and not want:
        ufunc, value = np.add, ftz(value) if flush else value
    if ufunc is None or want:
        return False, None
    ufunc.at(view, cells, value)
    return True, None


def result(old, op, kind, value, compare, flush):
    """The new value of a cell."""
    if op == "exch":
        return value
    if op == "cas":
        return np.where(old == compare, value, old)
    if op == "inc":
        return np.where(old >= value, 0, old + np.uint32(1)).astype(np.uint32)
    if op == "dec":
        return np.where((old == 0) | (old > value), value, old - np.uint32(1)).astype(np.uint32)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        return _halves(old, op, kind, value)
    if op == "add":
        return ftz(ftz(old) + ftz(value)) if flush else old + value
    if op in ("min", "max"):
        pick = {"min": np.fmin, "max": np.fmax} if kind == "f32" else {"min": np.minimum, "max": np.maximum}
        return pick[op](old, value)
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op](old, value)


def _halves(old, op, kind, value):
    words = [np.ascontiguousarray(x).view(np.uint16) for x in (old, value)]
    a, b = (bf16_value(w) if kind.startswith("bf16") else w.view(np.float16).astype(np.float32) for w in words)
    new = a + b if op == "add" else (np.fmin if op == "min" else np.fmax)(a, b)
    bits = bf16_bits(new).astype(np.uint16) if kind.startswith("bf16") else new.astype(np.float16).view(np.uint16)
    return bits.view(old.dtype)
