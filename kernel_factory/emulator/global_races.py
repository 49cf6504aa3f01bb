"""Conflicts between the CTAs of one launch in global memory, and reads of registers that nothing has written."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from .blocks import definitions_and_uses, tile_registers
from .emitter import NUMPY, size_of
from .errors import Fault
from .lanes import spread
from .memory import Elements

_CURES = {
    "global-write-conflict": "let one CTA own each output byte",
    "global-read-write-race": "split the launch: CTAs of one launch have no order",
    "uninitialised-register": "write the register on every path before reading it",
}


def _message(kind: str, other: int) -> str:
    against = f" at line {other}" if other else ""
    return {
        "global-write-conflict": f"two CTAs write different data to the same bytes{against}",
        "global-read-write-race": f"one CTA reads bytes that another CTA of the launch writes{against}",
    }[kind]


_SYNCHRONISING = {"acquire", "release", "relaxed", "volatile", "acq_rel", "mmio"}


class GlobalRaces:
    """Conflicts between the CTAs of one launch, over all of its batches.

    CTAs that synchronise through global memory (atomics, strong loads and stores) are ordered by a Lamport clock a
    CTA: a release raises the clock of its location, an acquire takes it over, and an access is ordered after another
    CTA's when its clock is higher. That never contradicts the happens-before order, so that a right kernel is never
    reported; it can call accesses ordered that are not.
    """

    def __init__(self, program: object) -> None:
        sizes = [16]
        for ins in program.kernel.instructions:
            if ins.opcode in ("ld", "st") and not {"shared", "shared::cta", "param", "local"} & set(ins.modifiers):
                count = next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
                sizes.append(count * size_of(NUMPY[ins.modifiers[-1]]))
            elif ins.opcode == "cp" and ins.modifiers[:2] in (("async", "ca"), ("async", "cg")):
                sizes.append(ins.operands[2].value)
            elif ins.opcode == "wmma":
                sizes.append(1)
        self.G = min(sizes)
        self.machine = None
        self.shadows: dict[str, tuple] = {}
        self.found: dict[tuple, list] = {}
        instructions = program.kernel.instructions
        self.strong = {i.line for i in instructions if i.opcode in ("ld", "st") and _SYNCHRONISING & set(i.modifiers)}
        self.ordered = bool(self.strong) or any(i.opcode in ("atom", "red") for i in instructions)
        self.clock = np.zeros(0, np.int32)
        self.moments: dict[str, np.ndarray] = {}  # clock of the last write, of the last read, and of releases

    def _moment(self, buffer: object) -> np.ndarray:
        if self.clock.size == 0:
            self.clock = np.zeros(self.machine.config.ctas + 1, np.int32)
        if buffer.name not in self.moments:
            self.moments[buffer.name] = np.zeros((3, buffer.size // self.G + 1), np.int32)
        return self.moments[buffer.name]

    def atomic(self, threads: np.ndarray, elements: Elements) -> None:
        """An atomic on global memory releases and acquires."""
        if elements.buffer.name != "host":
            self._release(threads, elements)
            self._acquire(threads, elements)

    def _release(self, threads: np.ndarray, elements: Elements) -> None:
        cta, moment = self._ctas(threads), self._moment(elements.buffer)
        np.maximum.at(moment[2], self._cells(threads, elements)[:, 0], self.clock[cta] + 1)
        self.clock[np.unique(cta)] += 1

    def _acquire(self, threads: np.ndarray, elements: Elements) -> None:
        released = self._moment(elements.buffer)[2][self._cells(threads, elements)[:, 0]]
        np.maximum.at(self.clock, self._ctas(threads), released)

    def _shadow(self, buffer: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if buffer.name not in self.shadows:
            n = buffer.size // self.G + 1
            self.shadows[buffer.name] = (np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.int32))
        return self.shadows[buffer.name]

    def _cells(self, threads: np.ndarray, elements: Elements) -> np.ndarray:
        """(threads, cells) of each thread's element, or of the one that all of them access."""
        at, nbytes = spread(elements.at, threads.shape[0]), elements.nbytes
        if nbytes < self.G:
            return (at * nbytes // self.G)[:, None]
        count = nbytes // self.G
        return at[:, None] * count + np.arange(count)

    def _ctas(self, threads: np.ndarray) -> np.ndarray:
        return self.machine.ctas[self.machine.cta[threads]] + 1

    def read(self, threads: np.ndarray, elements: Elements, line: int) -> None:
        """A load, by one thread for each element."""
        buffer = elements.buffer
        if not buffer.writable or buffer.name == "host":
            return
        if line in self.strong:
            self._acquire(threads, elements)
            return
        cta = self._ctas(threads)
        writer, reader, lines = self._shadow(buffer)
        cells = self._cells(threads, elements)
        bad = (writer[cells] != 0) & (writer[cells] != cta[:, None])
        if self.ordered:
            moment = self._moment(buffer)
            bad &= moment[0][cells] >= self.clock[cta][:, None]
            moment[1][cells] = np.maximum(moment[1][cells], self.clock[cta][:, None])
        self._report("global-read-write-race", threads, cells, bad, line, lines)
        seen = reader[cells]
        reader[cells] = np.where((seen == 0) | (seen == cta[:, None]), cta[:, None], -1)

    def write(self, threads: np.ndarray, elements: Elements, line: int, data: np.ndarray) -> None:
        """A store of ``data``, by one thread for each element."""
        buffer, at, nbytes = elements.buffer, elements.at, elements.nbytes
        if buffer.name == "host":
            return
        if line in self.strong:
            self._release(threads, elements)
            return
        cta = self._ctas(threads)
        writer, reader, lines = self._shadow(buffer)
        cells = self._cells(threads, elements)
        foreign = (writer[cells] != 0) & (writer[cells] != cta[:, None])
        if self.ordered:
            moment = self._moment(buffer)
            now = self.clock[cta][:, None]
            foreign &= moment[0][cells] >= now
        other = foreign.any(axis=1)
        if other.any():
            old = buffer.view(nbytes)[at[other]].view(np.uint8).reshape(-1, nbytes)
            differs = (old != data[other].view(np.uint8).reshape(-1, nbytes)).any(axis=1)
            bad = np.zeros(cells.shape, bool)
            bad[np.flatnonzero(other)[differs]] = True
            self._report("global-write-conflict", threads, cells, bad, line, lines)
        seen = reader[cells]
        read = (seen != 0) & (seen != cta[:, None])
        if self.ordered:  # where several CTAs have read, the latest may be this one
            read &= np.where(seen < 0, moment[1][cells] > now, moment[1][cells] >= now)
            moment[0][cells] = now
        self._report("global-read-write-race", threads, cells, read, line, lines)
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


#: What UnsetRegisters looks for in each block of a program; a kernel runs many times.
_READS: WeakKeyDictionary[object, dict[int, dict[int, int]]] = WeakKeyDictionary()


class UnsetRegisters:
    """Registers read before any write, for the few that liveness cannot rule out.

    Guarded instructions count neither as reads nor as incomplete writes: what they touch depends on the guard.
    Copies are no reads: NVVM packs undefined registers into wider ones as padding.
    """

    def __init__(self, machine: object) -> None:
        program = machine.program
        self.M = machine
        self.unset = {n: np.ones(machine.T, bool) for n in program.maybe_unset}
        if program not in _READS:
            _READS[program] = {b.number: self._reads(b, program.maybe_unset) for b in program.blocks}
        self.reads = _READS[program]
        self.found: dict[int, tuple[int, str, int]] = {}
        self.tiles_known: dict[tuple, np.ndarray] = {}

    @staticmethod
    def _reads(block: object, candidates: set[int]) -> dict[int, int]:
        """Candidate registers that unguarded instructions read before the block writes them, with the line."""
        written, out = set(), {}
        for ins in block.lines:
            defined, used = definitions_and_uses(ins)
            own = tile_registers(ins)
            if not ins.guard and ins.opcode != "mov":  # a copy of an undefined value is no use of it
                for n in used:
                    if n in own:
                        continue
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

    def tiles(self, product: object, threads: np.ndarray, scale_d: np.ndarray, line: int) -> None:
        """A wgmma writes its accumulator; it reads A, and the accumulator where scale-d is true."""
        known = self.tiles_known.setdefault((product.d, product.a), np.zeros(self.M.T, bool))
        fresh = ~known[threads[:, 0]]
        if not fresh.any():
            return
        known[threads[:, 0]] = True
        read = threads[fresh & scale_d].reshape(-1)
        for n in (*(product.a or ()), *product.d):
            at = threads[fresh].reshape(-1) if n in (product.a or ()) else read
            if n in self.unset and at.size and self.unset[n][at].any() and n not in self.found:
                self.found[n] = (line, self.M.program.kernel.registers[n].name, int(at[np.argmax(self.unset[n][at])]))
        for n in product.d:
            if n in self.unset:
                self.unset[n][threads.reshape(-1)] = False

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
