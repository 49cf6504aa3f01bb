"""Plain bulk copies, bulk reductions and bulk groups (PTX ISA 9.7.9.25.4 to 9.7.9.25.6).

Sizes and addresses are multiples of 16. Into shared memory they complete on an mbarrier, into global memory they
belong to the bulk group of their thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..boxes import check_room
from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..memory import Elements
from ..ptx.records import Immediate, Instruction
from ..registry import emits, runtime
from .cluster import cluster_flat
from .reductions import combiner
from .tma import multicast_to, own_flat

_CHUNK = 16


@emits("cp.async.bulk", writes=False)
def bulk_copy(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk between global, shared::cta and shared::cluster memory."""
    target, source = mods.left.pop(0), mods.left.pop(0)
    policy = int(bool(mods.take("L2::cache_hint")))
    if target == "global" and source == "shared::cta":
        mods.one("bulk_group")
        _to_global(e, e.operands(3 + policy), None)
    elif target in ("shared::cta", "shared::cluster") and source == "global":
        mods.one("mbarrier::complete_tx::bytes")
        multicast = bool(mods.take("multicast::cluster"))
        shared, memory, size, barrier, *rest = e.operands(4 + multicast + policy)
        mask = e.value(rest[0], "u16") if multicast else "None"
        places = f"{e.cluster_place(shared)}, {e.global_place(memory)}"
        e.line(f"bulk_load({e.issue()}, {places}, {e.value(size, 'u32')}, {e.cluster_place(barrier)}, {mask})")
    elif target == "shared::cluster" and source == "shared::cta":
        mods.one("mbarrier::complete_tx::bytes")
        shared, other, size, barrier = e.operands(4)
        places = f"{e.cluster_place(shared)}, {e.shared_place(other)}"
        e.line(f"bulk_send({e.issue()}, {places}, {e.value(size, 'u32')}, {e.cluster_place(barrier)})")
    else:
        raise e.fail(f"cp.async.bulk from {source} to {target} is not emulated")


def _to_global(e: Emitter, operands: tuple, reduction: tuple[str, str] | None) -> None:
    target, source, size, *_ = operands
    places = f"{e.global_place(target)}, {e.shared_place(source)}"
    e.line(f"bulk_store({e.issue()}, {places}, {e.value(size, 'u32')}, {reduction})")


@emits("cp.reduce.async.bulk", writes=False)
def bulk_reduce(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.reduce.async.bulk.global.shared::cta.bulk_group: element-wise into global memory."""
    kind = mods.left.pop()
    target, source = mods.left.pop(0), mods.left.pop(0)
    if (target, source) != ("global", "shared::cta"):
        raise e.fail("bulk reductions are emulated into global memory only")
    mods.one("bulk_group")
    op = mods.one("add", "min", "max", "and", "or", "xor")
    mods.take("noftz")
    policy = int(bool(mods.take("L2::cache_hint")))
    if kind not in ("f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64"):
        raise e.fail(f"reductions of .{kind} are not emulated")
    _to_global(e, e.operands(3 + policy), (op, kind))


@emits("cp.async.bulk.prefetch.L2", writes=False)
def bulk_prefetch(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk.prefetch.L2.global: there is no cache."""
    mods.one("global")
    e.operands(2 + bool(mods.take("L2::cache_hint")))


@emits("cp.async.bulk.commit_group", writes=False)
def commit(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Close the thread's bulk group."""
    e.operands(0)
    e.line(f"bulk_commit({e.issue()})")


@runtime
def bulk_commit(issue: Issue) -> None:
    issue.M.async_copies.commit(issue.threads)


@emits("cp.async.bulk.wait_group", writes=False)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Wait until at most N bulk groups of the thread are pending; with .read, until their sources are read."""
    read = bool(mods.take("read"))
    (left,) = e.operands(1)
    if not isinstance(left, Immediate):
        raise e.fail("the count of wait_group is no constant")
    e.line(f"bulk_wait({e.issue()}, {left.value}, {read})")


@runtime
def bulk_wait(issue: Issue, left: int, read: bool) -> None:
    M, threads = issue.M, issue.threads
    if threads.size:
        M.async_copies.wait(threads, left, read)
        if M.race:
            M.race.bulk_waited(threads, left)


# -- run time ---------------------------------------------------------------------------------------------------------
class Line:
    """One bulk copy of ``size`` bytes for each thread, on its mbarrier. ``move(M, i)`` moves the bytes of copy i."""

    def __init__(self, move, threads, line, size, barriers) -> None:
        self.move, self.threads, self.line, self.size, self.barriers = move, threads, line, size, barriers

    def land(self, M: object) -> None:
        for i in range(self.threads.size):
            self.move(M, i)
        M.mbarriers.complete(self.barriers, self.size, self.line, int(self.threads[0]))


@dataclass(slots=True)
class BulkStore:
    """Bulk copies to (buffer, first byte) ``places`` in global memory; ``groups`` is filled in by the queue."""

    places: list[tuple]
    start: np.ndarray
    size: np.ndarray
    threads: np.ndarray
    line: int
    combine: object
    groups: np.ndarray | None = None
    data: list[np.ndarray] | None = None

    def part(self, keep: np.ndarray) -> BulkStore:
        kept = {name: getattr(self, name)[keep] for name in ("start", "size", "threads", "groups")}
        rows = np.flatnonzero(keep).tolist()
        data = None if self.data is None else [self.data[i] for i in rows]
        return replace(self, **kept, places=[self.places[i] for i in rows], data=data)

    def _in_shared(self, M: object) -> list[np.ndarray]:
        return [M.shared_bytes[a : a + n] for a, n in zip(self.start.tolist(), self.size.tolist(), strict=True)]

    def capture(self, M: object) -> None:
        """The sources have been read; what is written is still under way."""
        self.data = [source.copy() for source in self._in_shared(M)]

    def land(self, M: object) -> None:
        for i, data in enumerate(self.data or self._in_shared(M)):
            self._write(M, i, data.view(np.complex128))

    def _write(self, M: object, i: int, data: np.ndarray) -> None:
        buffer, first = self.places[i]
        elements = _elements(self.places[i], data.nbytes)
        who = np.full(data.size, self.threads[i])
        if M.global_race and self.combine is None:
            M.global_race.write(who, elements, self.line, data)
        elif M.global_race:
            M.global_race.reduce(who, elements, self.line)
        _count(M, elements, "write", self.line)
        if self.combine is None:
            buffer.data[first : first + data.nbytes] = data.view(np.uint8)
        else:
            self.combine(buffer, elements.at, data, _CHUNK)


def _sizes(issue: Issue, size: np.ndarray) -> np.ndarray:
    size = issue.each(size).astype(np.int64)
    if (size % _CHUNK).any():
        at = int(np.argmax(size % _CHUNK != 0))
        raise issue.fault("misaligned", f"bulk copy of {int(size[at])} bytes", "copy a multiple of 16 bytes", at)
    return size


def _in_global(issue: Issue, place: tuple, size: np.ndarray, write: bool) -> list[tuple]:
    """(buffer, first byte) of each copy."""
    M, ((address, *_), offset) = issue.M, place
    out = []
    for i, (at, nbytes) in enumerate(zip((issue.each(address) + offset).tolist(), size.tolist(), strict=True)):
        buffer = M.memory.find(at, at + nbytes)
        if at % _CHUNK:
            raise issue.fault("misaligned", f"bulk copy at global address {at:#x}", "align it to 16 bytes", i)
        if buffer is None or (write and not buffer.writable):
            kind = "out-of-bounds" if buffer is None else "write-to-read-only"
            message = f"bulk copy of {nbytes} bytes: {M.memory.describe(at)}"
            raise issue.fault(kind, message, "correct address and size", i)
        out.append((buffer, at - buffer.address))
    return out


def _elements(place: tuple, nbytes: int) -> Elements:
    """The 16-byte chunks of one copy in global memory."""
    buffer, first = place
    return Elements(buffer, (first >> 4) + np.arange(nbytes // _CHUNK), _CHUNK)


def _count(M: object, elements: Elements, direction: str, line: int) -> None:
    if M.count:
        M.count.tensor(replace(elements, at=elements.at[None]), None, direction, line)


def _chunks(start: np.ndarray, size: np.ndarray, i: int) -> np.ndarray:
    """Positions of the 16-byte chunks of copy i."""
    return int(start[i]) + np.arange(0, int(size[i]), _CHUNK)


def _sources(issue: Issue, start: np.ndarray, size: np.ndarray) -> Iterator[tuple]:
    """What the race checker is told of sources: thread, 16-byte chunks, their size, and line of each copy."""
    for i in range(issue.count):
        yield issue.threads[i : i + 1], _chunks(start, size, i)[None], _CHUNK, issue.line


@runtime
def bulk_load(issue: Issue, target: tuple, source: tuple, size: np.ndarray, barrier: tuple, mask: object) -> None:
    M, line, threads = issue.M, issue.line, issue.threads
    if not threads.size:
        return
    size = _sizes(issue, size)
    start, objects = cluster_flat(issue, target, _CHUNK), cluster_flat(issue, barrier, 8)
    places = _in_global(issue, source, size, False)
    check_room(issue, start, size, _CHUNK, "bulk copy")
    if mask is not None:
        copy, start, objects = multicast_to(issue, start, objects, issue.each(mask).astype(np.int64), False)
        threads, size, places = threads[copy], size[copy], [places[i] for i in copy]
    ids = M.mbarriers.find(objects, threads, line, "cp.async.bulk")
    knew = M.global_race.knowledge(threads) if M.race else None

    def move(M: object, i: int) -> None:
        buffer, first = places[i]
        elements = _elements(places[i], int(size[i]))
        if M.global_race:
            who = np.full(elements.at.size, threads[i])
            with M.global_race.as_of(who, None if knew is None else knew[i]):
                M.global_race.read(who, elements, line)
        _count(M, elements, "read", line)
        M.shared_bytes[start[i] : start[i] + size[i]] = buffer.data[first : first + int(size[i])]
        if M.race:
            M.race.async_landed(_chunks(start, size, i)[None], _CHUNK, ids[i : i + 1])

    _queue(M, start, Line(move, threads, line, size, ids))


def _queue(M: object, start: np.ndarray, job: Line) -> None:
    """Copies to these positions in shared memory are in flight."""
    if M.race:
        for i in range(job.threads.size):
            one = slice(i, i + 1)
            chunks = _chunks(start, job.size, i)[None]
            M.race.async_write(job.threads[one], chunks, _CHUNK, job.barriers[one], job.line)
    M.async_copies.load(job)


@runtime
def bulk_send(issue: Issue, target: tuple, source: tuple, size: np.ndarray, barrier: tuple) -> None:
    M, threads = issue.M, issue.threads
    if not threads.size:
        return
    size = _sizes(issue, size)
    start, objects = cluster_flat(issue, target, _CHUNK), cluster_flat(issue, barrier, 8)
    origin = own_flat(issue, source)
    ids = M.mbarriers.find(objects, threads, issue.line, "cp.async.bulk")
    for place in (origin, start):
        check_room(issue, place, size, _CHUNK, "bulk copy")
    sent = [M.race.sending.start(*source) for source in _sources(issue, origin, size)] if M.race else []

    def move(M: object, i: int) -> None:
        M.shared_bytes[start[i] : start[i] + size[i]] = M.shared_bytes[origin[i] : origin[i] + size[i]]
        if M.race:
            M.race.sending.landed(int(threads[i]), int(ids[i]), sent[i])
            M.race.async_landed(_chunks(start, size, i)[None], _CHUNK, ids[i : i + 1])

    _queue(M, start, Line(move, threads, issue.line, size, ids))


@runtime
def bulk_store(issue: Issue, target: tuple, source: tuple, size: np.ndarray, reduction: tuple | None) -> None:
    M, line, threads = issue.M, issue.line, issue.threads
    if not threads.size:
        return
    size = _sizes(issue, size)
    start, places = own_flat(issue, source), _in_global(issue, target, size, True)
    combine = combiner(*reduction) if reduction else None
    check_room(issue, start, size, _CHUNK, "bulk copy")
    if M.race:
        for source in _sources(issue, start, size):
            M.race.async_read(*source)
    M.async_copies.store(BulkStore(places, start, size, threads, line, combine))
