"""Tensor copies (TMA): loads, stores, reductions and prefetches of tiles of 1 to 5 dimensions.

PTX ISA 9.7.9.27. A load completes on an mbarrier and can go to several CTAs of the cluster (multicast); a store or a
reduction belongs to the bulk group of its thread. im2col, gather and scatter modes are a PtxError.
"""

from __future__ import annotations

import numpy as np

from ..boxes import Boxes, check_room
from ..emitter import Emitter, Modifiers
from ..errors import Fault
from ..lanes import settle, spread, threads_of
from ..ptx.records import Address, Instruction, Symbol
from ..registry import emits, runtime
from ..tensor_map import MAP_BYTES, TensorMap, TensorMapError, decode
from .cluster import cluster_address, cluster_flat
from .memory_access import shared_flat
from .move import WINDOWS
from .reductions import combiner

_MODES = ("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs", "tile::gather4", "tile::scatter4")


def _rank_and_mode(e: Emitter, mods: Modifiers) -> int:
    rank = int(mods.one("1d", "2d", "3d", "4d", "5d")[0])
    if any(m in mods.left for m in _MODES):
        raise e.fail("only the tile mode of tensor copies is emulated")
    mods.take("tile")
    return rank


def _map_operand(e: Emitter, operand: object, rank: int) -> tuple[str, str]:
    """Expressions for the address of the tensor map and for the coordinates."""
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        raise e.fail(f"expected [tensorMap, {{{rank} coordinates}}]")
    if isinstance(operand.base, Symbol):
        place = e.layout.place(operand.base.name)[1] + operand.base.offset + operand.offset
        address = e.constant(np.uint64(WINDOWS["param"] + place))
    else:
        address = f"({e.value(operand.base, 'u64')} + u64({operand.offset}))"
    return address, ", ".join(e.value(c, "i32") for c in operand.coordinates)


@emits("cp.async.bulk.tensor", writes=False)
def tensor_copy(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk.tensor.{1..5}d between global and shared memory."""
    rank = _rank_and_mode(e, mods)
    target, source = mods.left.pop(0), mods.left.pop(0)
    policy = int(bool(mods.take("L2::cache_hint")))
    if target == "global":
        if source not in ("shared::cta", "shared"):
            raise e.fail("a tensor store reads shared::cta memory")
        mods.one("bulk_group")
        return _store(e, ins, rank, e.operands(2 + policy), "None")
    if target not in ("shared::cta", "shared::cluster") or source != "global":
        raise e.fail("a tensor copy goes from global to shared::cta or shared::cluster memory, or back")
    mods.one("mbarrier::complete_tx::bytes")
    multicast = bool(mods.take("multicast::cluster"))
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    shared, tensor, barrier, *rest = e.operands(3 + multicast + policy)
    base, offset = cluster_address(e, shared)
    object_base, object_offset = cluster_address(e, barrier)
    address, coords = _map_operand(e, tensor, rank)
    mask = e.value(rest[0], "u16") if multicast else "None"
    e.line(
        f"tensor_load(M, sel, {base}, {offset}, {address}, [{coords}], {object_base}, {object_offset}, {mask}, {pair}, "
        f"{e.guard()}, {ins.line}, n)"
    )
    return None


@emits("cp.reduce.async.bulk.tensor", writes=False)
def tensor_reduce(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.reduce.async.bulk.tensor: add, min, max, inc, dec, and, or, xor into global memory."""
    rank = _rank_and_mode(e, mods)
    mods.one("global")
    mods.one("shared::cta")
    op = mods.one("add", "min", "max", "and", "or", "xor")
    mods.take("tile")
    mods.one("bulk_group")
    policy = int(bool(mods.take("L2::cache_hint")))
    _store(e, ins, rank, e.operands(2 + policy), repr(op))


def _store(e: Emitter, ins: Instruction, rank: int, operands: tuple, op: str) -> None:
    address, coords = _map_operand(e, operands[0], rank)
    base, offset = e.shared_address(operands[1])
    e.line(f"tensor_store(M, sel, {base}, {offset}, {address}, [{coords}], {op}, {e.guard()}, {ins.line}, n)")


@emits("cp.async.bulk.prefetch.tensor", writes=False)
def prefetch_tensor(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk.prefetch.tensor: there is no cache, but the tensor map is checked."""
    rank = _rank_and_mode(e, mods)
    mods.one("L2")
    mods.one("global")
    mods.take("tile")
    policy = int(bool(mods.take("L2::cache_hint")))
    address, coords = _map_operand(e, e.operands(1 + policy)[0], rank)
    e.line(f"tensor_prefetch(M, sel, {address}, [{coords}], {e.guard()}, {ins.line}, n)")


# -- run time ---------------------------------------------------------------------------------------------------------
def tensor_map_at(M: object, address: int, rank: int, line: int, thread: int) -> TensorMap:
    """The decoded tensor map at a generic address: a kernel parameter, or global memory."""
    raw = _map_bytes(M, address, line, thread)
    try:
        found = decode(raw[:64])
    except TensorMapError as error:
        raise Fault("bad-tensor-map", line, str(error), "encode the tensor map again", thread) from None
    if found.rank != rank:
        raise Fault("bad-tensor-map", line, f"a {rank}-dimensional copy with a tensor map of rank {found.rank}",
                    "use the opcode of the map's rank", thread)  # fmt: skip
    return found


def _map_bytes(M: object, address: int, line: int, thread: int) -> bytes:
    offset = address - WINDOWS["param"]
    if 0 <= offset <= len(M.param_bytes) - 64:
        if offset % 64:
            raise Fault("misaligned", line, f"tensor map at parameter offset {offset}", "align it to 64 bytes", thread)
        return M.param_bytes[offset : offset + 64]
    buffer = M.memory.find(address, address + MAP_BYTES)
    if buffer is None or address % 64:
        raise Fault("bad-tensor-map", line, f"no tensor map lies at {M.memory.describe(address)}",
                    "pass the map as a parameter or in global memory, aligned to 64 bytes", thread)  # fmt: skip
    return buffer.data[address - buffer.address :][:64].tobytes()


def _maps(M, sel, address, coords, chosen, line, n):
    """(positions among the chosen, map, coordinates) for each tensor map in use."""
    threads = threads_of(M, sel, chosen)
    table = np.stack([spread(c, n) if chosen is None else spread(c, n)[chosen] for c in coords], axis=1)
    table = table.astype(np.int64)
    if address.shape[0] == 1:
        yield slice(None), tensor_map_at(M, int(address[0]), len(coords), line, int(threads[0])), table
        return
    address = spread(address, n) if chosen is None else address[chosen]
    for value in np.unique(address):
        rows = np.flatnonzero(address == value)
        yield rows, tensor_map_at(M, int(value), len(coords), line, int(threads[rows[0]])), table[rows]


class TileLoad:
    """Boxes on their way to shared memory at flat positions ``start``; each completes on its mbarrier."""

    def __init__(self, tmap, coords, start, barriers, threads, line) -> None:
        self.tmap, self.coords, self.start, self.barriers = tmap, coords, start, barriers
        self.threads, self.line = threads, line

    def land(self, M: object) -> None:
        boxes = Boxes(self.tmap, self.coords)
        data = boxes.read(M, self.line, self.threads)
        flat = boxes.shared(M, self.start)
        M.shared_views[boxes.unit][flat >> (boxes.unit.bit_length() - 1)] = data
        if M.race:
            M.race.async_landed(flat, boxes.unit, self.barriers)
        nbytes = np.full(self.barriers.shape, self.tmap.box_bytes)
        M.mbarriers.complete(self.barriers, nbytes, self.line, int(self.threads[0]))


class TileStore:
    """Boxes on their way to global memory; ``groups`` is filled in by the queue."""

    def __init__(self, tmap, coords, start, threads, line, op, groups=None) -> None:
        self.tmap, self.coords, self.start, self.threads = tmap, coords, start, threads
        self.line, self.op, self.groups, self.barriers = line, op, groups, None

    def part(self, keep: np.ndarray) -> TileStore:
        return TileStore(self.tmap, self.coords[keep], self.start[keep], self.threads[keep], self.line, self.op,
                         self.groups[keep])  # fmt: skip

    def land(self, M: object) -> None:
        boxes = Boxes(self.tmap, self.coords)
        flat = boxes.shared(M, self.start)
        data = M.shared_views[boxes.unit][flat >> (boxes.unit.bit_length() - 1)]
        combine = combiner(self.op, self.tmap.element) if self.op else None
        boxes.write(M, data, self.line, self.threads, combine)


@runtime
def tensor_load(M, sel, base, offset, address, coords, barrier, barrier_offset, mask, pair, guard, line, n):
    chosen = settle(guard)
    start = cluster_flat(M, sel, base, offset, 1, chosen, line, n)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    objects = cluster_flat(M, sel, barrier, barrier_offset, 8, chosen, line, n)
    targets = None
    if mask is not None:
        targets = spread(mask, n).astype(np.int64)
        targets = targets if chosen is None else targets[chosen]
    for rows, tmap, table in _maps(M, sel, address, coords, chosen, line, n):
        check_room(M, start[rows], tmap.box_bytes, 128, line, threads[rows], "tensor load")
        to, on, who = start[rows], objects[rows], threads[rows]
        if targets is not None:
            copy, to, on = _multicast(M, to, on, targets[rows], pair, line, who)
            who, table = who[copy], table[copy]
        ids = M.mbarriers.find(on, who, line, "the completion of a tensor load")
        job = TileLoad(tmap, table, to, ids, who, line)
        if M.race:
            boxes = Boxes(tmap, table)
            M.race.async_write(who, boxes.shared(M, to), boxes.unit, ids, line)
        M.async_copies.load(job)


def _multicast(M, start, objects, mask, pair, line, threads):
    """Copies of one load for every CTA in its mask, at the same offsets; the barrier of a pair may be the other's."""
    if (mask >> M.cluster_size).any() or not mask.all():
        at = int(np.argmax((mask >> M.cluster_size != 0) | (mask == 0)))
        raise Fault("bad-multicast", line, f"multicast mask {int(mask[at]):#x} in a cluster of {M.cluster_size} CTAs",
                    "name at least one CTA, and only CTAs of the cluster", int(threads[at]))  # fmt: skip
    copy, rank = np.nonzero((mask[:, None] >> np.arange(M.cluster_size)) & 1)
    stride = M.shared_stride
    first = M.cluster_start[M.cta[threads[copy]]]
    signal = (rank & ~1) | (M.cta_rank[objects[copy] // stride] & 1) if pair else rank
    return copy, (first + rank) * stride + start[copy] % stride, (first + signal) * stride + objects[copy] % stride


@runtime
def tensor_store(M, sel, base, offset, address, coords, op, guard, line, n):
    chosen = settle(guard)
    start = own_flat(M, sel, base, offset, chosen, line, n)
    threads = threads_of(M, sel, chosen)
    if not threads.size:
        return
    for rows, tmap, table in _maps(M, sel, address, coords, chosen, line, n):
        check_room(M, start[rows], tmap.box_bytes, 128, line, threads[rows], "tensor store")
        who, where = threads[rows], start[rows]
        if op is None:
            first = _once_a_warp(who, where, table)
            who, where, table = who[first], where[first], table[first]
        if M.race:
            boxes = Boxes(tmap, table)
            M.race.async_read(who, boxes.shared(M, where), boxes.unit, line)
        M.async_copies.store(TileStore(tmap, table, where, who, line, op))


def own_flat(M, sel, base, offset, chosen, line, n):
    """Flat positions in the thread's own shared memory, one a (chosen) thread."""
    return spread(shared_flat(M, sel, base, offset, 1, chosen, line), n if chosen is None else chosen.size)


def _once_a_warp(threads: np.ndarray, start: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The first of a warp's identical stores: lanes that all store one tile store it once."""
    if threads.size == 1:
        return np.zeros(1, np.int64)
    rows = np.column_stack([threads >> 5, start, table])
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


@runtime
def tensor_prefetch(M, sel, address, coords, guard, line, n):
    chosen = settle(guard)
    if threads_of(M, sel, chosen).size:
        for _ in _maps(M, sel, address, coords, chosen, line, n):
            pass
