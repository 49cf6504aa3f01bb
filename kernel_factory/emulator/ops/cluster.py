"""Clusters: mapa, getctarank, barrier.cluster, and ld and st of another CTA's shared memory.

PTX ISA 9.7.8.21 (mapa), 9.7.8.22 (getctarank), 9.7.13.4 (barrier.cluster), 5.1.7 (distributed shared memory).
The rank of the owning CTA stands in bits 24 and up of every shared address; see ``clusters``.
"""

from __future__ import annotations

import numpy as np

from ..clusters import RANK_SHIFT
from ..emitter import NUMPY, Emitter, Modifiers
from ..issue import Issue
from ..lanes import spread, threads_of
from ..ptx.records import Instruction
from ..registry import emits, runtime, terminates
from .memory_access import load_flat, shared_base, shared_flat, store_flat
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
@runtime
def cluster_base(M, sel, address):
    """What cluster_flat takes: without clusters the base of an ordinary shared access."""
    if address.dtype == np.uint64:
        generic = (address >> np.uint64(60)) == 1
        address = np.where(generic, address - np.uint64(WINDOWS["shared"]), address)
    return shared_base(M, sel, address) if M.cluster_size == 1 else address.astype(np.int64)


def cluster_flat(issue: Issue, place: tuple, nbytes: int) -> np.ndarray:
    """Checked flat byte positions of shared::cluster addresses, one a thread."""
    M = issue.M
    if M.cluster_size == 1:
        return spread(shared_flat(issue, place, nbytes), issue.count)
    base, offset = place
    address = issue.each(base) + offset
    rank, local = address >> RANK_SHIFT, address & _OFFSET
    bad = (rank >= M.cluster_size) | (local < M.shared_origin) | (local + nbytes > M.shared_end)
    if bad.any():
        at = int(np.argmax(bad))
        raise issue.fault(
            "out-of-bounds",
            f"shared::cluster access of {nbytes} bytes at offset {int(local[at]) - M.shared_origin} of "
            f"{M.shared_end - M.shared_origin} bytes in the CTA of rank {int(rank[at])} "
            f"(the cluster has {M.cluster_size} CTAs)",
            "take the address from mapa with a rank of this cluster",
            at,
        )
    if ((local & (nbytes - 1)) != 0).any():
        at = int(np.argmax((local & (nbytes - 1)) != 0))
        raise issue.fault(
            "misaligned",
            f"shared::cluster access of {nbytes} bytes at address {int(address[at]):#x}",
            f"align the address to {nbytes} bytes",
            at,
        )
    target = M.cluster_start[M.cta[issue.threads]] + rank
    M.reach(issue.threads, target, issue.line)
    return target * M.shared_stride + local - M.shared_origin


@runtime
def load_cluster(issue: Issue, place: tuple, dtype: type, count: int) -> list[np.ndarray]:
    flat = cluster_flat(issue, place, np.dtype(dtype).itemsize * count)
    return load_flat(issue, flat, dtype, count, "ld.cluster")


@runtime
def store_cluster(issue: Issue, place: tuple, dtype: type, values: list[np.ndarray]) -> None:
    flat = cluster_flat(issue, place, np.dtype(dtype).itemsize * len(values))
    store_flat(issue, flat, dtype, values, "st.cluster")


# -- the cluster's barrier --------------------------------------------------------------------------------------------
@emits("barrier.cluster.arrive", writes=False)
def arrive(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """barrier.cluster.arrive{.release,.relaxed}{.aligned}."""
    mods.take("aligned")
    sem = mods.take("release", "relaxed")
    e.operands(0)
    e.line(f"cluster_arrive({e.issue()}, {sem == 'relaxed'})")


@runtime
def cluster_arrive(issue: Issue, relaxed: bool) -> None:
    if issue.threads.size:
        issue.M.cluster_barrier.arrive(issue.threads, issue.line, relaxed)


def resolve_wait(M, group, block, sel, n, value) -> None:
    """Threads whose phase is complete go on; the others wait."""
    from ..machine import CLUSTER

    threads = threads_of(M, sel)
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
