"""Atomics in the race check of shared memory: ordered among themselves, not against plain accesses.

PTX ISA 8.10: atomic operations of one location do not race with each other; with a plain read or write of it they do,
unless a barrier orders the two.
"""

from __future__ import annotations

import numpy as np


def shared_atomic(race: object, threads: np.ndarray, flat: np.ndarray, nbytes: int, line: int) -> None:
    """One atomic instruction: earlier plain accesses of other warps must be known to its threads."""
    if threads.size == 0:
        return
    who = race._who(threads)
    cells = race._cells(flat, nbytes)
    race._order(threads, who, cells, line, "read", False)
    race._after_reads(threads, who, cells, line, False)
    if race.atomics is None:
        race.atomics, race.atomic_line = np.zeros_like(race.reads), np.zeros_like(race.read_line)
    cta, warp, column, _ = who
    race.atomics.reshape(-1)[cells * race.readers + column[:, None]] = race.known[cta, warp, column][:, None]
    race.atomic_line[cells] = line


def after_atomics(race: object, threads: np.ndarray, who: tuple, cells: np.ndarray, line: int, what: str) -> None:
    """A plain access: atomics of other warps on its cells must be known to its threads (not looked at in clusters)."""
    if race.M.cluster_size > 1:
        return
    clocks = race.atomics[cells]  # (accesses, cells, columns)
    if not clocks.any():
        return
    cta, warp, column, _ = who
    known = race.known[cta, warp, : clocks.shape[2]]
    late = clocks > known[:, None, :]
    late &= (np.arange(clocks.shape[2]) != column[:, None])[:, None, :]
    bad = late.any(axis=2)
    if bad.any():
        kind = "race-read-after-write" if what == "read" else "race-write-after-write"
        race._report(kind, threads, cells, bad, line, race.atomic_line)
