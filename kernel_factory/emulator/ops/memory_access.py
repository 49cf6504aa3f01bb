"""ld and st, and their run time for global and shared memory; the other spaces are in ``generic_access``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers, size_of, storage
from ..issue import Issue
from ..lanes import spread
from ..memory import Elements
from ..ptx.records import Instruction, Register, Symbol, Vector
from ..registry import emits, runtime

_HINTS = (
    "nc",
    "weak",
    "relaxed",
    "acquire",
    "release",
    "volatile",
    "mmio",
    "unified",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::",
    "L2::",
    "level::",
    "cache_hint",
)


_SHARED = ("shared", "shared::cta", "shared::cluster")
_SPACES = ("global", *_SHARED, "local", "const", "param", "param::entry", "param::func")


def _shape(e: Emitter, mods: Modifiers) -> tuple[str, str, int]:
    """Space, dtype and vector length of an access."""
    dtype = NUMPY[mods.type()]
    count = int((mods.take("v2", "v4", "v8") or "v1")[1:])
    space = mods.take(*_SPACES) or "generic"
    space = "cluster" if space == "shared::cluster" else space.split("::")[0]
    mods.ignore(*_HINTS)
    space = "global" if space == "const" else space
    if count * size_of(dtype) > 32:
        raise e.fail(f"access of {count} x {dtype} in .{space} is not emulated")
    return space, dtype, count


def place_in(e: Emitter, operand: object, space: str) -> str:
    """The place of an operand in this space."""
    if space == "global":
        return e.global_place(operand)
    if space == "shared":
        return e.shared_place(operand)
    if space == "cluster":
        return e.cluster_place(operand)
    base, offset = e.address(operand)
    if space == "local" and isinstance(base, Register) and storage(base.type) == "u32":
        return f"({e.value(base, 'u32')}.astype(u64), {offset})"
    return f"({e.value(base, 'u64')}, {offset})"


@emits("ld", "ldu")
def load(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Loads of 1 to 32 bytes a thread."""
    policy = "L2::cache_hint" in mods.left  # one operand more, ignored
    space, dtype, count = _shape(e, mods)
    dst, source, *_ = e.operands(2 + policy)
    items = dst.items if isinstance(dst, Vector) else (dst,)
    if len(items) != count:
        raise e.fail(f"vector of {len(items)} registers, expected {count}")
    base, offset = e.address(source)
    if space == "param" and isinstance(base, Symbol) and e.layout.place(base.name)[0] == "local":
        space = "local"  # a parameter of a call
    if space == "param" and isinstance(base, Symbol):
        start = e.layout.place(base.name)[1] + offset
        for i, item in enumerate(items):
            e.set(item, f"parameter(M, {start + i * size_of(dtype)}, {dtype})", dtype)
        return
    if space == "param":
        space = "generic"
    name = e.temp()
    e.line(f"{name} = load_{space}({e.issue()}, {place_in(e, source, space)}, {dtype}, {count})")
    for i, item in enumerate(items):
        e.set(item, f"{name}[{i}]", dtype)


@emits("st", writes=False)
def store(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Stores of 1 to 32 bytes a thread."""
    policy = "L2::cache_hint" in mods.left  # one operand more, ignored
    space, dtype, count = _shape(e, mods)
    target, source, *_ = e.operands(2 + policy)
    bits = dtype if dtype == "c16" else f"u{8 * size_of(dtype)}"
    values = e.values(source, bits)
    base, _ = e.address(target)
    if space == "param" and isinstance(base, Symbol) and e.layout.place(base.name)[0] == "local":
        space = "local"  # a parameter of a call
    if len(values) != count or space == "param":
        raise e.fail(f"store of {len(values)} values, expected {count}, in .{space}")
    e.line(f"store_{space}({e.issue()}, {place_in(e, target, space)}, {bits}, [{', '.join(values)}])")


@runtime
def parameter(M: object, offset: int, dtype: type) -> np.ndarray:
    return np.frombuffer(M.param_bytes, dtype, 1, offset)


@runtime
def symbol_address(M: object, sel: object, space: str, offset: int, dtype: type) -> np.ndarray:
    """Address of a variable; in a cluster a shared address carries the rank of the thread's CTA."""
    if space == "shared" and M.rank_bits is not None:
        rank = M.rank_bits if sel is None else M.rank_bits[sel]
        return (rank + (M.shared_origin + offset)).astype(dtype)
    base = M.shared_origin if space == "shared" else 0
    return np.array([base + offset], dtype)


@runtime
def columns(x: np.ndarray, dtype: type, count: int) -> list[np.ndarray]:
    """Split wide elements into ``count`` contiguous arrays of ``dtype``."""
    if count == 1:
        return [x.view(dtype)]
    return list(np.ascontiguousarray(x.view(dtype).reshape(-1, count).T))


def joined(values: list[np.ndarray], n: int, dtype: type) -> np.ndarray:
    """The reverse of columns: (n, count) in memory order."""
    out = np.empty((n, len(values)), dtype)
    for i, x in enumerate(values):
        out[:, i] = x
    return out


WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128, 32: np.dtype("V32")}


def packed(issue: Issue, values: list[np.ndarray], dtype: type) -> np.ndarray:
    """What each thread stores, as one word of all its values."""
    n = issue.n
    data = joined(values, n, dtype) if len(values) > 1 else spread(values[0], n)
    data = np.ascontiguousarray(data if issue.chosen is None else data[issue.chosen])
    return data.view(WORDS[np.dtype(dtype).itemsize * len(values)]).reshape(-1)


def unpacked(issue: Issue, words: np.ndarray, dtype: type, count: int) -> list[np.ndarray]:
    """The reverse, for loads."""
    return [issue.back(part) for part in columns(words, dtype, count)]


# -- shared -----------------------------------------------------------------------------------------------------------
@runtime
def shared_base(M: object, sel: object, address: np.ndarray) -> tuple:
    """Addresses flattened over the batch's CTAs, with their range and alignment bits, computed once a base register."""
    a = address.astype(np.int64)
    if M.rank_bits is not None:
        a = a - (M.rank_bits if sel is None else M.rank_bits[sel])
    flat = a + (M.cta_shared if sel is None else M.cta_shared[sel])
    return flat, int(a.min()), int(a.max()), int(np.bitwise_or.reduce(a))


def shared_flat(issue: Issue, place: tuple, nbytes: int) -> np.ndarray:
    """Checked flat byte positions in the batch's shared memory."""
    M = issue.M
    (flat, low, high, bits), offset = place
    if issue.chosen is None:
        if (
            low + offset >= M.shared_origin
            and high + offset + nbytes <= M.shared_end
            and not (bits | offset) & (nbytes - 1)
        ):
            return flat + offset
    else:
        flat = flat[issue.chosen]
    flat = flat + offset
    address = flat - M.cta_shared[issue.threads]
    outside = (address < M.shared_origin) | (address + nbytes > M.shared_end)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise issue.fault(
            "out-of-bounds",
            f"shared access of {nbytes} bytes at offset {int(address[at]) - M.shared_origin} of "
            f"{M.shared_end - M.shared_origin} bytes of shared memory",
            "correct the layout, or ask for more dynamic shared memory at launch",
            at,
        )
    misaligned = address & (nbytes - 1) != 0
    if misaligned.any():
        at = int(np.flatnonzero(misaligned)[0])
        raise issue.fault(
            "misaligned",
            f"shared access of {nbytes} bytes at address {int(address[at]):#x}",
            f"align the address to {nbytes} bytes, or access fewer bytes at once",
            at,
        )
    return flat


@runtime
def load_shared(issue: Issue, place: tuple, dtype: type, count: int) -> list[np.ndarray]:
    return load_flat(issue, shared_flat(issue, place, np.dtype(dtype).itemsize * count), dtype, count)


@runtime
def store_shared(issue: Issue, place: tuple, dtype: type, values: list[np.ndarray]) -> None:
    store_flat(issue, shared_flat(issue, place, np.dtype(dtype).itemsize * len(values)), dtype, values)


def load_flat(issue: Issue, flat: np.ndarray, dtype: type, count: int, kind: str = "ld") -> list[np.ndarray]:
    """Load from checked positions in the batch's shared memory."""
    M, nbytes = issue.M, np.dtype(dtype).itemsize * count
    if M.race:
        M.race.read(issue.threads, flat, nbytes, issue.line)
    if M.count:
        M.count.shared(issue, flat, nbytes, kind)
    return unpacked(issue, M.shared_views[nbytes].take(flat >> (nbytes.bit_length() - 1)), dtype, count)


def store_flat(issue: Issue, flat: np.ndarray, dtype: type, values: list[np.ndarray], kind: str = "st") -> None:
    """Store to checked positions in the batch's shared memory."""
    M, nbytes = issue.M, np.dtype(dtype).itemsize * len(values)
    data = packed(issue, values, dtype)
    if M.race:
        M.race.write(issue.threads, flat, nbytes, issue.line, data=data)
    if M.count:
        M.count.shared(issue, flat, nbytes, kind)
    M.shared_views[nbytes][flat >> (nbytes.bit_length() - 1)] = data
    M.changed()


# -- global -----------------------------------------------------------------------------------------------------------
@runtime
def global_base(address: np.ndarray) -> tuple:
    return address.view(np.int64), int(address.min()), int(address.max()), int(np.bitwise_or.reduce(address))


def global_parts(issue: Issue, place: tuple, nbytes: int, write: bool) -> list[tuple]:
    """(lanes or None for all, elements) of one checked access; one part unless buffers mix.

    One element stands for all threads that access the same one.
    """
    M = issue.M
    (address, low, high, bits), offset = place
    if issue.chosen is not None:
        address = issue.each(address)
        if address.size == 0:
            return []
        low, high = int(address.min()), int(address.max())
    if (bits | offset) & (nbytes - 1) and ((address + offset) & (nbytes - 1)).any():
        at = int(np.flatnonzero((address + offset) & (nbytes - 1))[0])
        raise issue.fault(
            "misaligned",
            f"global access of {nbytes} bytes at address {int(address[at]) + offset:#x}",
            f"align the pointer and the strides to {nbytes} bytes, or access fewer bytes at once",
            at,
        )
    shift = nbytes.bit_length() - 1
    buffer = M.memory.find(low + offset, high + offset + nbytes)
    if buffer is not None and (buffer.writable or not write):
        return [(None, Elements(buffer, (address + (offset - buffer.address)) >> shift, nbytes))]
    parts = []
    exact = address + offset
    which = M.memory.which(exact, nbytes)
    for index in np.unique(which):
        lanes = np.flatnonzero(which == index)
        buffer = M.memory.buffer(int(index))
        if buffer is None or (write and not buffer.writable):
            kind, cure = (
                ("out-of-bounds", "correct the predicate or the tile bounds")
                if buffer is None
                else ("write-to-read-only", "write to an output or scratch buffer, or register this one as writable")
            )
            what = f"global {'store' if write else 'load'} of {nbytes} bytes: "
            raise issue.fault(kind, what + M.memory.describe(int(exact[lanes[0]])), cure, int(lanes[0]))
        parts.append((lanes, Elements(buffer, (exact[lanes] - buffer.address) >> shift, nbytes)))
    return parts


def global_take(issue: Issue, place: tuple, nbytes: int) -> np.ndarray:
    """Gather elements of ``nbytes``; one element when all threads read one address."""
    M, out = issue.M, None
    for lanes, elements in global_parts(issue, place, nbytes, False):
        if M.global_race:
            M.global_race.read(issue.some(lanes), elements, issue.line)
        if M.count:
            M.count.memory(issue, lanes, elements, "read")
        x = elements.buffer.view(nbytes).take(elements.at)
        if lanes is None:
            return x
        if out is None:
            out = np.zeros(place[0][0].shape[0] if issue.chosen is None else issue.count, x.dtype)
        out[lanes] = x
    return np.zeros(0, WORDS[nbytes]) if out is None else out


@runtime
def load_global(issue: Issue, place: tuple, dtype: type, count: int) -> list[np.ndarray]:
    x = global_take(issue, place, np.dtype(dtype).itemsize * count)
    return unpacked(issue, x, dtype, count)


@runtime
def store_global(issue: Issue, place: tuple, dtype: type, values: list[np.ndarray]) -> None:
    M, nbytes = issue.M, np.dtype(dtype).itemsize * len(values)
    data = packed(issue, values, dtype)
    M.changed()
    for lanes, elements in global_parts(issue, place, nbytes, True):
        part = data if lanes is None else data[lanes]
        if elements.at.shape[0] != part.shape[0]:
            elements = replace(elements, at=np.full(part.shape[0], elements.at[0]))
        if M.global_race:
            M.global_race.write(issue.some(lanes), elements, issue.line, part)
        if M.count:
            M.count.memory(issue, lanes, elements, "write")
        elements.buffer.view(nbytes)[elements.at] = part
