"""Tensor copies (TMA): loads, stores, reductions and prefetches of tiles of 1 to 5 dimensions.

PTX ISA 9.7.9.27. A load completes on an mbarrier and can go to several CTAs of the cluster (multicast); a store or a
reduction belongs to the bulk group of its thread. im2col, gather and scatter modes are a PtxError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from ..boxes import Boxes, check_room
from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..lanes import spread
from ..ptx.records import Address, Instruction, Symbol
from ..registry import emits, runtime
from ..tensor_map import MAP_BYTES, TensorMap, TensorMapError, decode
from .cluster import cluster_flat
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


def _tensor(e: Emitter, operand: object, rank: int) -> str:
    """Expression for the address of a tensor map, and the coordinates of a box."""
    if not isinstance(operand, Address) or len(operand.coordinates) != rank:
        raise e.fail(f"expected [tensorMap, {{{rank} coordinates}}]")
    if isinstance(operand.base, Symbol):
        place = e.layout.place(operand.base.name)[1] + operand.base.offset + operand.offset
        address = e.constant(np.uint64(WINDOWS["param"] + place))
    else:
        address = f"({e.value(operand.base, 'u64')} + u64({operand.offset}))"
    return f"({address}, [{', '.join(e.value(c, 'i32') for c in operand.coordinates)}])"


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
        return _store(e, rank, e.operands(2 + policy), None)
    if target not in ("shared::cta", "shared::cluster") or source != "global":
        raise e.fail("a tensor copy goes from global to shared::cta or shared::cluster memory, or back")
    mods.one("mbarrier::complete_tx::bytes")
    multicast = bool(mods.take("multicast::cluster"))
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    shared, tensor, barrier, *rest = e.operands(3 + multicast + policy)
    places = f"{e.cluster_place(shared)}, {_tensor(e, tensor, rank)}, {e.cluster_place(barrier)}"
    mask = e.value(rest[0], "u16") if multicast else "None"
    e.line(f"tensor_load({e.issue()}, {places}, {mask}, {pair})")
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
    _store(e, rank, e.operands(2 + policy), op)


def _store(e: Emitter, rank: int, operands: tuple, op: str | None) -> None:
    tensor, source, *_ = operands
    e.line(f"tensor_store({e.issue()}, {_tensor(e, tensor, rank)}, {e.shared_place(source)}, {op!r})")


@emits("cp.async.bulk.prefetch.tensor", writes=False)
def prefetch_tensor(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """cp.async.bulk.prefetch.tensor: there is no cache, but the tensor map is checked."""
    rank = _rank_and_mode(e, mods)
    mods.one("L2")
    mods.one("global")
    mods.take("tile")
    policy = int(bool(mods.take("L2::cache_hint")))
    e.line(f"tensor_prefetch({e.issue()}, {_tensor(e, e.operands(1 + policy)[0], rank)})")


# -- run time ---------------------------------------------------------------------------------------------------------
def _map_at(issue: Issue, address: int, rank: int, at: int) -> TensorMap:
    """The decoded tensor map at a generic address: a kernel parameter, or global memory."""
    raw = _map_bytes(issue, address, at)
    try:
        found = decode(raw[:64])
    except TensorMapError as error:
        raise issue.fault("bad-tensor-map", str(error), "encode the tensor map again", at) from None
    if found.rank != rank:
        what = f"a {rank}-dimensional copy with a tensor map of rank {found.rank}"
        raise issue.fault("bad-tensor-map", what, "use the opcode of the map's rank", at)
    return found


def _map_bytes(issue: Issue, address: int, at: int) -> bytes:
    M, offset = issue.M, address - WINDOWS["param"]
    if 0 <= offset <= len(M.param_bytes) - 64:
        if offset % 64:
            raise issue.fault("misaligned", f"tensor map at parameter offset {offset}", "align it to 64 bytes", at)
        return M.param_bytes[offset : offset + 64]
    buffer = M.memory.find(address, address + MAP_BYTES)
    if buffer is None or address % 64:
        raise issue.fault("bad-tensor-map", f"no tensor map lies at {M.memory.describe(address)}",
                          "pass the map as a parameter or in global memory, aligned to 64 bytes", at)  # fmt: skip
    return buffer.data[address - buffer.address :][:64].tobytes()


def _boxes(issue: Issue, tensor: tuple) -> Iterator[tuple]:
    """(rows among the threads, map, coordinates) for each tensor map in use."""
    address, coords = tensor
    table = np.stack([issue.each(c) for c in coords], axis=1).astype(np.int64)
    if address.shape[0] == 1:
        yield slice(None), _map_at(issue, int(address[0]), len(coords), 0), table
        return
    address = issue.each(address)
    for value in np.unique(address):
        rows = np.flatnonzero(address == value)
        yield rows, _map_at(issue, int(value), len(coords), int(rows[0])), table[rows]


@dataclass(slots=True)
class TileLoad:
    """Boxes on their way to shared memory at flat positions ``start``; each completes on its mbarrier."""

    tmap: TensorMap
    coords: np.ndarray
    start: np.ndarray
    barriers: np.ndarray
    threads: np.ndarray
    line: int
    knew: np.ndarray | None = None

    def land(self, M: object) -> None:
        boxes = Boxes(self.tmap, self.coords)
        with M.global_race.as_of(self.threads, self.knew) if M.race else nullcontext():
            data = boxes.read(M, self.line, self.threads)
        flat = boxes.shared(M, self.start)
        M.shared_views[boxes.unit][flat >> (boxes.unit.bit_length() - 1)] = data
        if M.race:
            M.race.async_landed(flat, boxes.unit, self.barriers)
        nbytes = np.full(self.barriers.shape, self.tmap.box_bytes)
        M.mbarriers.complete(self.barriers, nbytes, self.line, int(self.threads[0]))


@dataclass(slots=True)
class TileStore:
    """Boxes on their way to global memory; ``groups`` is filled in by the queue."""

    tmap: TensorMap
    coords: np.ndarray
    start: np.ndarray
    threads: np.ndarray
    line: int
    op: str | None
    groups: np.ndarray | None = None
    data: np.ndarray | None = None

    def part(self, keep: np.ndarray) -> TileStore:
        kept = {name: getattr(self, name)[keep] for name in ("coords", "start", "threads", "groups")}
        return replace(self, **kept, data=None if self.data is None else self.data[keep])

    def _source(self, M: object, boxes: Boxes) -> np.ndarray:
        return M.shared_views[boxes.unit][boxes.shared(M, self.start) >> (boxes.unit.bit_length() - 1)]

    def capture(self, M: object) -> None:
        """The source has been read; what is written is still under way."""
        self.data = self._source(M, Boxes(self.tmap, self.coords))

    def land(self, M: object) -> None:
        boxes = Boxes(self.tmap, self.coords)
        data = self._source(M, boxes) if self.data is None else self.data
        combine = combiner(self.op, self.tmap.element) if self.op else None
        boxes.write(M, data, self.line, self.threads, combine)


@runtime
def tensor_load(
    issue: Issue, target: tuple, tensor: tuple, barrier: tuple, mask: np.ndarray | None, pair: bool
) -> None:
    M, line = issue.M, issue.line
    start = cluster_flat(issue, target, 1)
    if not issue.threads.size:
        return
    objects = cluster_flat(issue, barrier, 8)
    targets = None if mask is None else issue.each(mask).astype(np.int64)
    for rows, tmap, table in _boxes(issue, tensor):
        some = issue.narrowed(issue.lanes[rows])
        to, on, who = start[rows], objects[rows], some.threads
        check_room(some, to, tmap.box_bytes, 128, "tensor load")
        if targets is not None:
            copy, to, on = multicast_to(some, to, on, targets[rows], pair)
            who, table = who[copy], table[copy]
        ids = M.mbarriers.find(on, who, line, "the completion of a tensor load")
        if M.race:
            boxes = Boxes(tmap, table)
            M.race.async_write(who, boxes.shared(M, to), boxes.unit, ids, line)
        knew = M.global_race.knowledge(who) if M.race else None
        M.async_copies.load(TileLoad(tmap, table, to, ids, who, line, knew))


def multicast_to(
    issue: Issue, start: np.ndarray, objects: np.ndarray, mask: np.ndarray, pair: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies of one load for every CTA in its mask, at the same offsets; the barrier of a pair may be the other's."""
    M = issue.M
    if (mask >> M.cluster_size).any() or not mask.all():
        at = int(np.argmax((mask >> M.cluster_size != 0) | (mask == 0)))
        raise issue.fault("bad-multicast", f"multicast mask {int(mask[at]):#x} in a cluster of {M.cluster_size} CTAs",
                          "name at least one CTA, and only CTAs of the cluster", at)  # fmt: skip
    copy, rank = np.nonzero((mask[:, None] >> np.arange(M.cluster_size)) & 1)
    stride = M.shared_stride
    first = M.cluster_start[M.cta[issue.threads[copy]]]
    signal = (rank & ~1) | (M.cta_rank[objects[copy] // stride] & 1) if pair else rank
    return copy, (first + rank) * stride + start[copy] % stride, (first + signal) * stride + objects[copy] % stride


@runtime
def tensor_store(issue: Issue, tensor: tuple, source: tuple, op: str | None) -> None:
    M, line = issue.M, issue.line
    start = own_flat(issue, source)
    if not issue.threads.size:
        return
    for rows, tmap, table in _boxes(issue, tensor):
        some = issue.narrowed(issue.lanes[rows])
        who, where = some.threads, start[rows]
        check_room(some, where, tmap.box_bytes, 128, "tensor store")
        if op is None:
            first = _once_a_warp(who, where, table)
            who, where, table = who[first], where[first], table[first]
        if M.race:
            boxes = Boxes(tmap, table)
            M.race.async_read(who, boxes.shared(M, where), boxes.unit, line)
        M.async_copies.store(TileStore(tmap, table, where, who, line, op))


def own_flat(issue: Issue, place: tuple) -> np.ndarray:
    """Flat positions in the thread's own shared memory, one a thread."""
    return spread(shared_flat(issue, place, 1), issue.count)


def _once_a_warp(threads: np.ndarray, start: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The first of a warp's identical stores: lanes that all store one tile store it once."""
    if threads.size == 1:
        return np.zeros(1, np.int64)
    rows = np.column_stack([threads >> 5, start, table])
    return np.sort(np.unique(rows, axis=0, return_index=True)[1])


@runtime
def tensor_prefetch(issue: Issue, tensor: tuple) -> None:
    if issue.threads.size:
        for _ in _boxes(issue, tensor):
            pass
