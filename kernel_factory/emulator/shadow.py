"""Places in the shadow of shared memory: which cells an access touches, moved as machine words.

A shadow cell is one int32 for the smallest access of a kernel, while tensor operations and copies move 16 bytes at a
time. A place is therefore the run of cells of one naturally aligned access, and reading or writing a million of them
is one gather or scatter of words of that width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
