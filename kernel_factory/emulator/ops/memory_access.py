"""ld and st, and their run time for global and shared memory; the other spaces are in ``generic_access``."""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers, size_of, storage
from ..errors import Fault
from ..lanes import settle, spread, threads_of
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


def _base(e: Emitter, operand: object, space: str) -> tuple[str, int]:
    if space == "global":
        return e.global_address(operand)
    if space == "shared":
        return e.shared_address(operand)
    if space == "cluster":
        from .cluster import cluster_address  # that module builds on this one

        return cluster_address(e, operand)
    base, offset = e.address(operand)
    if space == "local" and isinstance(base, Register) and storage(base.type) == "u32":
        return f"{e.value(base, 'u32')}.astype(u64)", offset
    return e.value(base, "u64"), offset


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
    code, offset = _base(e, source, space)
    e.line(f"{name} = load_{space}(M, sel, {code}, {offset}, {dtype}, {count}, {e.guard()}, {ins.line}, n)")
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
    code, offset = _base(e, target, space)
    e.line(f"store_{space}(M, sel, {code}, {offset}, {bits}, [{', '.join(values)}], {e.guard()}, {ins.line}, n)")


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


def scatter_back(parts: list[np.ndarray], chosen: np.ndarray | None, n: int) -> list[np.ndarray]:
    if chosen is None:
        return parts
    out = []
    for part in parts:
        full = np.zeros(n, part.dtype)
        full[chosen] = part
        out.append(full)
    return out


WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128, 32: np.dtype("V32")}


# -- shared -----------------------------------------------------------------------------------------------------------
@runtime
def shared_base(M: object, sel: object, address: np.ndarray) -> tuple:
    """Addresses flattened over the batch's CTAs, with their range and alignment bits, computed once a base register."""
    a = address.astype(np.int64)
    if M.rank_bits is not None:
        a = a - (M.rank_bits if sel is None else M.rank_bits[sel])
    flat = a + (M.cta_shared if sel is None else M.cta_shared[sel])
    return flat, int(a.min()), int(a.max()), int(np.bitwise_or.reduce(a))


def shared_flat(
    M: object, sel: object, base: tuple, offset: int, nbytes: int, chosen: np.ndarray | None, line: int
) -> np.ndarray:
    """Checked flat byte positions in the batch's shared memory."""
    flat, low, high, bits = base
    if chosen is None:
        if (
            low + offset >= M.shared_origin
            and high + offset + nbytes <= M.shared_end
            and not (bits | offset) & (nbytes - 1)
        ):
            return flat + offset
    else:
        flat = flat[chosen]
    flat = flat + offset
    ids = threads_of(M, sel, chosen)
    address = flat - M.cta_shared[ids]
    outside = (address < M.shared_origin) | (address + nbytes > M.shared_end)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise Fault(
            "out-of-bounds",
            line,
            f"shared access of {nbytes} bytes at offset {int(address[at]) - M.shared_origin} of "
            f"{M.shared_end - M.shared_origin} bytes of shared memory",
            "correct the layout, or ask for more dynamic shared memory at launch",
            int(ids[at]),
        )
    misaligned = address & (nbytes - 1) != 0
    if misaligned.any():
        at = int(np.flatnonzero(misaligned)[0])
        raise Fault(
            "misaligned",
            line,
            f"shared access of {nbytes} bytes at address {int(address[at]):#x}",
            f"align the address to {nbytes} bytes, or access fewer bytes at once",
            int(ids[at]),
        )
    return flat


@runtime
def load_shared(M, sel, base, offset, dtype, count, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * count
    flat = shared_flat(M, sel, base, offset, nbytes, chosen, line)
    if M.race:
        M.race.read(threads_of(M, sel, chosen), flat, nbytes, line)
    if M.count:
        M.count.shared(M, sel, chosen, flat, nbytes, line, "ld")
    x = M.shared_views[nbytes].take(flat >> (nbytes.bit_length() - 1))
    return scatter_back(columns(x, dtype, count), chosen, n)


@runtime
def store_shared(M, sel, base, offset, dtype, values, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * len(values)
    flat = shared_flat(M, sel, base, offset, nbytes, chosen, line)
    data = joined(values, n, dtype) if len(values) > 1 else spread(values[0], n)
    data = np.ascontiguousarray(data if chosen is None else data[chosen]).view(WORDS[nbytes]).reshape(-1)
    if M.race:
        M.race.write(threads_of(M, sel, chosen), flat, nbytes, line, data=data)
    if M.count:
        M.count.shared(M, sel, chosen, flat, nbytes, line, "st")
    M.shared_views[nbytes][flat >> (nbytes.bit_length() - 1)] = data
    M.changed()


# -- global -----------------------------------------------------------------------------------------------------------
@runtime
def global_base(address: np.ndarray) -> tuple:
    return address.view(np.int64), int(address.min()), int(address.max()), int(np.bitwise_or.reduce(address))


def global_parts(M, sel, base, offset, nbytes, chosen, write, line, n):
    """Checked (lanes or None, element positions, buffer) of one access; one part unless buffers mix."""
    address, low, high, bits = base
    if chosen is not None:
        address = spread(address, n)[chosen]
        if address.size == 0:
            return []
        low, high = int(address.min()), int(address.max())
    if (bits | offset) & (nbytes - 1) and ((address + offset) & (nbytes - 1)).any():
        at = int(np.flatnonzero((address + offset) & (nbytes - 1))[0])
        raise Fault(
            "misaligned",
            line,
            f"global access of {nbytes} bytes at address {int(address[at]) + offset:#x}",
            f"align the pointer and the strides to {nbytes} bytes, or access fewer bytes at once",
            _thread(M, sel, chosen, at),
        )
    shift = nbytes.bit_length() - 1
    buffer = M.memory.find(low + offset, high + offset + nbytes)
    if buffer is not None and (buffer.writable or not write):
        return [(None, (address + (offset - buffer.address)) >> shift, buffer)]
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
            raise Fault(
                kind,
                line,
                f"global {'store' if write else 'load'} of {nbytes} bytes: " + M.memory.describe(int(exact[lanes[0]])),
                cure,
                _thread(M, sel, chosen, int(lanes[0])),
            )
        parts.append((lanes, (exact[lanes] - buffer.address) >> shift, buffer))
    return parts


def _thread(M, sel, chosen, at):
    ids = threads_of(M, sel, chosen)
    return int(ids[min(at, ids.shape[0] - 1)])


def global_take(M, sel, base, offset, nbytes, chosen, line, n):
    """Gather elements of ``nbytes``; one element when all threads read one address."""
    out = None
    for lanes, at, buffer in global_parts(M, sel, base, offset, nbytes, chosen, False, line, n):
        if M.global_race:
            M.global_race.read(threads_of(M, sel, chosen), lanes, at, nbytes, buffer, line)
        if M.count:
            M.count.memory(M, sel, chosen, lanes, at, nbytes, buffer, "read", line, n)
        x = buffer.view(nbytes).take(at)
        if lanes is None:
            return x
        if out is None:
            out = np.zeros(base[0].shape[0] if chosen is None else chosen.shape[0], x.dtype)
        out[lanes] = x
    return np.zeros(0, WORDS[nbytes]) if out is None else out


@runtime
def load_global(M, sel, base, offset, dtype, count, mask, line, n):
    chosen = settle(mask)
    x = global_take(M, sel, base, offset, np.dtype(dtype).itemsize * count, chosen, line, n)
    return scatter_back(columns(x, dtype, count), chosen, n)


@runtime
def store_global(M, sel, base, offset, dtype, values, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * len(values)
    data = np.ascontiguousarray(joined(values, n, dtype) if len(values) > 1 else spread(values[0], n))
    data = data.view(WORDS[nbytes]).reshape(-1)
    M.changed()
    data = data if chosen is None else data[chosen]
    for lanes, at, buffer in global_parts(M, sel, base, offset, nbytes, chosen, True, line, n):
        part = data if lanes is None else data[lanes]
        if at.shape[0] != part.shape[0]:
            at = np.full(part.shape[0], at[0])
        if M.global_race:
            M.global_race.write(threads_of(M, sel, chosen), lanes, at, nbytes, buffer, line, part)
        if M.count:
            M.count.memory(M, sel, chosen, lanes, at, nbytes, buffer, "write", line, n)
        buffer.view(nbytes)[at] = part
