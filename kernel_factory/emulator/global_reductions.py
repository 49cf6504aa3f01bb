"""Reductions in global memory in the race check: in no order among themselves, but in one with reads and writes.

Those are bulk and tensor reductions, and atomics on floats, which no kernel takes for flags.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .memory import Elements
from .ptx.records import Instruction

_FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"}
_SEVERAL = -1


def float_atomics(instructions: Iterable[Instruction]) -> frozenset[int]:
    """The lines of a kernel's atomics on floats."""
    return frozenset(i.line for i in instructions if i.opcode in ("atom", "red") and i.modifiers[-1] in _FLOATS)


class Reductions:
    """For each cell: the CTA that has combined into it (or that several have), the latest stamp, and the line."""

    def __init__(self, races: object) -> None:
        self.races = races
        self.shadows: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, threads: np.ndarray, elements: Elements, line: int) -> None:
        """One reduction: what other CTAs have read or written there must be known to its CTA."""
        races, buffer = self.races, elements.buffer
        cta, cells = races._ctas(threads), races._cells(threads, elements)
        writer, reader, lines = races._shadow(buffer)
        stamps = races._moment(buffer) if races.ordered else None
        for kind, who, row in (("global-write-conflict", writer, 0), ("global-read-write-race", reader, 1)):
            bad = self._foreign(who[cells], None if stamps is None else stamps[row][cells], cta)
            races._report(kind, threads, cells, bad, line, lines)
        if buffer.name not in self.shadows:
            self.shadows[buffer.name] = tuple(np.zeros_like(writer) for _ in range(3))
        who, when, at = self.shadows[buffer.name]
        seen, own = who[cells], cta[:, None]
        who[cells] = np.where((seen == 0) | (seen == own), own, _SEVERAL)
        who[cells[(who[cells] != own) & (seen == 0)]] = _SEVERAL  # several CTAs in one instruction
        at[cells] = line
        if races.ordered:
            np.maximum.at(when, cells, np.broadcast_to(races.stamp[cta][:, None], cells.shape))

    def check(self, kind: str, threads: np.ndarray, elements: Elements, line: int) -> None:
        """A read or write: what other CTAs have combined into its cells must be known to its CTA."""
        shadow = self.shadows.get(elements.buffer.name)
        if shadow is not None:
            cells = self.races._cells(threads, elements)
            bad = self._foreign(shadow[0][cells], shadow[1][cells], self.races._ctas(threads))
            self.races._report(kind, threads, cells, bad, line, shadow[2])

    def _foreign(self, who: np.ndarray, stamps: np.ndarray | None, cta: np.ndarray) -> np.ndarray:
        """Cells that other CTAs have touched, in no order with this one; where several have, the latest may be it."""
        bad = (who != 0) & (who != cta[:, None])
        if self.races.ordered and stamps is not None and bad.any():
            known, now = self.races.known[cta][:, None], self.races.stamp[cta][:, None]
            bad &= np.where(who < 0, stamps > now, stamps >= known)
        return bad
