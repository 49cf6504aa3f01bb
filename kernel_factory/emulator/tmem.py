"""Tensor Memory of a batch (PTX ISA 9.7.16.1 to 9.7.16.2): 128 lanes by 512 columns of 32 bits in every CTA.

A TMEM address is ``lane << 16 | column``. Columns are handed out by ``tcgen05.alloc``, a power of two of at least 32
at a time, for all lanes; a request that does not fit waits until columns come back. A new allocation holds poison.
With ``cta_group::2`` both CTAs of a pair ask, and both get the same columns. Where an allocation lands is drawn from
the seed in warp-serial mode, since no kernel may rely on column 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import Fault

LANES, COLUMNS = 128, 512
POISON = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One warp that waits for columns: its first thread, where the address goes (flat), and the size."""

    threads: np.ndarray
    cta: int
    flat: int
    columns: int
    group: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Area:
    """A block of cells: from this lane and column on."""

    lane: int = 0
    lanes: int = 1
    column: int
    columns: int


class TensorMemory:
    """Contents and ownership of TMEM, indexed by CTA of the batch."""

    def __init__(self, machine: object) -> None:
        self.M = machine
        count = machine.cta_count
        self.data = np.zeros((count, LANES, COLUMNS), np.uint32)
        self.owner = np.zeros((count, COLUMNS), np.int32)  # line of the alloc, 0: free
        self.start = np.full((count, COLUMNS), -1, np.int32)  # first column of the allocation
        self.relinquished = np.zeros(count, np.int32)
        self.queue: list[list[Request]] = [[] for _ in range(count)]
        self.skew = int(machine.rng.integers(16)) if machine.late else 0

    # -- alloc, dealloc ---------------------------------------------------------------------------------------------
    def request(self, asked: Request) -> None:
        """Queue a request; ``grant`` answers it."""
        if self.relinquished[asked.cta]:
            raise Fault(
                "tmem-alloc-after-relinquish", asked.line,
                f"tcgen05.alloc after tcgen05.relinquish_alloc_permit at line {self.relinquished[asked.cta]}",
                "allocate everything before giving up the permit", int(asked.threads[0]),
                int(self.relinquished[asked.cta]),
            )  # fmt: skip
        if asked.columns < 32 or asked.columns > COLUMNS or asked.columns & (asked.columns - 1):
            raise Fault(
                "tmem-alloc", asked.line, f"tcgen05.alloc of {asked.columns} columns",
                "ask for a power of two from 32 to 512 columns", int(asked.threads[0]),
            )  # fmt: skip
        self.queue[asked.cta].append(asked)

    def grant(self) -> bool:
        """Answer the requests that fit, first come first served in every CTA; True if any was answered."""
        any_answered = False
        progress = True
        while progress:
            progress = False
            for cta, queue in enumerate(self.queue):
                if queue and self._answer(cta, queue[0]):
                    progress = any_answered = True
        return any_answered

    def _answer(self, cta: int, asked: Request) -> bool:
        pair = [asked]
        if asked.group == 2:
            other = self.queue[self.peer(cta)]
            if not other or other[0].group != 2:
                return False
            pair.append(other[0])
            if other[0].columns != asked.columns:
                raise Fault(
                    "tmem-alloc", asked.line,
                    f"the CTAs of a pair ask for {asked.columns} and {other[0].columns} columns",
                    "let both CTAs of the pair allocate the same size", int(asked.threads[0]), other[0].line,
                )  # fmt: skip
        column = self._free(asked.columns, [p.cta for p in pair])
        if column is None:
            return False
        for each in pair:
            self.queue[each.cta].pop(0)
            self._give(each, column)
        if len(pair) == 2 and self.M.tensor.races:
            self.M.tensor.races.meet([int(p.threads[0]) for p in pair])
        return True

    def _free(self, columns: int, ctas: list[int]) -> int | None:
        """First column of a free aligned range in all of the CTAs."""
        busy = (self.owner[ctas] != 0).any(axis=0).reshape(-1, columns).any(axis=1)
        free = np.flatnonzero(~busy)
        return int(free[self.skew % free.size]) * columns if free.size else None

    def _give(self, asked: Request, column: int) -> None:
        from .machine import RUN

        M, where = self.M, slice(column, column + asked.columns)
        self.owner[asked.cta, where], self.start[asked.cta, where] = asked.line, column
        self.data[asked.cta, :, where] = POISON
        if M.race:
            M.race.write(asked.threads[:1], np.array([asked.flat]), 4, asked.line)
            M.race.warp_barrier(asked.threads)  # .sync: the lanes have met
        M.shared_views[4][asked.flat >> 2] = column
        if M.tensor.races:
            M.tensor.races.allocated(asked.cta, where)
        M.state[asked.threads] = RUN
        M.wake(asked.threads)
        M.changed()

    def release(self, cta: int, address: int, columns: int, thread: int, line: int) -> None:
        """tcgen05.dealloc: exactly one allocation, once."""
        column = address & 0xFFFF
        inside = column < COLUMNS and self.owner[cta, column] != 0
        held = int((self.start[cta] == column).sum()) if inside else 0
        if address >> 16 or not inside or self.start[cta, column] != column or held != columns:
            what = "holds no allocation" if not inside else f"holds an allocation of {held} columns"
            raise Fault(
                "tmem-dealloc", line, f"tcgen05.dealloc of {columns} columns at {address:#x}, which {what}",
                "free each allocation once, with the address and the size that alloc gave", thread,
            )  # fmt: skip
        where = slice(column, column + columns)
        self.M.tensor.check_idle(cta, where, thread, line)
        if self.M.tensor.races:
            self.M.tensor.races.freed(cta, where, thread, line)
        self.owner[cta, where], self.start[cta, where] = 0, -1
        self.grant()

    def peer(self, cta: int) -> int:
        """The other CTA of the pair (ranks 2i and 2i+1 of a cluster)."""
        M = self.M
        rank = int(M.cta_rank[cta]) ^ 1
        if rank >= M.cluster_size:
            raise Fault(
                "tcgen05-no-pair", 0, "a cta_group::2 instruction in a cluster with no second CTA",
                "launch with a cluster whose size is even", int(np.flatnonzero(M.cta == cta)[0]),
            )  # fmt: skip
        return int(M.cluster_start[cta]) + rank

    # -- access -----------------------------------------------------------------------------------------------------
    def check(self, ctas: np.ndarray, area: Area, line: int, thread: int) -> None:
        """Fault unless the cells exist and are allocated in each of the CTAs."""
        lane, column, last = area.lane, area.column, area.column + area.columns
        if lane + area.lanes > LANES or last > COLUMNS:
            raise Fault(
                "tmem-out-of-bounds", line,
                f"TMEM lanes {lane} to {lane + area.lanes - 1}, columns {column} to {last - 1}; "
                f"there are {LANES} lanes and {COLUMNS} columns",
                "correct the TMEM address or the shape of the access", thread,
            )  # fmt: skip
        owned = self.owner[ctas, column:last] != 0
        if not owned.all():
            first = column + int(np.flatnonzero(~owned.reshape(-1, area.columns).all(axis=0))[0])
            raise Fault(
                "tmem-unallocated", line, f"access to TMEM column {first}, which is not allocated",
                "allocate enough columns, use the address that alloc wrote, and free them last", thread,
            )  # fmt: skip

    def leaks(self) -> list[tuple[int, int, int]]:
        """(CTA, line of the alloc, columns) of everything that is still allocated."""
        out = []
        for cta, column in zip(*np.nonzero(self.start == np.arange(COLUMNS)), strict=True):
            held = int((self.start[cta] == column).sum())
            out.append((int(cta), int(self.owner[cta, column]), held))
        return out


def park(M: object, group: object, sel: object, block: object) -> None:
    """Threads of an alloc wait; they go on behind it."""
    from .machine import ALLOC

    M._dissolve(group)
    lanes = group.span if sel is None else sel
    M.state[lanes], M.pc[lanes] = ALLOC, block.number + 1
