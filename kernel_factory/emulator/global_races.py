"""Conflicts between the CTAs of one launch in global memory, and reads of registers that nothing has written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np

from .blocks import definitions_and_uses, tile_registers
from .copy_lines import CopyLines
from .emitter import NUMPY, size_of
from .errors import Fault
from .flags import Strong, strong_lines
from .global_proxies import GlobalProxies
from .global_reductions import Reductions, float_atomics
from .lanes import spread
from .memory import Elements

_CURES = {
    "global-write-conflict": "let one CTA own each output byte",
    "global-read-write-race": "split the launch: CTAs of one launch have no order",
    "missing-proxy-fence": "put fence.proxy.async behind the generic writes, before what orders the copy after them",
    "uninitialised-register": "write the register on every path before reading it",
}


_SHARED = {"shared", "shared::cta", "shared::cluster"}


def _message(kind: str, other: int) -> str:
    against = f" at line {other}" if other else ""
    return {
        "global-write-conflict": f"two CTAs write different data to the same bytes{against}",
        "missing-proxy-fence": f"a copy reads what generic writes{against} left, with no proxy fence between",
        "global-read-write-race": f"one CTA reads bytes that another CTA of the launch writes{against}",
    }[kind]


class GlobalRaces:
    """Conflicts between the CTAs of one launch, over all of its batches.

    CTAs that synchronise through global memory (atomics, strong loads and stores, fences) or a cluster's barrier are
    ordered by Lamport clocks: a CTA stamps its accesses, a release leaves the next stamp at its location, an acquire
    raises what the CTA knows to it, and an access is ordered after another CTA's when that stamp is below what its CTA
    knows. A relaxed store leaves the stamp of the CTA's last fence, and what a relaxed load sees is known after the
    next. That never contradicts the happens-before order, so that a right kernel is never reported; it can call
    accesses ordered that are not.
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
        self.strong = strong_lines([i for i in instructions if not _SHARED & set(i.modifiers)])
        clusters = any(i.opcode == "barrier" and "cluster" in i.modifiers for i in instructions)
        self.ordered = clusters or bool(self.strong)
        # One a CTA: what it knows, its stamp, what its last fence released, what it has seen, what its cluster left.
        self.known = self.stamp = self.released = self.observed = self.gathered = np.zeros(0, np.int32)
        self.reductions: Reductions | None = None
        copies = CopyLines.of(program.kernel)
        self.proxies = GlobalProxies(self, copies) if copies.from_global else None
        self.sums = float_atomics(i for i in instructions if not _SHARED & set(i.modifiers))
        self.moments: dict[str, np.ndarray] = {}  # stamps of the last write, of the last read, and of releases

    def _moment(self, buffer: object) -> np.ndarray:
        self._start()
        if buffer.name not in self.moments:
            self.moments[buffer.name] = np.zeros((3, buffer.size // self.G + 1), np.int32)
        return self.moments[buffer.name]

    def _start(self) -> None:
        if self.known.size == 0:
            clocks = np.zeros((5, self.machine.config.ctas + 1), np.int32)
            self.known, self.stamp, self.released, self.observed, self.gathered = clocks

    def _wide(self, scope: str) -> bool:
        """Does a scope take in other CTAs?"""
        return scope not in (("cta", "cluster") if self.machine.cluster_size == 1 else ("cta",))

    def _flag(self, line: int) -> Strong | None:
        """The strong access of a line, if its scope takes in other CTAs."""
        strong = self.strong.get(line)
        return strong if strong is not None and self._wide(strong.scope) else None

    def atomic(self, threads: np.ndarray, elements: Elements, line: int) -> None:
        """An atomic on global memory."""
        if line in self.sums:
            self.reduce(threads, elements, line)
        strong = self._flag(line)
        if strong is not None and elements.buffer.name != "host":
            self._acquire(threads, elements, strong)
            self._release(threads, elements, strong)

    def reduce(self, threads: np.ndarray, elements: Elements, line: int) -> None:
        """A bulk or tensor reduction, or an atomic on floats, by one thread for each element."""
        if elements.buffer.name == "host":
            return
        if self.reductions is None:
            self.reductions = Reductions(self)
        self.reductions.add(threads, elements, line)

    def _release(self, threads: np.ndarray, elements: Elements, strong: Strong) -> None:
        moment, left = self._moment(elements.buffer), self._left(self._ctas(threads), not strong.release)
        np.maximum.at(moment[2], self._cells(threads, elements)[:, 0], left)

    def _left(self, cta: np.ndarray, relaxed: bool) -> np.ndarray:
        """What a release by these CTAs leaves; what they do later is stamped higher."""
        if not relaxed:
            left = self.stamp[cta] + 1
            self.stamp[cta] = left
            return left
        return self.released[cta]

    def _acquire(self, threads: np.ndarray, elements: Elements, strong: Strong) -> None:
        cta, seen = self._ctas(threads), self._moment(elements.buffer)[2][self._cells(threads, elements)[:, 0]]
        np.maximum.at(self.known if strong.acquire else self.observed, cta, seen)
        self.stamp[cta] = np.maximum(self.stamp[cta], self.known[cta])

    def fence(self, threads: np.ndarray, scope: str, acquires: bool, releases: bool) -> None:
        """A fence by some threads stands for their CTAs."""
        if not self.ordered or not self._wide(scope):
            return
        self._start()
        ctas = np.unique(self.machine.ctas[self.machine.cta[threads]]) + 1
        if acquires:
            self._learn(ctas, self.observed[ctas])
        if releases:
            self.released[ctas] = self._left(ctas, False)

    def _learn(self, ctas: np.ndarray, clocks: np.ndarray) -> None:
        np.maximum.at(self.known, ctas, clocks)
        self.stamp[ctas] = np.maximum(self.stamp[ctas], self.known[ctas])

    def mbarrier_arrive(self, threads: np.ndarray, relaxed: bool) -> np.ndarray:
        """What arrivals leave on an mbarrier of the cluster."""
        self._start()
        return self._left(self._ctas(threads), relaxed)

    def mbarrier_wait(self, threads: np.ndarray, left: np.ndarray) -> None:
        """The waiters' CTAs know what was left there."""
        self._start()
        self._learn(self._ctas(threads), left)

    def cluster_arrive(self, threads: np.ndarray, relaxed: bool) -> None:
        """barrier.cluster.arrive, by the number of the cluster's first CTA."""
        if self.ordered:
            self._start()
            inside = np.unique(self.machine.cta[threads])
            left = self._left(self.machine.ctas[inside] + 1, relaxed)
            np.maximum.at(self.gathered, self.machine.ctas[self.machine.cluster_start[inside]] + 1, left)

    def cluster_complete(self, clusters: np.ndarray) -> None:
        """All CTAs of these clusters know what each of them had released."""
        if self.ordered:
            size = self.machine.cluster_size
            members = self.machine.ctas.reshape(-1, size)[clusters] + 1
            self._learn(members.reshape(-1), np.repeat(self.gathered[members[:, 0]], size))

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

    def knowledge(self, threads: np.ndarray) -> np.ndarray | None:
        """What the threads' CTAs know now, for a copy that reads later; None where nothing orders CTAs."""
        if not self.ordered:
            return None
        self._start()
        return self.known[self._ctas(threads)]

    @contextmanager
    def as_of(self, threads: np.ndarray, knew: np.ndarray | None) -> Iterator[None]:
        """The threads' CTAs know what they knew earlier, when they issued a copy."""
        if knew is None:
            yield
            return
        ctas = self._ctas(threads)
        now = self.known[ctas]
        self.known[ctas] = knew
        yield
        self.known[ctas] = now

    def read(self, threads: np.ndarray, elements: Elements, line: int) -> None:
        """A load, by one thread for each element."""
        buffer = elements.buffer
        if not buffer.writable or buffer.name == "host":
            return
        strong = self._flag(line)
        if strong is not None:
            self._acquire(threads, elements, strong)
            return
        cta = self._ctas(threads)
        writer, reader, lines = self._shadow(buffer)
        cells = self._cells(threads, elements)
        bad = (writer[cells] != 0) & (writer[cells] != cta[:, None])
        if self.ordered:
            moment = self._moment(buffer)
            bad &= moment[0][cells] >= self.known[cta][:, None]
            moment[1][cells] = np.maximum(moment[1][cells], self.stamp[cta][:, None])
        self._report("global-read-write-race", threads, cells, bad, line, lines)
        if self.reductions is not None:
            self.reductions.check("global-read-write-race", threads, elements, line)
        if self.proxies is not None and line in self.proxies.lines.by_proxy:
            bare = self.proxies.bare(buffer.name, cells, cta, writer[cells]) & ~bad
            self._report("missing-proxy-fence", threads, cells, bare, line, lines)
        seen = reader[cells]
        reader[cells] = np.where((seen == 0) | (seen == cta[:, None]), cta[:, None], -1)

    def write(self, threads: np.ndarray, elements: Elements, line: int, data: np.ndarray) -> None:
        """A store of ``data``, by one thread for each element."""
        buffer, at, nbytes = elements.buffer, elements.at, elements.nbytes
        if buffer.name == "host":
            return
        strong = self._flag(line)
        if strong is not None:
            self._release(threads, elements, strong)
            return
        if self.reductions is not None:
            self.reductions.check("global-write-conflict", threads, elements, line)
        cta = self._ctas(threads)
        writer, reader, lines = self._shadow(buffer)
        cells = self._cells(threads, elements)
        foreign = (writer[cells] != 0) & (writer[cells] != cta[:, None])
        if self.ordered:
            moment = self._moment(buffer)
            known, now = self.known[cta][:, None], self.stamp[cta][:, None]
            foreign &= moment[0][cells] >= known
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
            read &= np.where(seen < 0, moment[1][cells] > now, moment[1][cells] >= known)
            moment[0][cells] = now
        self._report("global-read-write-race", threads, cells, read, line, lines)
        writer[cells] = cta[:, None]
        lines[cells] = line
        if self.proxies is not None:
            self.proxies.write(buffer.name, cells, line, writer.size)
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
