"""What the race checks know of asynchronous copies into shared memory from the text of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .ptx.records import KernelText


@dataclass(frozen=True, kw_only=True)
class CopyLines:
    """Lines of copies by the async proxy (bulk, tensor), of those that read global memory, and of red.async."""

    by_proxy: frozenset[int]
    from_global: frozenset[int]
    combining: frozenset[int]

    @classmethod
    def of(cls, kernel: KernelText) -> CopyLines:
        """Those of a kernel."""
        code = kernel.instructions
        bulk = [i for i in code if i.opcode == "cp" and "bulk" in i.modifiers]
        loads = {"mbarrier::complete_tx::bytes", "global"}
        return cls(
            by_proxy=frozenset(i.line for i in bulk),
            from_global=frozenset(i.line for i in bulk if loads <= set(i.modifiers)),
            combining=frozenset(i.line for i in code if i.opcode == "red" and i.modifiers[:1] == ("async",)),
        )


def overlap(flat: np.ndarray, unit: int) -> bool:
    """Do copies of one instruction, (copies, units) of positions, share bytes? Each covers one stretch."""
    if flat.shape[0] == 1:
        return False
    first = np.sort(flat.min(axis=1))
    return bool((np.diff(first) < flat.shape[1] * unit).any())
