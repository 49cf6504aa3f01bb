"""Race checks: happens-before in shared memory with warp clocks, and conflicts between CTAs in global memory.

Shared memory. A shadow cell covers the smallest access of the kernel (2 bytes or more, exact since accesses are
aligned), and holds its last writer (thread in the CTA) with that warp's clock, and for each warp the clock and lane
of its last read. A warp's clock advances at bar.warp.sync and at barriers; barriers join clocks. Two pseudo-warps
whose clock nobody ever sees stand for "cp.async in flight" and "never written", so one comparison finds a missing
barrier, a missing wait and a read of uninitialised memory.
"""

from __future__ import annotations

import numpy as np

from .blocks import definitions_and_uses
from .emitter import NUMPY, size_of
from .errors import Fault

_CURES = {
    "race-read-after-write": "put bar.sync between the write and the read",
    "race-write-after-write": "put bar.sync between the two writes",
    "race-write-after-read": "put bar.sync between the read and the write",
    "warp-race-read-after-write": "put bar.warp.sync between the write and the other lane's read",
    "warp-race-write-after-read": "put bar.warp.sync between the read and the other lane's write",
    "async-in-flight": "wait for the copy's group (cp.async.wait_group), then bar.sync, before touching its bytes",
    "uninitialised-shared": "write the bytes before reading them",
    "async-not-waited": "wait for all groups before the kernel ends",
    "global-write-conflict": "let one CTA own each output byte",
    "global-read-write-race": "split the launch: CTAs of one launch have no order",
    "uninitialised-register": "write the register on every path before reading it",
}
_CLOCK = 12  # bits below the clock hold the thread
_THREAD = (1 << _CLOCK) - 1
_MANY = 32  # "lane" of a read by more than one lane


def cell_bytes(program: object) -> int:
    """Smallest shared access of a kernel, between 1 and 16 bytes."""
    smallest = 16
    for ins in program.kernel.instructions:
        if ins.opcode in ("ld", "st") and not {"global", "param", "local"} & set(ins.modifiers):
            count = next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
            smallest = min(smallest, count * size_of(NUMPY[ins.modifiers[-1]]))
        elif ins.opcode == "cp" and ins.modifiers[:2] in (("async", "ca"), ("async", "cg")):
            smallest = min(smallest, ins.operands[2].value)
    return smallest


class SharedRaces:
    """Happens-before checks of one batch's shared memory."""

    def __init__(self, machine: object) -> None:
        self.M = machine
        self.G = cell_bytes(machine.program)
        W = self.W = machine.warps
        n = machine.shared_bytes.shape[0] // self.G
        # Columns W and W+1 are the pseudo-warps (in flight, never written): clock 0 for everyone.
        self.vc = np.zeros((machine.cta_count, W, W + 2), np.int32)
        self._tick_all()
        self.last = np.full(n, (1 << _CLOCK) | (32 * (W + 1)), np.int32)
        self.line = np.zeros(n, np.int32)
        self.reads = np.zeros((n, W), np.int32)  # clock << 6 | lane
        self.read_line = np.zeros(n, np.int32)
        self.found: dict[tuple, list] = {}

    def _tick_all(self) -> None:
        own = np.arange(self.W)
        self.vc[:, own, own] += 1

    # -- accesses -------------------------------------------------------------------------------------------------
    def _cells(self, flat: np.ndarray, nbytes: int) -> np.ndarray:
        """(accesses, cells of one access)."""
        count = max(1, nbytes // self.G)
        first = flat // self.G
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def _who(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        cta, warp = self.M.cta[threads], self.M.warp[threads]
        return cta, warp, (warp << 5) | (threads & 31)

    def read(self, threads, flat, nbytes, line, whole_warp=False) -> None:
        if threads.size == 0:
            return
        cta, warp, local = self._who(threads)
        cells = self._cells(flat, nbytes)
        self._order(threads, cta, warp, local, cells, line, "read", whole_warp)
        own = self.vc[cta, warp, warp]
        at = cells * self.W + warp[:, None]
        flat_reads = self.reads.reshape(-1)
        lane = np.full(threads.shape, _MANY) if whole_warp else threads & 31
        mark = ((own << 6) | lane)[:, None]
        if whole_warp:
            flat_reads[at] = mark
        else:
            before = flat_reads[at]
            flat_reads[at] = mark
            mixed = ((before >> 6) == own[:, None]) & (before != mark) | (flat_reads[at] != mark)
            if mixed.any():
                flat_reads[at[mixed]] = (np.broadcast_to((own << 6)[:, None], at.shape)[mixed]) | _MANY
        self.read_line[cells] = line

    def write(self, threads, flat, nbytes, line, in_flight=False, whole_warp=False) -> None:
        if threads.size == 0:
            return
        cta, warp, local = self._who(threads)
        cells = self._cells(flat, nbytes)
        self._order(threads, cta, warp, local, cells, line, "write", whole_warp)
        self._after_reads(threads, cta, warp, cells, line, whole_warp)
        mark = ((self.vc[cta, warp, warp] << _CLOCK) | local)[:, None]
        self.last[cells] = mark
        other = (self.last[cells] ^ mark) & _THREAD > 31  # another warp wrote here by the same instruction
        if other.any():
            self.line[cells] = line
            self._report("race-write-after-write", threads, cells, other, line, self.line)
        if in_flight:
            self.last[cells] = (1 << _CLOCK) | (32 * self.W)
        self.line[cells] = line

    def landed(self, threads, flat, nbytes, line) -> None:
        """A waited-for copy is a write by its thread, now."""
        cta, warp, local = self._who(threads)
        self.last[self._cells(flat, nbytes)] = ((self.vc[cta, warp, warp] << _CLOCK) | local)[:, None]

    def _order(self, threads, cta, warp, local, cells, line, what, whole_warp):
        """The last write of every cell must be known to the accessing warp, and to the lane within its warp."""
        last = self.last[cells]
        owner = last & _THREAD
        clock = last >> _CLOCK
        row = ((cta * self.W + warp) * (self.W + 2))[:, None]
        seen = self.vc.reshape(-1)[row + (owner >> 5)]
        unordered = clock > seen
        if what == "write":
            unordered &= owner < 32 * (self.W + 1)  # a first write is no conflict
        if unordered.any():
            self._report_order(threads, cells, owner, unordered, line, what)
        if what == "read":
            lanes = (owner >> 5 == warp[:, None]) & (clock == self.vc[cta, warp, warp][:, None])
            if not whole_warp:
                lanes &= owner != local[:, None]
            if lanes.any():
                self._report("warp-race-read-after-write", threads, cells, lanes, line, self.line)

    def _report_order(self, threads, cells, owner, bad, line, what):
        flying, never = owner == 32 * self.W, owner == 32 * (self.W + 1)
        if (bad & flying).any():
            self._report("async-in-flight", threads, cells, bad & flying, line, self.line)
        if (bad & never).any():
            self._report("uninitialised-shared", threads, cells, bad & never, line, None)
        rest = bad & ~flying & ~never
        if rest.any():
            self._report(f"race-{what}-after-write", threads, cells, rest, line, self.line)

    def _after_reads(self, threads, cta, warp, cells, line, whole_warp):
        """Every read of a cell by another warp, or another lane of this one, must be known to the writer."""
        reads = self.reads[cells]  # (accesses, cells, warps)
        if not reads.any():
            return
        clocks = self.vc[cta, warp, : self.W]
        late = (reads >> 6) > clocks[:, None, :]
        own = np.arange(self.W) == warp[:, None]
        late &= ~own[:, None, :]
        bad = late.any(axis=2)
        if bad.any():
            self._report("race-write-after-read", threads, cells, bad, line, self.read_line)
        mine = np.take_along_axis(reads, warp[:, None, None], 2)[..., 0]
        lanes = (mine >> 6) == self.vc[cta, warp, warp][:, None]
        if not whole_warp:
            lanes &= (mine & 63) != (threads & 31)[:, None]
        if lanes.any():
            self._report("warp-race-write-after-read", threads, cells, lanes, line, self.read_line)

    def _report(self, kind, threads, cells, bad, line, other):
        access = np.nonzero(bad)[0]
        others = np.zeros(access.shape, np.int32) if other is None else other[cells[bad]]
        for against in np.unique(others):
            mine = access[others == against]
            entry = self.found.setdefault((kind, line, int(against)), [int(threads[mine[0]]), 0])
            entry[1] += np.unique(mine).shape[0]

    # -- order ----------------------------------------------------------------------------------------------------
    def cta_barrier(self) -> None:
        """All warps of all CTAs meet."""
        self.vc[:, :, : self.W] = self.vc[:, :, : self.W].max(axis=1, keepdims=True)
        self._tick_all()

    def barrier(self, threads: np.ndarray, keys: np.ndarray) -> None:
        """Threads released by barriers, with (CTA, barrier) keys."""
        for key in np.unique(keys):
            ids = threads[keys == key]
            cta = int(self.M.cta[ids[0]])
            warps = np.unique(self.M.warp[ids])
            self.vc[cta, warps, : self.W] = self.vc[cta, warps, : self.W].max(axis=0)
            self.vc[cta, warps, warps] += 1

    def warp_barrier(self, threads: np.ndarray) -> None:
        first = threads[::32]
        cta, warp = self.M.cta[first], self.M.warp[first]
        self.vc[cta, warp, warp] += 1

    def reports(self, finished: bool) -> list[tuple[Fault, int]]:
        """Everything found, one report for each kind and pair of lines."""
        if finished:
            for copy in self.M.copies:
                if copy.threads.size:
                    entry = self.found.setdefault(("async-not-waited", copy.line, 0), [int(copy.threads[0]), 0])
                    entry[1] += copy.threads.size
        return [
            (Fault(kind, line, _message(kind, other), _CURES[kind], thread, other), count)
            for (kind, line, other), (thread, count) in self.found.items()
        ]


def _message(kind: str, other: int) -> str:
    against = f" at line {other}" if other else ""
    return {
        "race-read-after-write": f"shared read not ordered after another warp's write{against}",
        "race-write-after-write": f"shared write not ordered after another warp's write{against}",
        "race-write-after-read": f"shared write not ordered after another warp's read{against}",
        "warp-race-read-after-write": f"shared read of another lane's write{against} with no bar.warp.sync between",
        "warp-race-write-after-read": f"shared write over another lane's read{against} with no bar.warp.sync between",
        "async-in-flight": f"shared bytes of a cp.async{against} that has not been waited for",
        "uninitialised-shared": "read of shared bytes that nothing has written",
        "async-not-waited": "cp.async data still in flight at the end of the kernel",
        "global-write-conflict": f"two CTAs write different data to the same bytes{against}",
        "global-read-write-race": f"one CTA reads bytes that another CTA of the launch writes{against}",
    }[kind]


class GlobalRaces:
    """Conflicts between the CTAs of one launch, over all of its batches."""

    def __init__(self, program: object) -> None:
        sizes = [16]
        for ins in program.kernel.instructions:
            if ins.opcode in ("ld", "st") and not {"shared", "shared::cta", "param", "local"} & set(ins.modifiers):
                count = next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
                sizes.append(count * size_of(NUMPY[ins.modifiers[-1]]))
            elif ins.opcode == "cp" and ins.modifiers[:2] in (("async", "ca"), ("async", "cg")):
                sizes.append(ins.operands[2].value)
        self.G = min(sizes)
        self.machine = None
        self.shadows: dict[str, tuple] = {}
        self.found: dict[tuple, list] = {}

    def _shadow(self, buffer: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if buffer.name not in self.shadows:
            n = buffer.size // self.G + 1
            self.shadows[buffer.name] = (np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32))
        return self.shadows[buffer.name]

    def _cells(self, at: np.ndarray, nbytes: int) -> np.ndarray:
        count = max(1, nbytes // self.G)
        return at[:, None] * count + np.arange(count)

    def _ctas(
        self, threads: np.ndarray, lanes: np.ndarray | None, at: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        threads = threads if lanes is None else threads[lanes]
        if at.shape[0] != threads.shape[0]:
            at = np.full(threads.shape[0], at[0])
        return threads, self.machine.ctas[self.machine.cta[threads]] + 1, at

    def read(self, threads, lanes, at, nbytes, buffer, line) -> None:
        if not buffer.writable or buffer.name == "host":
            return
        threads, cta, at = self._ctas(threads, lanes, at)
        writer, reader, lines = self._shadow(buffer)
        cells = self._cells(at, nbytes)
        bad = (writer[cells] != 0) & (writer[cells] != cta[:, None])
        self._report("global-read-write-race", threads, cells, bad, line, lines)
        seen = reader[cells]
        reader[cells] = np.where((seen == 0) | (seen == cta[:, None]), cta[:, None], -1)

    def write(self, threads, lanes, at, nbytes, buffer, line, data) -> None:
        if buffer.name == "host":
            return
        threads, cta, at = self._ctas(threads, lanes, at)
        writer, reader, lines = self._shadow(buffer)
        cells = self._cells(at, nbytes)
        other = ((writer[cells] != 0) & (writer[cells] != cta[:, None])).any(axis=1)
        if other.any():
            old = buffer.view(nbytes)[at[other]].view(np.uint8).reshape(-1, nbytes)
            differs = (old != data[other].view(np.uint8).reshape(-1, nbytes)).any(axis=1)
            bad = np.zeros(cells.shape, bool)
            bad[np.flatnonzero(other)[differs]] = True
            self._report("global-write-conflict", threads, cells, bad, line, lines)
        seen = reader[cells]
        self._report("global-read-write-race", threads, cells, (seen != 0) & (seen != cta[:, None]), line, lines)
        writer[cells] = cta[:, None]
        lines[cells] = line
        first = writer[cells] != cta[:, None]  # two CTAs of one batch wrote the same bytes just now
        if first.any():
            rows = first.any(axis=1)
            unlike = self._batch_differs(at, data, rows)
            if unlike.any():
                bad = np.zeros(cells.shape, bool)
                bad[np.flatnonzero(rows)[unlike]] = True
                self._report("global-write-conflict", threads, cells, bad, line, lines)

    @staticmethod
    def _batch_differs(at: np.ndarray, data: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """For each overwritten row: does the data that stays (the last write) differ from its own?"""
        order = np.argsort(at, kind="stable")
        last = order[np.searchsorted(at[order], at[rows], side="right") - 1]
        width = data.dtype.itemsize
        raw = data.view(np.uint8).reshape(-1, width)
        return (raw[last] != raw[np.flatnonzero(rows)]).any(axis=1)

    def _report(self, kind, threads, cells, bad, line, lines) -> None:
        if not bad.any():
            return
        access = np.flatnonzero(bad.any(axis=1))
        key = (kind, line, int(lines[cells[bad]][0]))
        entry = self.found.setdefault(key, [int(threads[access[0]]), 0])
        entry[1] += access.shape[0]

    def take(self) -> list[tuple[Fault, int]]:
        out = [
            (Fault(kind, line, _message(kind, other), _CURES[kind], thread, other), count)
            for (kind, line, other), (thread, count) in self.found.items()
        ]
        self.found = {}
        return out


class UnsetRegisters:
    """Registers read before any write, for the few that liveness cannot rule out.

    Guarded instructions count neither as reads nor as incomplete writes: what they touch depends on the guard.
    """

    def __init__(self, machine: object) -> None:
        program = machine.program
        self.M = machine
        self.unset = {n: np.ones(machine.T, bool) for n in program.maybe_unset}
        self.reads = {b.number: self._reads(b, program.maybe_unset) for b in program.blocks}
        self.found: dict[int, tuple[int, str, int]] = {}

    @staticmethod
    def _reads(block: object, candidates: set[int]) -> dict[int, int]:
        """Candidate registers that unguarded instructions read before the block writes them, with the line."""
        written, out = set(), {}
        for ins in block.lines:
            defined, used = definitions_and_uses(ins)
            if not ins.guard:
                for n in used:
                    if n in candidates and n not in written:
                        out.setdefault(n, ins.line)
            written.update(defined)
        return out

    def check(self, block: object, sel: object) -> None:
        lanes = slice(None) if sel is None else sel
        for n, line in self.reads[block.number].items():
            bad = self.unset[n][lanes]
            if bad.any() and n not in self.found:
                ids = self.M.threads[lanes]
                self.found[n] = (line, self.M.program.kernel.registers[n].name, int(ids[np.argmax(bad)]))
        for n in block.defined:
            if n in self.unset:
                self.unset[n][lanes] = False

    def reports(self) -> list[tuple[Fault, int]]:
        """One report for each register."""
        return [
            (
                Fault(
                    "uninitialised-register",
                    line,
                    f"register {name} is read before anything wrote it",
                    _CURES["uninitialised-register"],
                    thread,
                ),
                1,
            )
            for line, name, thread in self.found.values()
        ]
