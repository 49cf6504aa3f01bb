"""Conflicts between the CTAs of one launch in global memory, and reads of registers that nothing has written."""

from __future__ import annotations

import numpy as np

from .blocks import definitions_and_uses, tile_registers
from .emitter import NUMPY, size_of
from .errors import Fault

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
            elif ins.opcode == "wmma":
                sizes.append(1)
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
    Copies are no reads: NVVM packs undefined registers into wider ones as padding.
    """

    def __init__(self, machine: object) -> None:
        program = machine.program
        self.M = machine
        self.unset = {n: np.ones(machine.T, bool) for n in program.maybe_unset}
        self.reads = {b.number: self._reads(b, program.maybe_unset) for b in program.blocks}
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
