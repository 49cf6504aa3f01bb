"""Bulk copies from shared memory to a neighbour's: their sources are read until the neighbour's mbarrier says so."""

from __future__ import annotations

import numpy as np

from .partial_releases import MANY
from .shadow import Places


class Sends:
    """The sends of each warp are numbered; who knows the number of one knows that its source has been read."""

    def __init__(self, race: object) -> None:
        self.race = race
        self.sent = np.zeros((race.M.cta_count, race.W), np.int32)
        self.lines = np.zeros(race.M.cta_count, np.int32)

    def start(self, thread: np.ndarray, flat: np.ndarray, unit: int, line: int) -> int:
        """One copy by one thread begins to read (1, units) of bytes; its number."""
        race = self.race
        by = race._access(thread, Places.of(flat, unit, race.G), line, proxy=True)
        race._order(by, "read")
        self.sent[by.cta, by.warp] += 1
        self.lines[by.cta] = line
        number = self.sent[by.cta, by.warp]
        race.has_read_at(by.places, race.warp_columns + race.groups + race.sends + by.warp, (number << 6) | MANY, line)
        return int(number[0])

    def landed(self, thread: int, barrier: int, number: int) -> None:
        """It has landed: whoever waits for the phase in progress knows."""
        race, M = self.race, self.race.M
        column = self._columns(M.cta[thread]) + M.warp[thread]
        race.acc[0][barrier, column] = max(race.acc[0][barrier, column], number)

    def leaves(self, ctas: np.ndarray) -> None:
        """CTAs that end must know of the end of all that they have sent."""
        for cta in ctas[self.sent[ctas].any(axis=1)].tolist():
            first = self._columns(cta)
            known = self.race.known[cta].max(axis=0)[first : first + self.race.W]
            if (self.sent[cta] > known).any():
                self.race.note("cluster-exit", int(self.lines[cta]), 0, cta * 32)

    def _columns(self, cta: int) -> int:
        """The first agent column of a CTA's sends."""
        race = self.race
        return int(race.bulk_agent + race.M.cta_rank[cta] * race.bulk + race.sends)
