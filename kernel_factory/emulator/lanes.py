"""How generated code sees a subset of threads.

``sel`` is None (all threads of the batch), a slice (one warp slot of every CTA), or an index array (a divergent
subset, whole warps in thread order where a collective runs). Arrays of one element stand for all threads.
"""

from __future__ import annotations

import numpy as np

from .registry import runtime


@runtime
def read_lanes(a: np.ndarray, sel: object) -> np.ndarray:
    return a if a.shape[0] == 1 else a[sel]


@runtime
def write_lanes(M: object, number: int, sel: object, value: np.ndarray) -> None:
    """Write a register of some threads; a value shared by all is first spread out."""
    a = M.R[number]
    if a.shape[0] == 1:
        a = M.R[number] = np.full(M.T, a[0])
    elif not a.flags.writeable:  # a broadcast view that an opcode returned
        a = M.R[number] = a.copy()
    a[sel] = value


@runtime
def spread(x: np.ndarray, n: int) -> np.ndarray:
    """One value a thread; a copy where one element stood for all."""
    return x if x.shape[0] == n else np.full(n, x[0])


@runtime
def settle(mask: np.ndarray | None) -> np.ndarray | None:
    """None when every lane is on; else the indices of the lanes that are."""
    if mask is None or mask.all():
        return None
    return np.flatnonzero(mask) if mask.shape[0] > 1 else np.zeros(0, np.int64)


def threads_of(M: object, sel: object) -> np.ndarray:
    return M.threads if sel is None else M.threads[sel]


def distinct(ordered: np.ndarray) -> np.ndarray:
    """The distinct values of an array that is in order: ``np.unique`` without its sort or its hashes."""
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


@runtime
def special(M: object, sel: object, name: str, dtype: type) -> np.ndarray:
    a = M.specials[name] if sel is None else read_lanes(M.specials[name], sel)
    return a if a.dtype == dtype else a.astype(dtype)
