"""st.async and red.async: stores to another CTA's shared memory that complete on its mbarrier.

PTX ISA 9.7.9.12 (st.async) and 9.7.13.9 (red.async). Like copies, they land as late as is legal.
"""

from __future__ import annotations

import numpy as np

from ..emitter import NUMPY, Emitter, Modifiers, size_of
from ..lanes import settle, spread, threads_of
from ..ptx.records import Instruction
from ..registry import emits, runtime
from .atomics import result
from .bulk import Line
from .cluster import cluster_address, cluster_flat
from .memory_access import WORDS, joined

_TYPES = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")


@emits("st.async", "red.async", writes=False)
def store_async(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """[a], value, [mbarrier]; the barrier's transaction count falls by the bytes stored."""
    reduce = ins.opcode == "red"
    kind = mods.type(*_TYPES[: 6 if reduce else 8])
    mods.ignore("weak", "relaxed", "cluster")
    mods.one("shared::cluster")
    mods.one("mbarrier::complete_tx::bytes")
    count = int((mods.take("v2", "v4") or "v1")[1:]) if not reduce else 1
    op = mods.one("add", "min", "max", "and", "or", "xor", "inc", "dec") if reduce else ""
    target, source, barrier = e.operands(3)
    dtype = NUMPY[kind] if reduce else f"u{8 * size_of(NUMPY[kind])}"
    values = e.values(source, dtype)
    if len(values) != count:
        raise e.fail(f"{ins.opcode}.async of {len(values)} values, expected {count}")
    base, offset = cluster_address(e, target)
    object_base, object_offset = cluster_address(e, barrier)
    e.line(
        f"async_store(M, sel, {base}, {offset}, {object_base}, {object_offset}, {dtype}, [{', '.join(values)}], "
        f"{op!r}, {kind!r}, {e.guard()}, {ins.line}, n)"
    )


@runtime
def async_store(M, sel, base, offset, barrier, barrier_offset, dtype, values, op, kind, guard, line, n):
    chosen = settle(guard)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    nbytes = np.dtype(dtype).itemsize * len(values)
    flat = cluster_flat(M, sel, base, offset, nbytes, chosen, line, n)
    objects = cluster_flat(M, sel, barrier, barrier_offset, 8, chosen, line, n)
    ids = M.mbarriers.find(objects, threads, line, "st.async")
    data = joined(values, n, dtype) if len(values) > 1 else spread(values[0], n)
    data = np.ascontiguousarray(data if chosen is None else data[chosen])
    if M.race:
        M.race.async_write(threads, flat[:, None], nbytes, ids, line)
    view = M.shared_views[nbytes].view(dtype) if op else M.shared_views[nbytes]
    words = data if op else data.view(WORDS[nbytes]).reshape(-1)
    at = flat >> (nbytes.bit_length() - 1)

    def move(M, i):
        one = slice(i, i + 1)
        view[at[one]] = result(view[at[one]], op, kind, words[one], None, False) if op else words[one]
        if M.race:
            M.race.async_landed(flat[one, None], nbytes, ids[one])

    M.async_copies.load(Line(move, threads, line, np.full(threads.size, nbytes), ids))
