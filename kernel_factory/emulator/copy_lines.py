"""What the race checks know of asynchronous copies into shared memory from the text of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ptx.records import KernelText


@dataclass(frozen=True, kw_only=True)
class CopyLines:
    """Lines of copies that the async proxy performs (bulk, tensor), and that combine (red.async)."""

    by_proxy: frozenset[int]
    combining: frozenset[int]

    @classmethod
    def of(cls, kernel: KernelText) -> CopyLines:
        """Those of a kernel."""
        code = kernel.instructions
        return cls(
            by_proxy=frozenset(i.line for i in code if i.opcode == "cp" and i.modifiers[:2] == ("async", "bulk")),
            combining=frozenset(i.line for i in code if i.opcode == "red" and i.modifiers[:1] == ("async",)),
        )


def overlap(flat: np.ndarray, unit: int) -> bool:
    """Do copies of one instruction, (copies, units) of positions, share bytes? Each covers one stretch."""
    if flat.shape[0] == 1:
        return False
    first = np.sort(flat.min(axis=1))
    return bool((np.diff(first) < flat.shape[1] * unit).any())
