"""Plain bulk copies, bulk reductions and bulk groups (PTX ISA 9.7.9.25.4 to 9.7.9.25.6).

Sizes and addresses are multiples of 16. Into shared memory they complete on an mbarrier, into global memory they
belong to the bulk group of their thread.
"""

from __future__ import annotations

import numpy as np

from ..boxes import check_room
from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import settle, spread, threads_of
from ..ptx.records import Immediate, Instruction
from ..registry import emits, runtime
from .cluster import cluster_address, cluster_flat
from .reductions import combiner
from .tma import own_flat

_CHUNK = 16


@emits("cp.async.bulk", writes=False)
def bulk_copy(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk between global, shared::cta and shared::cluster memory."""
    target, source = mods.left.pop(0), mods.left.pop(0)
    policy = int(bool(mods.take("L2::cache_hint")))
    if target == "global" and source == "shared::cta":
        mods.one("bulk_group")
        _to_global(e, ins, e.operands(3 + policy), "None", "None")
    elif target in ("shared::cta", "shared::cluster") and source == "global":
        mods.one("mbarrier::complete_tx::bytes")
        multicast = bool(mods.take("multicast::cluster"))
        shared, memory, size, barrier, *rest = e.operands(4 + multicast + policy)
        base, offset = cluster_address(e, shared)
        place, place_offset = e.global_address(memory)
        mask = e.value(rest[0], "u16") if multicast else "None"
        _call(e, ins, "bulk_load", f"{base}, {offset}, {place}, {place_offset}", size, barrier, mask)
    elif target == "shared::cluster" and source == "shared::cta":
        mods.one("mbarrier::complete_tx::bytes")
        shared, other, size, barrier = e.operands(4)
        base, offset = cluster_address(e, shared)
        place, place_offset = e.shared_address(other)
        _call(e, ins, "bulk_send", f"{base}, {offset}, {place}, {place_offset}", size, barrier, "None")
    else:
        raise e.fail(f"cp.async.bulk from {source} to {target} is not emulated")


def _call(e: Emitter, ins: Instruction, function: str, places: str, size: object, barrier: object, mask: str) -> None:
    object_base, object_offset = cluster_address(e, barrier)
    e.line(
        f"{function}(M, sel, {places}, {e.value(size, 'u32')}, {object_base}, {object_offset}, {mask}, {e.guard()}, "
        f"{ins.line}, n)"
    )


def _to_global(e: Emitter, ins: Instruction, operands: tuple, op: str, kind: str) -> None:
    place, place_offset = e.global_address(operands[0])
    base, offset = e.shared_address(operands[1])
    e.line(
        f"bulk_store(M, sel, {base}, {offset}, {place}, {place_offset}, {e.value(operands[2], 'u32')}, {op}, {kind}, "
        f"{e.guard()}, {ins.line}, n)"
    )


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
    _to_global(e, ins, e.operands(3 + policy), repr(op), repr(kind))


@emits("cp.async.bulk.prefetch.L2", writes=False)
def bulk_prefetch(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk.prefetch.L2.global: there is no cache."""
    mods.one("global")
    e.operands(2 + bool(mods.take("L2::cache_hint")))


@emits("cp.async.bulk.commit_group", writes=False)
def commit(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Close the thread's bulk group."""
    e.operands(0)
    e.line(f"bulk_commit(M, sel, {e.guard()})")


@runtime
def bulk_commit(M, sel, guard):
    threads = threads_of(M, sel, settle(guard))
    M.async_copies.commit(threads)


@emits("cp.async.bulk.wait_group", writes=False)
def wait(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Wait until at most N bulk groups of the thread are pending; with .read, until their sources are read."""
    mods.take("read")
    (left,) = e.operands(1)
    if not isinstance(left, Immediate):
        raise e.fail("the count of wait_group is no constant")
    e.line(f"bulk_wait(M, sel, {left.value}, {e.guard()})")


@runtime
def bulk_wait(M, sel, left, guard):
    threads = threads_of(M, sel, settle(guard))
    if threads.size:
        M.async_copies.wait(threads, left)
        if M.race:
            M.race.bulk_waited(threads, left)


# -- run time ---------------------------------------------------------------------------------------------------------
class Line:
    """One bulk copy of ``size`` bytes for each thread. ``move(M, i)`` moves the bytes of copy i."""

    def __init__(self, move, threads, line, size, barriers=None, groups=None) -> None:
        self.move, self.threads, self.line, self.size = move, threads, line, size
        self.barriers, self.groups = barriers, groups
        self.rows = np.arange(threads.size)

    def part(self, keep: np.ndarray) -> Line:
        out = Line(self.move, self.threads[keep], self.line, self.size[keep], self.barriers, self.groups[keep])
        out.rows = self.rows[keep]
        return out

    def land(self, M: object) -> None:
        for row in self.rows:
            self.move(M, int(row))
        if self.barriers is not None:
            M.mbarriers.complete(self.barriers, self.size, self.line, int(self.threads[0]))


def _sizes(size, n, chosen, threads, line):
    size = spread(size, n).astype(np.int64)
    size = size if chosen is None else size[chosen]
    if (size % _CHUNK).any():
        at = int(np.argmax(size % _CHUNK != 0))
        raise Fault("misaligned", line, f"bulk copy of {int(size[at])} bytes", "copy a multiple of 16 bytes",
                    int(threads[at]))  # fmt: skip
    return size


def _global(M, base, offset, size, chosen, threads, line, n, write):
    """(buffer, first byte) of each copy."""
    address = spread(base[0], n) + offset
    address = address if chosen is None else address[chosen]
    out = []
    for at, nbytes, thread in zip(address.tolist(), size.tolist(), threads.tolist(), strict=True):
        buffer = M.memory.find(at, at + nbytes)
        if at % _CHUNK:
            raise Fault("misaligned", line, f"bulk copy at global address {at:#x}", "align it to 16 bytes", thread)
        if buffer is None or (write and not buffer.writable):
            kind = "out-of-bounds" if buffer is None else "write-to-read-only"
            message = f"bulk copy of {nbytes} bytes: {M.memory.describe(at)}"
            raise Fault(kind, line, message, "correct address and size", thread)
        out.append((buffer, at - buffer.address))
    return out


def _chunks(start: int, size: int) -> np.ndarray:
    return start + np.arange(0, size, _CHUNK)


@runtime
def bulk_load(M, sel, base, offset, place, place_offset, size, barrier, barrier_offset, mask, guard, line, n):
    chosen = settle(guard)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    size = _sizes(size, n, chosen, threads, line)
    start = cluster_flat(M, sel, base, offset, _CHUNK, chosen, line, n)
    objects = cluster_flat(M, sel, barrier, barrier_offset, 8, chosen, line, n)
    places = _global(M, place, place_offset, size, chosen, threads, line, n, False)
    if mask is not None:
        from .tma import _multicast

        mask = spread(mask, n).astype(np.int64)
        copy, start, objects = _multicast(
            M, start, objects, mask if chosen is None else mask[chosen], False, line, threads
        )
        threads, size, places = threads[copy], size[copy], [places[i] for i in copy]

    def move(M, i):
        buffer, first = places[i]
        at = (first + np.arange(0, int(size[i]), _CHUNK)) >> 4
        if M.global_race:
            M.global_race.read(np.full(at.size, threads[i]), None, at, _CHUNK, buffer, line)
        if M.count:
            M.count.tensor(buffer, at[None], _CHUNK, None, "read", line)
        M.shared_bytes[start[i] : start[i] + size[i]] = buffer.data[first : first + int(size[i])]
        if M.race:
            M.race.async_landed(_chunks(int(start[i]), int(size[i]))[None], _CHUNK, ids[i : i + 1])

    _queue(
        M, start, size, objects, threads, line, move, ids := M.mbarriers.find(objects, threads, line, "cp.async.bulk")
    )


def _queue(M, start, size, objects, threads, line, move, ids):
    for i in range(threads.size):
        check_room(M, start[i : i + 1], int(size[i]), _CHUNK, line, threads[i : i + 1], "bulk copy")
        if M.race:
            M.race.async_write(
                threads[i : i + 1], _chunks(int(start[i]), int(size[i]))[None], _CHUNK, ids[i : i + 1], line
            )
    M.async_copies.load(Line(move, threads, line, size, ids))


@runtime
def bulk_send(M, sel, base, offset, place, place_offset, size, barrier, barrier_offset, mask, guard, line, n):
    chosen = settle(guard)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    size = _sizes(size, n, chosen, threads, line)
    start = cluster_flat(M, sel, base, offset, _CHUNK, chosen, line, n)
    source = own_flat(M, sel, place, place_offset, chosen, line, n)
    objects = cluster_flat(M, sel, barrier, barrier_offset, 8, chosen, line, n)
    ids = M.mbarriers.find(objects, threads, line, "cp.async.bulk")
    for i in range(threads.size):
        check_room(M, source[i : i + 1], int(size[i]), _CHUNK, line, threads[i : i + 1], "bulk copy")
        if M.race:
            M.race.async_read(
                threads[i : i + 1], _chunks(int(source[i]), int(size[i]))[None], _CHUNK, line, group=False
            )

    def move(M, i):
        M.shared_bytes[start[i] : start[i] + size[i]] = M.shared_bytes[source[i] : source[i] + size[i]]
        if M.race:
            M.race.async_landed(_chunks(int(start[i]), int(size[i]))[None], _CHUNK, ids[i : i + 1])

    _queue(M, start, size, objects, threads, line, move, ids)


@runtime
def bulk_store(M, sel, base, offset, place, place_offset, size, op, kind, guard, line, n):
    chosen = settle(guard)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    size = _sizes(size, n, chosen, threads, line)
    start = own_flat(M, sel, base, offset, chosen, line, n)
    places = _global(M, place, place_offset, size, chosen, threads, line, n, True)
    combine = combiner(op, kind) if op else None
    for i in range(threads.size):
        check_room(M, start[i : i + 1], int(size[i]), _CHUNK, line, threads[i : i + 1], "bulk copy")
        if M.race:
            M.race.async_read(threads[i : i + 1], _chunks(int(start[i]), int(size[i]))[None], _CHUNK, line)

    def move(M, i):
        buffer, first = places[i]
        at = (first + np.arange(0, int(size[i]), _CHUNK)) >> 4
        data = M.shared_bytes[start[i] : start[i] + size[i]].view(np.complex128)
        if M.global_race and combine is None:
            M.global_race.write(np.full(at.size, threads[i]), None, at, _CHUNK, buffer, line, data)
        if M.count:
            M.count.tensor(buffer, at[None], _CHUNK, None, "write", line)
        if combine is None:
            buffer.data[first : first + int(size[i])] = data.view(np.uint8)
        else:
            combine(buffer, at, data, _CHUNK)

    M.async_copies.store(Line(move, threads, line, size))
