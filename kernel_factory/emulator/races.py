"""Race checks of shared memory: every access against the happens-before order of ``ordering``.

A shadow cell covers the smallest access of the kernel (2 bytes or more, exact since accesses are aligned). It holds
its last writer (column and lane) with the writer's clock, and for every reader the clock and lane of its last read.
Lanes of one warp are ordered where the warp has met (bar.warp.sync, barriers). Data in flight belongs to a column
whose clock nobody ever sees, so that one comparison finds a missing barrier, a missing wait and a read of
uninitialised memory. Data that TMA has landed belongs to the mbarrier it completed on.
"""

from __future__ import annotations

import numpy as np

from .copy_lines import CopyLines, overlap
from .errors import Fault
from .flags import SharedFlags, strong_lines
from .global_races import GlobalRaces, UnsetRegisters
from .ordering import Ordering
from .partial_releases import MANY, TOGETHER, PartialReleases
from .race_atomics import after_atomics
from .race_sends import Sends
from .shadow import Access, Places, cell_bytes

__all__ = ["GlobalRaces", "SharedRaces", "UnsetRegisters"]

_WAIT = "wait for the copy's group (cp.async.wait_group), then bar.sync, or for its mbarrier phase, before touching it"
_CURES = {
    "race-read-after-write": "put bar.sync between the write and the read",
    "race-write-after-write": "put bar.sync between the two writes",
    "race-write-after-read": "put bar.sync, or a wait for the stage's empty barrier, between the read and the write",
    "warp-race-read-after-write": "put bar.warp.sync between the write and the other lane's read",
    "warp-race-write-after-write": "put bar.warp.sync between the two writes",
    "warp-race-write-after-read": "put bar.warp.sync between the read and the other lane's write",
    "async-in-flight": _WAIT,
    "async-read-in-flight": "wait for wgmma.wait_group, or cp.async.bulk.wait_group.read, and tell the writer, first",
    "uninitialised-shared": "write the bytes before reading them",
    "async-not-waited": "wait for all groups before the kernel ends",
    "missing-proxy-fence": "put fence.proxy.async.shared::cta after the generic writes, then a barrier",
    "cluster-exit": "let the CTA wait (barrier.cluster, or an mbarrier) until the others are done with its memory",
    "mbarrier-init-race": "put bar.sync (or barrier.cluster) between mbarrier.init and the other warps' use",
    "mbarrier-init-unfenced": "put fence.mbarrier_init.release.cluster after mbarrier.init, then a barrier",
    "mbarrier-plain-access": "use mbarrier.inval, and a barrier, before the bytes hold anything else",
    "mbarrier-after-inval": "let all warps that wait for the barrier meet before mbarrier.inval",
    "mbarrier-phase-lag": "let every waiter arrive (on an empty barrier) before the next phase can complete",
}


class SharedRaces(Ordering):
    """Happens-before checks of one batch's shared memory."""

    def __init__(self, machine: object) -> None:
        super().__init__(machine)
        self.G = cell_bytes(machine.program)
        n = machine.shared_bytes.shape[0] // self.G
        self.thread_mask = (1 << self.bits) - 1
        self.readers = self.warp_columns + self.groups + self.bulk
        self.last = np.full(n, (1 << self.bits) | (32 * self.never), np.int32)
        self.line = np.zeros(n, np.int32)
        self.reads = np.zeros((self.readers, n), np.int32)  # clock << 6 | lane
        self.has_read = np.zeros(self.readers, bool)
        self.read_line = np.zeros(n, np.int32)
        self.atomics = self.atomic_line = self.has_atomics = None
        instructions = [i for i in machine.program.kernel.instructions if "global" not in i.modifiers]
        self.strong = strong_lines(instructions)
        self.flags = SharedFlags(self) if self.strong else None
        self.copies, self.sending = CopyLines.of(machine.program.kernel), Sends(self)
        self.landed_phase = np.zeros((machine.cta_count, self.slots), np.int32)
        self.landed_line, self.gone = np.zeros(machine.cta_count, np.int32), np.zeros(machine.cta_count, bool)
        self.partial = PartialReleases(self) if self.slots or self.strong else None
        ranks = np.arange(machine.cluster_size)[:, None]
        self.reader_columns = np.concatenate(
            [
                np.broadcast_to(np.arange(self.warp_columns), (machine.cluster_size, self.warp_columns)),
                self.agent + ranks * self.groups + np.arange(self.groups),
                self.bulk_agent + ranks * self.bulk + np.arange(self.bulk),
            ],
            axis=1,
        )

    # -- accesses of threads ---------------------------------------------------------------------------------------
    def _access(self, threads: np.ndarray, places: Places, line: int, **how: object) -> Access:
        cta, warp = self.M.cta[threads], self.M.warp[threads]
        column = self.own[cta, warp]
        return Access(threads, places, line, cta, warp, column, (column << 5) | (threads & 31), **how)

    def _now(self, by: Access) -> np.ndarray:
        """The clock of each warp."""
        return self.known[by.cta, by.warp, by.column]

    def _touched(self, by: Access, own: np.ndarray) -> None:
        if self.partial and not by.whole:
            self.partial.touched[by.threads] = own

    def read(self, threads, flat, nbytes, line, whole_warp=False) -> None:
        if threads.size == 0:
            return
        by = self._access(threads, Places.of(flat, nbytes, self.G), line, whole=whole_warp)
        self._order(by, "read")
        if self.atomics is not None:
            after_atomics(self, by, "read")
        if self.flags is not None:
            self.flags.read(by)
        own = self._now(by)
        if whole_warp:
            self.has_read_at(by.places, by.column, (own << 6) | TOGETHER, line)
            return
        self._touched(by, own)
        mark = (own << 6) | (threads & 31)
        reads, rows = self.reads.reshape(-1), by.places.row(by.column, self.last.size)
        before = rows.take(reads)
        self.has_read_at(by.places, by.column, mark, line)
        mixed = ((before >> 6) == own[:, None]) & (before != mark[:, None]) | (rows.take(reads) != mark[:, None])
        if mixed.any():
            reads[rows.cells[mixed]] = (np.broadcast_to((own << 6)[:, None], mixed.shape)[mixed]) | MANY

    def has_read_at(self, places: Places, readers: np.ndarray, marks: np.ndarray, line: int) -> None:
        """Note the clock and lane of a read by each access's reader."""
        places.row(readers, self.last.size).put(self.reads.reshape(-1), marks)
        self.has_read[readers] = True
        places.put(self.read_line, line)

    def write(self, threads, flat, nbytes, line, *, whole_warp=False, data=None) -> None:
        if threads.size == 0:
            return
        by = self._access(threads, Places.of(flat, nbytes, self.G), line, whole=whole_warp)
        other = self._written(by)
        if other.any() and data is not None:  # several warps that write the same are one write
            rows = other.any(axis=1)
            other[np.flatnonzero(rows)[~GlobalRaces._batch_differs(flat, data, rows)]] = False
        self._conflict(by, other)
        if self.flags is not None:
            self.flags.write(by)

    def launched(self, threads, flat, nbytes, line) -> None:
        """cp.async: a write that is in flight until its thread waits for it."""
        by = self._access(threads, Places.of(flat, nbytes, self.G), line)
        self._conflict(by, self._written(by))
        if self.flags is not None:
            self.flags.write(by)
        by.places.put(self.last, (1 << self.bits) | (32 * self.flying))

    def _written(self, by: Access) -> np.ndarray:
        """Check a write and mark its cells; those that another warp has written in the same instruction."""
        self._order(by, "write")
        self._after_reads(by)
        if self.atomics is not None:
            after_atomics(self, by, "write")
        own = self._now(by)
        self._touched(by, own)
        mark = (own << self.bits) | by.local
        by.places.put(self.last, mark)
        return (by.places.take(self.last) ^ mark[:, None]) & self.thread_mask > 31

    def _conflict(self, by: Access, other: np.ndarray) -> None:
        by.places.put(self.line, by.line)
        if other.any() and by.line not in self.strong:
            self._report(by, "race-write-after-write", other, self.line)

    def landed(self, threads, flat, nbytes, line) -> None:
        """A waited-for cp.async is a write by its thread, now."""
        by = self._access(threads, Places.of(flat, nbytes, self.G), line)
        own = self._now(by)
        self._touched(by, own)
        by.places.put(self.last, (own << self.bits) | by.local)

    def mbarrier_init(self, threads, ids, flat, line) -> None:
        """The bytes of an mbarrier are no ordinary memory until mbarrier.inval."""
        super().mbarrier_init(threads, ids, flat, line)
        Places.of(flat, 8, self.G).put(self.last, (1 << self.bits) | (32 * self.object))

    def mbarrier_inval(self, threads, ids, flat, line) -> None:
        """The bytes are plain memory again; whoever has waited on the barrier must be known to be through."""
        by = self._access(threads, Places.of(flat, 8, self.G), line)
        by.places.put(self.last, (self._now(by) << self.bits) | by.local)
        late = (self.waited[ids] > self.known[by.cta, by.warp][:, : self.warp_columns]).any(axis=1)
        if late.any():
            self.note("mbarrier-after-inval", line, 0, int(threads[np.argmax(late)]))

    # -- accesses of the async proxy -------------------------------------------------------------------------------
    def async_write(self, threads, flat, unit, ids, line) -> None:
        """A copy into shared memory is issued: (copies, units) of bytes that are in flight until it lands."""
        self.copy_issued(threads, ids, line)
        combines = line in self.copies.combining
        by = self._access(threads, Places.of(flat, unit, self.G), line, proxy=line in self.copies.by_proxy)
        self._order(by, "read" if combines else "write")
        self._after_reads(by)
        if not combines and overlap(flat, unit):
            self.note("race-write-after-write", line, line, int(threads[0]))
        by.places.put(self.last, (1 << self.bits) | (32 * self.flying))
        by.places.put(self.line, line)

    def async_landed(self, flat, unit, ids) -> None:
        """The bytes are there; whoever waits for the phase in progress of their mbarriers may read them."""
        phase, places = self.M.mbarriers.phase[ids] + 1, Places.of(flat, unit, self.G)
        places.put(self.last, (phase << self.bits) | (self.slot_number[ids] << 5))
        if self.M.cluster_size > 1:
            ctas = flat[:, 0] // self.M.shared_stride
            np.maximum.at(self.landed_phase, (ctas, self.slot_number[ids] - self.slot), phase)
            self.landed_line[ctas] = places.take(self.line)[:, 0]
            self._unseen(ctas[self.gone[ctas]])

    def leaves(self, ctas: np.ndarray) -> None:
        """CTAs of a cluster end: they must have waited for every copy into their shared memory, or out of it."""
        super().leaves(ctas)
        self.sending.leaves(ctas)
        self.gone[ctas] = True
        seen = self.known[ctas].max(axis=1)[:, self.slot : self.flying]
        self._unseen(ctas[(self.landed_phase[ctas] > seen).any(axis=1)])

    def _unseen(self, ctas: np.ndarray) -> None:
        for cta in ctas.tolist():
            self.note("cluster-exit", int(self.landed_line[cta]), 0, cta * 32)

    def async_read(self, threads, flat, unit, line) -> None:
        """A bulk copy reads shared memory from now until the wait for its bulk group."""
        by = self._access(threads, Places.of(flat, unit, self.G), line, proxy=True)
        self._order(by, "read")
        clock = self.M.async_copies.groups[threads] + 1
        self.has_read_at(by.places, self.warp_columns + self.groups + by.warp, (clock << 6) | MANY, line)

    def bulk_waited(self, threads: np.ndarray, left: int) -> None:
        """All but the newest ``left`` bulk groups of the threads have read their sources."""
        if not self.bulk:
            return
        cta, warp = self.M.cta[threads], self.M.warp[threads]
        column = self.bulk_agent + self.M.cta_rank[cta] * self.bulk + warp
        np.maximum.at(self.known, (cta, warp, column), self.M.async_copies.groups[threads] - left)

    def group_read(self, job: object, chunks: np.ndarray, by_warp: bool) -> None:
        """Warpgroups read 16-byte chunks (warpgroups, numbers) in a wgmma, until its group is waited for.

        ``by_warp``: each warp reads a quarter of the chunks (A); else all four read all of them.
        """
        count = self.M.cta_count
        ctas, groups, line = job.groups % count, job.groups // count, job.product.line
        four = 4 * groups[:, None] + np.arange(4)
        if by_warp:
            slots = (four * count + ctas[:, None]).reshape(-1)
            threads, clocks = slots * 32, None
            chunks = chunks.reshape(slots.shape[0], -1)
        else:
            threads = (four[:, 0] * count + ctas) * 32
            clocks = [c[ctas[:, None], four].min(axis=1) for c in (self.known, self.fenced)]
        by = self._access(threads, Places(chunks, 16 // self.G), line, whole=True, proxy=True, clocks=clocks)
        self._order(by, "read")
        repeat = threads.shape[0] // groups.shape[0]
        readers, marks = self.warp_columns + groups, ((job.number + 1) << 6) | MANY
        self.has_read_at(by.places, np.repeat(readers, repeat), np.repeat(marks, repeat), line)

    def stream_read(self, thread: np.ndarray, flat: np.ndarray, clock: int, line: int) -> None:
        """A tcgen05 instruction reads an operand, until the clock of its stream."""
        by = self._access(thread, Places.of(flat, 16, self.G), line, whole=True, proxy=True)
        self._order(by, "read")
        self.has_read_at(by.places, self.warp_columns + by.warp, np.array([(clock << 6) | MANY]), line)

    # -- comparisons -----------------------------------------------------------------------------------------------
    def _order(self, by: Access, what: str) -> None:
        """The last write of every cell must be known to the accessing warp, and to the lane within its warp."""
        last = by.places.take(self.last)
        one = last[:, :1]  # mostly it speaks for its whole access
        if (last == one).all() and not self._faults(by, one, what):
            return
        for kind, bad in self._faults(by, last, what):
            if self.flags is not None:
                bad = self.flags.excused(by, kind, bad)
            if by.line in self.copies.combining:  # among themselves they need no order
                bad = bad & ~np.isin(by.places.take(self.line), list(self.copies.combining))
            nobody = kind in ("uninitialised-shared", "mbarrier-plain-access")
            self._report(by, kind, bad, None if nobody else self.line)

    def _faults(self, by: Access, last: np.ndarray, what: str) -> list[tuple[str, np.ndarray]]:
        """What is wrong with accesses (accesses, cells) to cells with these last writers."""
        owner = (last & self.thread_mask) >> 5
        clock = last >> self.bits
        if by.clocks is None:
            row = ((by.cta * self.W + by.warp) * self.columns).astype(np.int32)[:, None] + owner
            known, fenced = self.known.reshape(-1), self.fenced.reshape(-1)
        else:  # those of a whole warpgroup
            row = (np.arange(by.cta.size, dtype=np.int32) * self.columns)[:, None] + owner
            known, fenced = (c.reshape(-1) for c in by.clocks)
        unordered = clock > known.take(row)
        if what == "write":
            unordered &= owner != self.never  # a first write is no conflict
        faults = self._unordered(owner, unordered, what) if unordered.any() else []
        if int(owner.min()) >= self.warp_columns or (what == "write" and by.whole):  # no warp wrote any of these
            return faults
        lanes = (owner == by.column[:, None]) & (clock >= self.synced[by.cta, by.warp][:, None])
        if not by.whole:
            lanes &= (last & self.thread_mask) != by.local[:, None]
            if self.met is not None:
                lanes &= clock >= self._met(by)[np.arange(by.cta.size)[:, None], last & 31]
        faults.append((f"warp-race-{what}-after-write", lanes))
        if by.proxy:
            bare = (owner < self.warp_columns) & (clock > fenced.take(row)) & ~unordered
            faults.append(("missing-proxy-fence", bare))
        return [(kind, bad) for kind, bad in faults if bad.any()]

    def _met(self, by: Access) -> np.ndarray:
        """For each access, the own clocks since which its lane has not met lanes 0 to 31, MANY, and all TOGETHER."""
        met = self.met[by.threads]
        return np.concatenate([met, np.repeat(met.max(axis=1, keepdims=True), 2, axis=1)], axis=1)

    def _unordered(self, owner, bad, what) -> list[tuple[str, np.ndarray]]:
        """Accesses that are not ordered after the last writer, by what that is."""
        flying, never, barrier = owner == self.flying, owner == self.never, owner == self.object
        # Landed data that nobody has waited for is as good as in flight.
        flying |= (owner >= self.slot) & (owner < self.flying) & (what == "read")
        kinds = (
            ("async-in-flight", bad & flying),
            ("uninitialised-shared", bad & never),
            ("mbarrier-plain-access", bad & barrier),
            (f"race-{what}-after-write", bad & ~flying & ~never & ~barrier),
        )
        return [(kind, cells) for kind, cells in kinds if cells.any()]

    def _after_reads(self, by: Access) -> None:
        """Every read of a cell by another warp, agent, or lane must be known to the writer."""
        known, places, column = self.known[by.cta, by.warp], by.places, by.column
        cluster = self.M.cluster_size > 1
        rank = self.M.cta_rank[places.index[:, 0] * places.width * self.G // self.M.shared_stride] if cluster else 0
        found: dict[str, np.ndarray] = {}
        for reader in np.flatnonzero(self.has_read).tolist():
            reads = places.take(self.reads[reader])
            own = column == reader
            mine = own.any()
            if mine:  # the writer's own warp: its other lanes
                lanes = (reads >= (self.synced[by.cta, by.warp] << 6)[:, None]) & (reads != 0) & own[:, None]
                if not by.whole:
                    lanes &= (reads & 63) != (by.threads & 31)[:, None]
                    if self.met is not None:
                        lanes &= (reads >> 6) >= self._met(by)[np.arange(by.cta.size)[:, None], reads & 63]
                if self.flags is not None:
                    lanes = self.flags.excused(by, "warp-race-write-after-read", lanes, reader)
                _gather(found, "warp-race-write-after-read", lanes)
                if own.all():
                    continue
            clock = (
                known[:, reader] if not cluster else known[np.arange(column.size), self.reader_columns[rank, reader]]
            )
            kind = "race-write-after-read" if reader < self.warp_columns else "async-read-in-flight"
            late = reads > ((clock << 6) | 63)[:, None]
            if self.flags is not None:
                late = self.flags.excused(by, kind, late, reader)
            _gather(found, kind, late & ~own[:, None] if mine else late)
        for kind, bad in found.items():
            self._report(by, kind, bad, self.read_line)

    def _report(self, by: Access, kind: str, bad: np.ndarray, other: np.ndarray | None) -> None:
        access = np.nonzero(bad)[0]
        others = np.zeros(access.shape, np.int32) if other is None else other[by.places.cells[bad]]
        for against in np.unique(others):
            mine = access[others == against]
            self.note(kind, by.line, int(against), int(by.threads[mine[0]]), np.unique(mine).shape[0])

    def reports(self, finished: bool) -> list[tuple[Fault, int]]:
        """Everything found, one report for each kind and pair of lines."""
        if finished:
            for copy in self.M.copies:
                if copy.threads.size:
                    self.note("async-not-waited", copy.line, 0, int(copy.threads[0]), copy.threads.size)
        return [
            (Fault(kind, line, _message(kind, other), _CURES[kind], thread, other), count)
            for (kind, line, other), (thread, count) in self.found.items()
        ]


def _gather(found: dict[str, np.ndarray], kind: str, bad: np.ndarray) -> None:
    """Add accesses to those of their kind."""
    if bad.any():
        found[kind] = found[kind] | bad if kind in found else bad


def _message(kind: str, other: int) -> str:
    against = f" at line {other}" if other else ""
    return {
        "race-read-after-write": f"shared read not ordered after another warp's write{against}",
        "race-write-after-write": f"shared write not ordered after another warp's write{against}",
        "race-write-after-read": f"shared write not ordered after another warp's read{against}",
        "warp-race-read-after-write": f"shared read of another lane's write{against} with no bar.warp.sync between",
        "warp-race-write-after-write": f"shared write over another lane's write{against} with no bar.warp.sync between",
        "warp-race-write-after-read": f"shared write over another lane's read{against} with no bar.warp.sync between",
        "async-in-flight": f"shared bytes of an asynchronous copy{against} that has not been waited for",
        "async-read-in-flight": f"shared write over bytes that an asynchronous operation{against} may still read",
        "uninitialised-shared": "read of shared bytes that nothing has written",
        "async-not-waited": "cp.async data still in flight at the end of the kernel",
        "missing-proxy-fence": f"the async proxy comes after generic writes{against}, with no proxy fence between",
        "cluster-exit": "a CTA may end before another CTA of its cluster, or a copy, accesses its shared memory here",
        "mbarrier-init-race": f"an mbarrier is used without an order after its init{against}",
        "mbarrier-init-unfenced": f"an mbarrier's init{against} has no fence before the cluster or copies use it",
        "mbarrier-plain-access": "an ordinary access to the bytes of an mbarrier",
        "mbarrier-after-inval": "mbarrier.inval while another warp may still wait for the barrier",
        "mbarrier-phase-lag": "an mbarrier phase completes though a waiter of the phase before may not have seen that "
        "one yet; two phases later the parity is the same again",
    }[kind]
