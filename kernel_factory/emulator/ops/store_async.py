"""st.async and red.async: stores to another CTA's shared memory that complete on its mbarrier.

PTX ISA 9.7.9.12 (st.async) and 9.7.13.9 (red.async). Like copies, they land as late as is legal.
"""

from __future__ import annotations

import numpy as np

from ..emitter import DTYPES, NUMPY, Emitter, Modifiers, size_of
from ..issue import Issue
from ..ptx.records import Instruction
from ..registry import emits, runtime
from .atomics import Atomic
from .bulk import Line
from .cluster import cluster_flat
from .memory_access import packed

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
    what = e.static(Atomic(op=op, kind=kind, dtype=DTYPES[dtype]))
    e.line(
        f"async_store({e.issue()}, {e.cluster_place(target)}, {e.cluster_place(barrier)}, {what}, "
        f"[{', '.join(values)}])"
    )


@runtime
def async_store(issue: Issue, target: tuple, barrier: tuple, what: Atomic, values: list[np.ndarray]) -> None:
    M, threads = issue.M, issue.threads
    if not threads.size:
        return
    nbytes = what.size * len(values)
    flat = cluster_flat(issue, target, nbytes)
    ids = M.mbarriers.find(cluster_flat(issue, barrier, 8), threads, issue.line, "st.async")
    words = packed(issue, values, what.dtype)
    if M.race:
        M.race.async_write(threads, flat[:, None], nbytes, ids, issue.line)
    view = M.shared_views[nbytes]
    if what.op:
        view, words = view.view(what.dtype), words.view(what.dtype)
    at = flat >> (nbytes.bit_length() - 1)

    def move(M: object, i: int) -> None:
        one = slice(i, i + 1)
        view[at[one]] = what.result(view[at[one]], words[one], None) if what.op else words[one]
        if M.race:
            M.race.async_landed(flat[one, None], nbytes, ids[one])

    M.async_copies.load(Line(move, threads, issue.line, np.full(threads.size, nbytes), ids))
