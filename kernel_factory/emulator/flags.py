"""Strong accesses: flags that order what lies before them and behind them (PTX ISA 8.7, 8.8, 8.10).

Atomics, and ld and st with .acquire, .release, .relaxed or .volatile, do not race with one another. A release leaves
at its place what the warp knows, and an acquire takes that over. A relaxed one leaves what the warp's last fence
released, and what it sees there is known after the next fence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ptx.records import Instruction
from .shadow import Access

_ORDERS = {"acquire", "release", "acq_rel", "relaxed", "volatile", "mmio"}
_FENCES = {"sc", "acq_rel", "acquire", "release"}


@dataclass(frozen=True, kw_only=True)
class Strong:
    """How an instruction orders memory, and among which threads."""

    acquire: bool
    release: bool
    volatile: bool
    scope: str

    @classmethod
    def of(cls, ins: Instruction) -> Strong | None:
        """None for a weak access, and for what is no access."""
        orders = _ORDERS & set(ins.modifiers)
        if ins.opcode not in ("atom", "red") and not (ins.opcode in ("ld", "st") and orders):
            return None
        scope = next((m for m in ins.modifiers if m in ("cta", "cluster", "gpu", "sys")), "gpu")
        acquire, release = bool(orders & {"acquire", "acq_rel"}), bool(orders & {"release", "acq_rel"})
        return cls(acquire=acquire, release=release, volatile="volatile" in orders, scope=scope)


def strong_lines(instructions: list[Instruction]) -> dict[int, Strong]:
    """The strong accesses by line; none where all that there is are atomics that order nothing."""
    found = {ins.line: strong for ins in instructions if (strong := Strong.of(ins)) is not None}
    plain = any(ins.opcode in ("ld", "st") and ins.line in found for ins in instructions)
    return found if plain or _orders(instructions, found) else {}


def _orders(instructions: list[Instruction], strong: dict[int, Strong]) -> bool:
    """Can the accesses order anything: is there an acquire or a release among them, or a fence?"""
    fences = (i.opcode == "membar" or (i.opcode == "fence" and i.modifiers[0] in _FENCES) for i in instructions)
    return any(s.acquire or s.release for s in strong.values()) or any(fences)


class SharedFlags:
    """What strong accesses of shared memory have left, cell by cell, for the race check ``race``."""

    def __init__(self, race: object) -> None:
        self.race = race
        self.written = np.zeros(race.last.shape, bool)  # the last write was strong
        self.read_by = np.zeros(race.reads.shape, bool)  # the reader's last read was strong
        self.left: dict[int, np.ndarray] = {}  # by first cell: clocks known and fenced
        self.orders = _orders(race.M.program.kernel.instructions, race.strong)

    def read(self, by: Access) -> None:
        """A read has passed its check."""
        strong = self.race.strong.get(by.line)
        self.read_by[by.column[:, None], by.places.cells] = strong is not None
        if strong is not None:
            self.take(by, strong)

    def write(self, by: Access) -> None:
        """A write has passed its check."""
        strong = self.race.strong.get(by.line)
        self.written[by.places.cells] = strong is not None
        if strong is not None:
            self.leave(by, strong)

    def take(self, by: Access, strong: Strong) -> None:
        """Acquire what is left at the places, or see it until the next fence acquires it."""
        for cell, cta, warp in self._pairs(by):
            if cell in self.left:
                see = self.race._see if strong.acquire else self.race.observe
                see(np.array([cta]), np.array([warp]), *self.left[cell][:, None])

    def leave(self, by: Access, strong: Strong) -> None:
        """Release what the warps know, or what their last fence knew."""
        race = self.race
        clocks = (race.known, race.fenced) if strong.release else race.released
        for cell, cta, warp in self._pairs(by):
            mine = np.stack([c[cta, warp] for c in clocks])
            self.left[cell] = np.maximum(self.left.get(cell, mine), mine)
        if strong.release:
            race.tick(*race._warps(by.threads))
            race.partial.released(by.threads)

    def _pairs(self, by: Access) -> list[tuple[int, int, int]]:
        """Distinct (first cell, CTA, warp) of accesses."""
        if not self.orders:
            return []
        return sorted(set(zip(by.places.cells[:, 0].tolist(), by.cta.tolist(), by.warp.tolist(), strict=True)))

    def excused(self, by: Access, kind: str, bad: np.ndarray, reader: int = -1) -> np.ndarray:
        """What is left of conflicts, where both accesses are strong: with the last write, or the last one of a reader.

        The lanes of one warp that talk through volatile words without bar.warp.sync stay a conflict.
        """
        strong = self.race.strong.get(by.line)
        if strong is None or not kind.startswith(("race-", "warp-race-")):
            return bad
        if kind.startswith("warp-") and strong.volatile:
            return bad
        return bad & ~(self.written if reader < 0 else self.read_by[reader])[by.places.cells]
