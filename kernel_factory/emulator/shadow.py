"""Places in the shadow of shared memory: which cells an access touches, moved as machine words; and its size.

A shadow cell is one int32 for the smallest access of a kernel, while tensor operations and copies move 16 bytes at a
time. A place is therefore the run of cells of one naturally aligned access, and reading or writing a million of them
is one gather or scatter of words of that width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .emitter import NUMPY, size_of

_WORDS = {1: np.dtype(np.int32), 2: np.dtype(np.int64)}


@dataclass(frozen=True, slots=True)
class Places:
    """(accesses, places) of ``width`` neighbouring cells each; ``index`` counts in places."""

    index: np.ndarray
    width: int

    @classmethod
    def of(cls, flat: np.ndarray, nbytes: int, cell: int) -> Places:
        """Those of accesses at byte offsets ``flat`` (accesses,) or (accesses, parts), ``nbytes`` each and aligned."""
        size = max(nbytes, cell)
        index = flat >> (size.bit_length() - 1)  # both are powers of two
        return cls(index[:, None] if index.ndim == 1 else index, size // cell)

    @property
    def cells(self) -> np.ndarray:
        """(accesses, cells)."""
        if self.width == 1:
            return self.index
        cells = self.index[..., None] * self.width + np.arange(self.width)
        return cells.reshape(self.index.shape[0], -1)

    def row(self, number: np.ndarray, length: int) -> Places:
        """The same places in row ``number`` (of each access) of a table with ``length`` cells in a row, flattened."""
        return Places(self.index + (number * (length // self.width))[:, None], self.width)

    def take(self, array: np.ndarray) -> np.ndarray:
        """(accesses, cells) of an array of cells."""
        return self._words(array).take(self.index).view(np.int32)

    def put(self, array: np.ndarray, mark: np.ndarray | int) -> None:
        """Mark every cell, with one number or with one for each access."""
        words = self._words(array)
        marks = np.repeat(np.atleast_1d(mark).astype(np.int32, copy=False), self.width).view(words.dtype)
        if (marks == marks[0]).all():
            words[self.index] = marks[0]
        else:
            words[self.index.reshape(-1)] = np.repeat(marks, self.index.shape[1])

    def _words(self, array: np.ndarray) -> np.ndarray:
        kind = _WORDS.get(self.width)
        return array.view(np.dtype(f"V{4 * self.width}") if kind is None else kind)


@dataclass(slots=True)
class Access:
    """Cells that threads touch at one line, and whose those threads are: ``local`` is column and lane in one number.

    ``whole``: the warp acts as one. ``proxy``: by the async proxy. ``clocks``: what a whole warpgroup knows, and has
    fenced, where not each warp counts by itself.
    """

    threads: np.ndarray
    places: Places
    line: int
    cta: np.ndarray
    warp: np.ndarray
    column: np.ndarray
    local: np.ndarray
    whole: bool = False
    proxy: bool = False
    clocks: list[np.ndarray] | None = None


def cell_bytes(program: object) -> int:
    """Smallest shared access of a kernel, between 1 and 16 bytes."""
    smallest = 16
    for ins in program.kernel.instructions:
        if ins.opcode in ("ld", "st") and not {"global", "param", "local"} & set(ins.modifiers):
            count = next((int(m[1:]) for m in ins.modifiers if m in ("v2", "v4", "v8")), 1)
            smallest = min(smallest, count * size_of(NUMPY[ins.modifiers[-1]]))
        elif ins.opcode == "cp" and ins.modifiers[:2] in (("async", "ca"), ("async", "cg")):
            smallest = min(smallest, ins.operands[2].value)
        elif ins.opcode == "wmma":
            smallest = 1
        elif ins.opcode in ("atom", "red") and "global" not in ins.modifiers:
            smallest = min([smallest, *(size_of(NUMPY[m]) for m in ins.modifiers if m in NUMPY)])
    return smallest


def shadow_bytes(program: object, config: object) -> int:
    """About how many bytes the shadow of one CTA's shared memory takes."""
    cells = (program.layout.static_shared + config.dynamic_shared) // cell_bytes(program) + 64
    warps = config.threads // 32
    return 4 * cells * (3 + warps * config.shape.size + warps + -(-warps // 4))
