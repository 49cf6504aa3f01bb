"""Atomics in the race check of shared memory: ordered among themselves, not against plain accesses.

PTX ISA 8.10: atomic operations of one location do not race with each other; with a plain read or write of it they do,
unless a barrier orders the two.
"""

from __future__ import annotations

import numpy as np

from .shadow import Places


def shared_atomic(race: object, threads: np.ndarray, flat: np.ndarray, nbytes: int, line: int) -> None:
    """One atomic instruction: earlier plain accesses of other warps must be known to its threads."""
    if threads.size == 0:
        return
    by = race._access(threads, Places.of(flat, nbytes, race.G), line)
    race._order(by, "read")
    race._after_reads(by)
    if race.atomics is None:
        race.atomics, race.atomic_line = np.zeros_like(race.reads), np.zeros_like(race.read_line)
        race.has_atomics = np.zeros_like(race.has_read)
    by.places.row(by.column, race.last.size).put(race.atomics.reshape(-1), race._now(by))
    race.has_atomics[by.column] = True
    by.places.put(race.atomic_line, line)


def after_atomics(race: object, by: object, what: str) -> None:
    """A plain access: atomics of other warps on its cells must be known to its threads."""
    late = np.zeros(by.places.cells.shape, bool)
    for other in np.flatnonzero(race.has_atomics).tolist():
        clocks = by.places.take(race.atomics[other])
        late |= (clocks > race.known[by.cta, by.warp, other][:, None]) & (by.column != other)[:, None]
    if late.any():
        race._report(by, f"race-{what}-after-write", late, race.atomic_line)
