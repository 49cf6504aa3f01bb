"""Atomics in the race check of shared memory: ordered among themselves, not against plain accesses.

PTX ISA 8.10: atomic operations of one location do not race with each other; with a plain read or write of it they do,
unless a barrier orders the two.
"""

from __future__ import annotations

import numpy as np

from .partial_releases import MANY
from .shadow import Access, Places


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
    row, atomics = by.places.row(by.column, race.last.size), race.atomics.reshape(-1)
    mark = (race._now(by) << 6) | (threads & 31)
    before = row.take(atomics)
    row.put(atomics, mark)
    mixed = ((before ^ mark[:, None]) >> 6 == 0) & (before != mark[:, None]) | (row.take(atomics) != mark[:, None])
    atomics[row.cells[mixed]] = (np.broadcast_to((mark | 63)[:, None], mixed.shape)[mixed] ^ 63) | MANY
    race.has_atomics[by.column] = True
    by.places.put(race.atomic_line, line)
    if race.flags is not None:
        race.flags.take(by, race.strong[line])
        race.flags.leave(by, race.strong[line])


def after_atomics(race: object, by: Access, what: str) -> None:
    """A plain access: other warps' atomics on its cells must be known, and its lane have met those of its own warp."""
    if by.line in race.strong:
        return
    late, lanes = np.zeros((2, *by.places.cells.shape), bool)
    met = np.repeat(race.synced[by.cta, by.warp][:, None], MANY + 1, axis=1)
    if race.met is not None:
        met = np.maximum(met, race._met(by)[:, : MANY + 1])
    for other in np.flatnonzero(race.has_atomics).tolist():
        marks, own = by.places.take(race.atomics[other]), (by.column == other)[:, None]
        late |= (marks >> 6 > race.known[by.cta, by.warp, other][:, None]) & ~own
        lane = marks & 63
        lanes |= (marks >> 6 >= np.take_along_axis(met, lane, axis=1)) & (lane != (by.threads & 31)[:, None]) & own
    for kind, bad in (("race", late), ("warp-race", lanes)):
        race._report(by, f"{kind}-{what}-after-write", bad, race.atomic_line)
