"""Counts of what a GPU would be asked to do: exact, deterministic, the same in every mode.

Global memory: ``sectors`` are 32-byte sectors summed over warp-level instructions, ``unique`` the distinct sectors of
the launch (or of the sampled CTAs), ``bytes`` what threads asked for. Shared memory: ``wavefronts`` by the bank model
(32 banks of 4 bytes; 16-byte accesses in quarter warps, 8-byte ones in half warps; the same word is free), and the
``ideal`` of bytes/128 a warp-level instruction. Thread instructions include guarded-off ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .issue import Issue
from .memory import Buffer, Elements


@dataclass(kw_only=True)
class Counters:
    """Plain data; ``lines`` has one entry a PTX line that touches memory, keyed by line number."""

    kernel: str
    memory: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    lines: dict[int, dict[str, object]] = field(default_factory=dict)
    mma: dict[str, int] = field(default_factory=dict)
    cp_async_bytes: int = 0
    barriers: int = 0
    tmem_bytes: dict[str, int] = field(default_factory=dict)
    mbarrier_operations: int = 0
    tma: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    thread_instructions: int = 0

    @classmethod
    def empty(cls, kernel: str) -> Counters:
        return cls(kernel=kernel)

    def to_json(self) -> dict:
        """A plain dict of JSON types."""
        return {
            "kernel": self.kernel,
            "memory": self.memory,
            "shared": self.shared,
            "lines": {str(k): v for k, v in self.lines.items()},
            "mma": self.mma,
            "cp_async_bytes": self.cp_async_bytes,
            "barriers": self.barriers,
            "tmem_bytes": self.tmem_bytes,
            "mbarrier_operations": self.mbarrier_operations,
            "tma": self.tma,
            "thread_instructions": self.thread_instructions,
        }

    @classmethod
    def from_json(cls, data: dict) -> Counters:
        """The reverse of to_json."""
        return cls(**{**data, "lines": {int(k): v for k, v in data["lines"].items()}})


class Counting:
    """Collects counts during a run."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.blocks = np.zeros(len(kernel.program.blocks), np.int64)
        self.warps = np.zeros(len(kernel.program.blocks), np.int64)
        self.global_lines: dict[tuple[int, str, str], list[int]] = {}
        self.touched: dict[tuple[str, str], np.ndarray] = {}
        self.shared_lines: dict[tuple[int, str], list[int]] = {}
        self.patterns: dict[tuple, tuple[int, int]] = {}
        self.products: dict[str, int] = {}
        self.tmem_bytes: dict[str, int] = {}
        self.tma: dict[tuple[str, str], list[int]] = {}
        self.mbarrier_operations = 0

    def tensor_product(self, name: str, line: int) -> None:
        """One tcgen05.mma."""
        self.products[name] = self.products.get(name, 0) + 1

    def tensor_memory(self, kind: str, nbytes: int) -> None:
        """Bytes of tcgen05.ld, st or cp."""
        self.tmem_bytes[kind] = self.tmem_bytes.get(kind, 0) + nbytes

    # -- called by the machine --------------------------------------------------------------------------------------
    def block(self, M: object, block: object, sel: object, n: int) -> None:
        self.blocks[block.number] += n
        if isinstance(sel, np.ndarray):
            self.warps[block.number] += np.count_nonzero(np.diff(sel >> 5)) + 1
        else:
            self.warps[block.number] += n >> 5

    def memory(self, issue: Issue, lanes: np.ndarray | None, elements: Elements, direction: str) -> None:
        """One global access by these of its threads (None: all)."""
        threads = issue.count if lanes is None else lanes.shape[0]
        entry = self.global_lines.setdefault((issue.line, direction, elements.buffer.name), [0, 0, 0])
        entry[1] += threads * elements.nbytes
        sector = elements.sectors
        entry[0] += _whole(sector, threads) if issue.whole and lanes is None else _sectors(issue.some(lanes), sector)
        entry[2] += threads
        self._touch(elements.buffer, direction, sector)

    def _touch(self, buffer: Buffer, direction: str, sectors: np.ndarray) -> None:
        if buffer.name != "host":
            key = (buffer.name, direction)
            if key not in self.touched:
                self.touched[key] = np.zeros((buffer.size >> 5) + 1, bool)
            self.touched[key][sectors] = True

    def tensor(self, elements: Elements, inside: np.ndarray | None, direction: str, line: int) -> None:
        """Copies of the TMA, (copies, units), and which units are in bounds."""
        buffer, unit, sector = elements.buffer, elements.nbytes, elements.sectors
        units = sector.size if inside is None else int(np.count_nonzero(inside))
        if inside is None:
            sectors = int(np.count_nonzero(np.diff(sector, axis=1))) + sector.shape[0]
        else:
            marked = np.where(inside, sector, -1)
            sectors = int(np.count_nonzero(np.diff(marked, axis=1, prepend=-1) * inside))
            sector = sector[inside]
        entry = self.global_lines.setdefault((line, direction, buffer.name), [0, 0, 0])
        entry[0] += sectors
        entry[1] += units * unit
        total = self.tma.setdefault((buffer.name, direction), [0, 0])
        total[0] += units * unit
        total[1] += sectors
        self._touch(buffer, direction, sector)

    def shared(self, issue: Issue, flat: np.ndarray, nbytes: int, kind: str) -> None:
        """One shared access; ``flat`` are byte positions in the batch's shared memory."""
        if flat.shape[0] == 0:
            return
        entry = self.shared_lines.setdefault((issue.line, kind), [0, 0, 0])
        entry[2] += flat.shape[0] * nbytes
        if kind in ("ldmatrix", "stmatrix"):
            rows = flat.reshape(issue.n >> 5, -1)
        elif issue.whole:
            rows = flat.reshape(-1, 32)
        else:
            self._irregular(issue.threads, flat, nbytes, entry)
            return
        actual, ideal = self._pattern(rows, nbytes, None if isinstance(issue.sel, np.ndarray) else issue.M)
        entry[0] += actual
        entry[1] += ideal

    def _pattern(self, rows: np.ndarray, nbytes: int, M: object | None) -> tuple[int, int]:
        """Wavefronts and ideal of whole warps. Most often all CTAs do the same: one is counted."""
        repeat = 1
        if M is not None and M.cta_count > 1:
            stack = rows.reshape(-1, M.cta_count, rows.shape[1]) - M.cta_starts
            if (stack == stack[:, :1]).all():
                rows, repeat = stack[:, 0], M.cta_count
        key = None
        if rows.size <= 1024:
            rows = rows - int(rows.min()) // 128 * 128
            key = (nbytes, rows.shape, rows.tobytes())
        known = self.patterns.get(key)
        if known is None:
            known = (wavefronts(rows, nbytes), rows.shape[0] * -(-rows.shape[1] * nbytes // 128))
            if key is not None and len(self.patterns) < 65536:
                self.patterns[key] = known
        return known[0] * repeat, known[1] * repeat

    def _irregular(self, threads: np.ndarray, flat: np.ndarray, nbytes: int, entry: list[int]) -> None:
        """Accesses of some lanes of each warp."""
        warps = threads >> 5
        if (warps[1:] >= warps[:-1]).all():
            row = np.cumsum(np.append(False, warps[1:] != warps[:-1]))
        else:
            row = np.unique(warps, return_inverse=True)[1]
        table = np.full((int(row.max()) + 1, 32), -1, np.int64)
        table[row, threads & 31] = flat
        entry[0] += wavefronts(table, nbytes)
        entry[1] += int((-(-np.bincount(row) * nbytes // 128)).sum())

    # -- the sums ---------------------------------------------------------------------------------------------------
    def result(self) -> Counters:
        out = Counters(kernel=self.kernel.name, mma=dict(self.products), tmem_bytes=dict(self.tmem_bytes))
        executed = {}
        for block in self.kernel.program.blocks:
            for ins in block.lines:
                threads, warps = int(self.blocks[block.number]), int(self.warps[block.number])
                executed[ins.line] = executed.get(ins.line, 0) + threads
                out.thread_instructions += threads
                if ins.opcode == "mma" and warps:
                    name = f"{ins.modifiers[2]}.{ins.modifiers[-3]}"
                    out.mma[name] = out.mma.get(name, 0) + warps
                elif ins.opcode == "wgmma" and ins.modifiers[0] == "mma_async" and warps:
                    name = f"wgmma.{ins.modifiers[3]}.{ins.modifiers[-1]}"
                    out.mma[name] = out.mma.get(name, 0) + warps // 4
                elif ins.opcode in ("bar", "barrier") and "warp" not in ins.modifiers:
                    out.barriers += warps
        out.mbarrier_operations = self.mbarrier_operations
        for (name, direction), (nbytes, sectors) in sorted(self.tma.items()):
            out.tma.setdefault(name, {})[direction] = {"bytes": nbytes, "sectors": sectors}
        self._global(out, executed)
        self._shared(out, executed)
        return out

    def _global(self, out: Counters, executed: dict) -> None:
        for (line, direction, name), (sectors, nbytes, _) in sorted(self.global_lines.items()):
            entry = out.memory.setdefault(name, {}).setdefault(direction, {"sectors": 0, "unique": 0, "bytes": 0})
            entry["sectors"] += sectors
            entry["bytes"] += nbytes
            where = out.lines.setdefault(line, {"thread_instructions": executed.get(line, 0)})
            spot = where.setdefault("global", {}).setdefault(f"{name}.{direction}", {"sectors": 0, "bytes": 0})
            spot["sectors"] += sectors
            spot["bytes"] += nbytes
        for (name, direction), touched in self.touched.items():
            out.memory[name][direction]["unique"] = int(np.count_nonzero(touched))

    def _shared(self, out: Counters, executed: dict) -> None:
        out.shared = {"wavefronts": 0, "ideal": 0, "bytes": 0}
        for (line, kind), (actual, ideal, nbytes) in sorted(self.shared_lines.items()):
            where = out.lines.setdefault(line, {"thread_instructions": executed.get(line, 0)})
            where["shared"] = {"kind": kind, "wavefronts": actual, "ideal": ideal, "bytes": nbytes}
            out.shared["wavefronts"] += actual
            out.shared["ideal"] += ideal
            out.shared["bytes"] += nbytes
            if kind == "cp.async":
                out.cp_async_bytes += nbytes


def _whole(sector: np.ndarray, threads: int) -> int:
    """Distinct sectors of each warp, summed, where whole warps act."""
    if sector.shape[0] == 1:
        return threads >> 5
    rows = sector.reshape(-1, 32)
    steps = np.diff(rows, axis=1)
    if steps.min() < 0:
        steps = np.diff(np.sort(rows, axis=1), axis=1)
    return int(np.count_nonzero(steps)) + rows.shape[0]


def _sectors(threads: np.ndarray, sector: np.ndarray) -> int:
    """The same for some lanes of each warp."""
    if threads.size == 0:
        return 0
    key = ((threads >> 5) << 40) | np.broadcast_to(sector, threads.shape)
    if (np.diff(key) < 0).any():
        key = np.sort(key)
    return int(np.count_nonzero(np.diff(key))) + 1


def wavefronts(rows: np.ndarray, nbytes: int) -> int:
    """Bank-model wavefronts of (warps, lanes) byte addresses; negative addresses are lanes that stay out."""
    unit = max(nbytes, 4)
    groups = 128 // unit
    phases = -(-rows.shape[1] // min(groups, rows.shape[1])) if unit > 4 else 1
    width = rows.shape[1] // phases
    words = np.where(rows >= 0, rows // unit, -1).reshape(-1, width)
    words = np.sort(words, axis=1)
    fresh = np.ones(words.shape, bool)
    fresh[:, 1:] = words[:, 1:] != words[:, :-1]
    fresh &= words >= 0
    row = np.broadcast_to(np.arange(words.shape[0])[:, None], words.shape)[fresh]
    counts = np.bincount(row * groups + words[fresh] % groups, minlength=words.shape[0] * groups)
    return int(counts.reshape(-1, groups).max(axis=1).sum())
