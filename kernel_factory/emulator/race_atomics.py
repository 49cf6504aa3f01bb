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
    who = race._who(threads)
    places = Places.of(flat, nbytes, race.G)
    race._order(threads, who, places, line, "read", False)
    race._after_reads(threads, who, places, line, False)
    if race.atomics is None:
        race.atomics, race.atomic_line = np.zeros_like(race.reads), np.zeros_like(race.read_line)
        race.has_atomics = np.zeros_like(race.has_read)
    cta, warp, column, _ = who
    places.row(column, race.last.size).put(race.atomics.reshape(-1), race.known[cta, warp, column])
    race.has_atomics[column] = True
    places.put(race.atomic_line, line)


def after_atomics(race: object, threads: np.ndarray, who: tuple, places: Places, line: int, what: str) -> None:
    """A plain access: atomics of other warps on its cells must be known to its threads."""
    cta, warp, column, _ = who
    late = np.zeros(places.cells.shape, bool)
    for other in np.flatnonzero(race.has_atomics).tolist():
        clocks = places.take(race.atomics[other])
        late |= (clocks > race.known[cta, warp, other][:, None]) & (column != other)[:, None]
    if late.any():
        kind = "race-read-after-write" if what == "read" else "race-write-after-write"
        race._report(kind, threads, places, late, line, race.atomic_line)
