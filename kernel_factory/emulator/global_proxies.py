"""Generic writes of global memory that bulk and tensor copies read: a proxy fence must lie between (PTX ISA 8.8.1).

Each write gets a time; a CTA's fence.proxy.async covers all writes before it. It may be the writer's or the reader's.
"""

from __future__ import annotations

import numpy as np

from .copy_lines import CopyLines


class GlobalProxies:
    """For each cell the time of its last generic write, and for each CTA that of its last proxy fence."""

    def __init__(self, races: object, lines: CopyLines) -> None:
        self.races, self.lines = races, lines
        self.now = 1
        self.fenced = np.zeros(0, np.int32)
        self.times: dict[str, np.ndarray] = {}

    def fence(self, threads: np.ndarray) -> None:
        """fence.proxy.async that takes in global memory."""
        self._start()
        self.now += 1
        self.fenced[self.races._ctas(threads)] = self.now

    def write(self, name: str, cells: np.ndarray, line: int, size: int) -> None:
        """A write, generic or of the async proxy."""
        if name not in self.times:
            self.times[name] = np.zeros(size, np.int32)
        self.times[name][cells] = 0 if line in self.lines.by_proxy else self.now

    def bare(self, name: str, cells: np.ndarray, cta: np.ndarray, writer: np.ndarray) -> np.ndarray:
        """Cells that a copy reads with no proxy fence since their last generic write."""
        times = self.times.get(name)
        if times is None:
            return np.zeros(cells.shape, bool)
        self._start()
        written = times[cells]
        return (written > 0) & (written >= np.maximum(self.fenced[cta][:, None], self.fenced[writer]))

    def _start(self) -> None:
        if self.fenced.size == 0:
            self.fenced = np.zeros(self.races.machine.config.ctas + 1, np.int32)
