"""Clusters: mapa, getctarank, barrier.cluster, and ld and st of another CTA's shared memory.

PTX ISA 9.7.8.21 (mapa), 9.7.8.22 (getctarank), 9.7.13.4 (barrier.cluster), 5.1.7 (distributed shared memory).
The rank of the owning CTA stands in bits 24 and up of every shared address; see ``clusters``.
"""

from __future__ import annotations

import numpy as np

from ..clusters import RANK_SHIFT
from ..emitter import NUMPY, Emitter, Modifiers
from ..errors import Fault
from ..lanes import settle, spread, threads_of
from ..ptx.records import Instruction
from ..registry import emits, runtime, terminates
from .memory_access import WORDS, columns, joined, scatter_back, shared_base, shared_flat
from .move import WINDOWS

_OFFSET = (1 << RANK_SHIFT) - 1


@emits("mapa")
def map_address(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """mapa: the same variable in the CTA of another rank."""
    dtype = NUMPY[mods.type("u32", "u64")]
    mods.take("shared::cluster")
    dst, a, rank = e.operands(3)
    wide = f"{e.value(rank, 'u32')}.astype({dtype}) << {dtype}({RANK_SHIFT})"
    e.set(dst, f"mapped({e.value(a, dtype)}, {wide})", dtype)


@runtime
def mapped(address, rank):
    kind = address.dtype.type
    return (address & ~kind(0xFF << RANK_SHIFT)) | rank


@emits("getctarank")
def rank_of_address(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """getctarank: the rank of the CTA that an address belongs to."""
    dtype = NUMPY[mods.type("u32", "u64")]
    mods.take("shared::cluster")
    dst, a = e.operands(2)
    e.set(dst, f"(({e.value(a, dtype)} >> {dtype}({RANK_SHIFT})) & {dtype}(255)).astype(u32)", "u32")


# -- addresses --------------------------------------------------------------------------------------------------------
def cluster_address(e: Emitter, operand: object) -> tuple[str, int]:
    """Expression for the base of a shared::cluster (or generic shared) address, and the byte offset."""
    base, offset = e.address(operand)
    dtype = "u64" if getattr(base, "type", "").endswith("64") else "u32"
    key = (base,) if hasattr(base, "number") else ()
    return e.common(f"cluster {'' if key else base}", key, f"cluster_base(M, sel, {e.value(base, dtype)})"), offset


@runtime
def cluster_base(M, sel, address):
    """What cluster_flat takes: without clusters the base of an ordinary shared access."""
    if address.dtype == np.uint64:
        generic = (address >> np.uint64(60)) == 1
        address = np.where(generic, address - np.uint64(WINDOWS["shared"]), address)
    return shared_base(M, sel, address) if M.cluster_size == 1 else address.astype(np.int64)


@runtime
def cluster_flat(M, sel, base, offset, nbytes, chosen, line, n):
    """Checked flat byte positions of shared::cluster addresses, one a (chosen) thread."""
    if M.cluster_size == 1:
        return spread(shared_flat(M, sel, base, offset, nbytes, chosen, line), n if chosen is None else chosen.size)
    address = spread(base, n) + offset
    address = address if chosen is None else address[chosen]
    ids = threads_of(M, sel, chosen)
    rank, local = address >> RANK_SHIFT, address & _OFFSET
    bad = (rank >= M.cluster_size) | (local < M.shared_origin) | (local + nbytes > M.shared_end)
    if bad.any():
        at = int(np.argmax(bad))
        raise Fault("out-of-bounds", line,
                    f"shared::cluster access of {nbytes} bytes at offset {int(local[at]) - M.shared_origin} of "
                    f"{M.shared_end - M.shared_origin} bytes in the CTA of rank {int(rank[at])} "
                    f"(the cluster has {M.cluster_size} CTAs)",
                    "take the address from mapa with a rank of this cluster", int(ids[at]))  # fmt: skip
    if ((local & (nbytes - 1)) != 0).any():
        at = int(np.argmax((local & (nbytes - 1)) != 0))
        raise Fault("misaligned", line, f"shared::cluster access of {nbytes} bytes at address {int(address[at]):#x}",
                    f"align the address to {nbytes} bytes", int(ids[at]))  # fmt: skip
    target = M.cluster_start[M.cta[ids]] + rank
    M.reach(ids, target, line)
    return target * M.shared_stride + local - M.shared_origin


@runtime
def load_cluster(M, sel, base, offset, dtype, count, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * count
    flat = cluster_flat(M, sel, base, offset, nbytes, chosen, line, n)
    if M.race:
        M.race.read(threads_of(M, sel, chosen), flat, nbytes, line)
    if M.count:
        M.count.shared(M, sel, chosen, flat, nbytes, line, "ld.cluster")
    x = M.shared_views[nbytes].take(flat >> (nbytes.bit_length() - 1))
    return scatter_back(columns(x, dtype, count), chosen, n)


@runtime
def store_cluster(M, sel, base, offset, dtype, values, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * len(values)
    flat = cluster_flat(M, sel, base, offset, nbytes, chosen, line, n)
    if M.race:
        M.race.write(threads_of(M, sel, chosen), flat, nbytes, line)
    if M.count:
        M.count.shared(M, sel, chosen, flat, nbytes, line, "st.cluster")
    data = joined(values, n, dtype) if len(values) > 1 else spread(values[0], n)
    data = data if chosen is None else data[chosen]
    M.shared_views[nbytes][flat >> (nbytes.bit_length() - 1)] = (
        np.ascontiguousarray(data).view(WORDS[nbytes]).reshape(-1)
    )
    M.changed()


# -- the cluster's barrier --------------------------------------------------------------------------------------------
@emits("barrier.cluster.arrive", writes=False)
def arrive(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """barrier.cluster.arrive{.release,.relaxed}{.aligned}."""
    mods.take("aligned")
    sem = mods.take("release", "relaxed")
    e.operands(0)
    e.line(f"cluster_arrive(M, sel, {sem == 'relaxed'}, {e.guard()}, {ins.line})")


@runtime
def cluster_arrive(M, sel, relaxed, mask, line):
    threads = threads_of(M, sel, settle(mask))
    if threads.size:
        M.cluster_barrier.arrive(threads, line, relaxed)


def resolve_wait(M, group, block, sel, n, value) -> None:
    """Threads whose phase is complete go on; the others wait."""
    from ..machine import CLUSTER

    threads = threads_of(M, sel, None)
    passed = M.cluster_barrier.passed(threads, block.terminator.line)
    if M.race:
        M.race.cluster_wait(threads[passed], M.cluster_barrier.of_thread[threads[passed]])
    if passed.all():
        M.go(group, sel, block.number + 1)
        return
    M.part(group, sel, np.full(n, block.number + 1))
    M.state[threads[~passed]] = CLUSTER


@terminates("barrier.cluster.wait", resolve=resolve_wait)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> str:
    """barrier.cluster.wait{.acquire}{.aligned}."""
    mods.take("aligned")
    mods.take("acquire")
    if ins.guard:
        raise e.fail("a guarded barrier.cluster.wait is not emulated")
    e.operands(0)
    return "None"
