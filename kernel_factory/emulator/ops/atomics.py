"""atom and red on global and shared memory (PTX ISA 9.7.13.5 and 9.7.13.7).

Threads act one after the other in thread order, so results are the same on every run; scopes and orderings change
nothing here, because memory is sequentially consistent. On global memory atom.add.f32 flushes subnormals, as the
manual says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..emitter import DTYPES, NUMPY, Emitter, Modifiers, size_of
from ..issue import Issue
from ..lanes import spread
from ..numerics import bf16_bits, bf16_value, ftz
from ..ptx.records import Instruction, Vector
from ..race_atomics import shared_atomic
from ..registry import RUNTIME, emits, runtime
from .cluster import cluster_flat
from .generic_access import by_space, merged, space_of
from .memory_access import global_parts, place_in, shared_flat
from .reductions import UFUNCS

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
_BITWISE = {op: UFUNCS[op] for op in ("and", "or", "xor")}
_INTEGERS = ("u32", "s32", "u64", "s64")


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
    what = e.static(Atomic(op=op, kind=kind, dtype=DTYPES[storage], returns=dst is not None))
    name = e.temp()
    place = place_in(e, sources[0], space)
    e.line(f"{name} = atomic_{space}({e.issue()}, {place}, {what}, [{', '.join(values)}], {compare})")
    items = dst.items if isinstance(dst, Vector) else (dst,)
    for i, item in enumerate(items):
        e.set(item, f"{name}[{i}]", f"u{8 * size_of(storage)}" if storage != "c16" else "c16")


# -- one memory cell after the other ----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Atomic:
    """An operation on cells of ``dtype``, whose bits mean a ``kind``; ``returns``: the old values are wanted."""

    op: str
    kind: str
    dtype: type
    returns: bool = False
    flush: bool = False

    @property
    def size(self) -> int:
        return np.dtype(self.dtype).itemsize

    def update(self, view: np.ndarray, at: np.ndarray, value: np.ndarray, compare: np.ndarray | None) -> np.ndarray:
        """Apply the operation at ``at``, in order where positions repeat; the old values, if they are wanted."""
        if at.shape[0] == 0:
            return np.zeros(0, view.dtype)
        order = np.argsort(at, kind="stable")
        cells = at[order]
        first = np.ones(cells.shape, bool)
        first[1:] = cells[1:] != cells[:-1]
        start = np.maximum.accumulate(np.where(first, np.arange(cells.shape[0]), 0))
        rank = np.arange(cells.shape[0]) - start
        deepest = int(rank.max())
        old = np.empty(at.shape, view.dtype)
        if deepest > 16:
            known = self._at_once(view, cells, value[order], start)
            if known is not None:
                old[order] = known
                return old
        for turn in range(deepest + 1):
            now = order[rank == turn] if deepest else order
            where = at[now]
            before = view[where]
            old[now] = before
            view[where] = self.result(before, value[now], None if compare is None else compare[now])
        return old

    def _at_once(self, view: np.ndarray, cells: np.ndarray, value: np.ndarray, start: np.ndarray) -> np.ndarray | None:
        """Many threads on few cells: sums and extremes that need no order, and integer prefix sums for old values."""
        if self.kind in _INTEGERS and self.op == "add":
            before = view[cells]
            running = np.cumsum(value, dtype=value.dtype) - value
            np.add.at(view, cells, value)
            return before + (running - running[start])
        ufunc = _BITWISE.get(self.op)
        if self.kind in _INTEGERS and self.op in ("min", "max"):
            ufunc = np.minimum if self.op == "min" else np.maximum
        elif self.op == "add" and self.kind in ("f32", "f64"):
            ufunc, value = np.add, ftz(value) if self.flush else value
        if ufunc is None or self.returns:
            return None
        ufunc.at(view, cells, value)
        return np.zeros(cells.shape, view.dtype)  # nobody asks

    def result(self, old: np.ndarray, value: np.ndarray, compare: np.ndarray | None) -> np.ndarray:
        """The new value of a cell."""
        op = self.op
        if op == "exch":
            return value
        if op == "cas":
            return np.where(old == compare, value, old)
        if op == "inc":
            return np.where(old >= value, 0, old + np.uint32(1)).astype(np.uint32)
        if op == "dec":
            return np.where((old == 0) | (old > value), value, old - np.uint32(1)).astype(np.uint32)
        if self.kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self._halves(old, value)
        if op == "add":
            return ftz(ftz(old) + ftz(value)) if self.flush else old + value
        if op in ("min", "max"):
            pick = {"min": np.fmin, "max": np.fmax} if self.kind == "f32" else {"min": np.minimum, "max": np.maximum}
            return pick[op](old, value)
        return _BITWISE[op](old, value)

    def _halves(self, old: np.ndarray, value: np.ndarray) -> np.ndarray:
        wide = self.kind.startswith("bf16")
        words = [np.ascontiguousarray(x).view(np.uint16) for x in (old, value)]
        a, b = (bf16_value(w) if wide else w.view(np.float16).astype(np.float32) for w in words)
        new = a + b if self.op == "add" else (np.fmin if self.op == "min" else np.fmax)(a, b)
        bits = bf16_bits(new).astype(np.uint16) if wide else new.astype(np.float16).view(np.uint16)
        return bits.view(old.dtype)


# -- run time ---------------------------------------------------------------------------------------------------------
@runtime
def atomic_generic(issue: Issue, place: tuple, what: Atomic, values: list, compare: object) -> list:
    parts = by_space(issue, place[0])
    if parts is None:
        space, there = space_of(issue, place)
        return RUNTIME[f"atomic_{space}"](issue, there, what, values, compare)
    found = [atomic_generic(one, place, what, values, compare) for one in parts]
    return merged(parts, found) if what.returns else [None] * len(values)


@runtime
def atomic_shared(issue: Issue, place: tuple, what: Atomic, values: list, compare: object) -> list:
    return _on_shared(issue, shared_flat(issue, place, what.size), what, values[0], compare)


@runtime
def atomic_cluster(issue: Issue, place: tuple, what: Atomic, values: list, compare: object) -> list:
    return _on_shared(issue, cluster_flat(issue, place, what.size), what, values[0], compare)


def _on_shared(issue: Issue, flat: np.ndarray, what: Atomic, value: np.ndarray, compare: np.ndarray | None) -> list:
    """An atomic at these positions of the batch's shared memory, of whichever CTA."""
    M = issue.M
    if M.race:
        shared_atomic(M.race, issue.threads, flat, what.size, issue.line)
    if M.count:
        M.count.shared(issue, flat, what.size, "atom")
    view = M.shared_views[what.size].view(what.dtype)
    at = spread(flat >> (what.size.bit_length() - 1), issue.count)
    before = view[at]
    old = what.update(view, at, issue.each(value), None if compare is None else issue.each(compare))
    _changed(M, before, view[at])
    return [_words(issue, old) if what.returns else None]


@runtime
def atomic_global(issue: Issue, place: tuple, what: Atomic, values: list, compare: object) -> list:
    M, count = issue.M, len(values)
    if what.kind == "f32" and what.op == "add" and count == 1:
        what = replace(what, flush=True)
    out = [np.zeros(issue.count, what.dtype) for _ in values]
    values = [issue.each(value) for value in values]
    compare = None if compare is None else issue.each(compare)
    for lanes, elements in global_parts(issue, place, what.size * count, True):
        mine = slice(None) if lanes is None else lanes
        at = spread(elements.at, issue.count if lanes is None else lanes.shape[0])
        elements = replace(elements, at=at)
        if M.global_race:
            M.global_race.atomic(issue.some(lanes), elements, issue.line)
        if M.count:
            M.count.memory(issue, lanes, elements, "write")
        view = elements.buffer.view(what.size).view(what.dtype)
        for i, value in enumerate(values):
            cells = at * count + i
            before = view[cells]
            out[i][mine] = what.update(view, cells, value[mine], None if compare is None else compare[mine])
            _changed(M, before, view[cells])
    return [_words(issue, x) if what.returns else None for x in out]


def _changed(M: object, before: np.ndarray, after: np.ndarray) -> None:
    """A failed compare-and-swap changes nothing, and those who spin on it must let others run."""
    if (before != after).any():
        M.changed()


def _words(issue: Issue, old: np.ndarray) -> np.ndarray:
    """Old values as unsigned words, for each thread at hand."""
    return issue.back(old if old.dtype.kind == "c" else old.view(f"u{old.dtype.itemsize}"))
