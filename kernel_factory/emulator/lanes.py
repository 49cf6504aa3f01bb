"""How generated code sees a subset of threads.

``I`` is None (all threads of the batch), a slice (one warp slot of every CTA), or an index array (a divergent
subset, whole warps in thread order where a collective runs). Arrays of one element stand for all threads.
"""

from __future__ import annotations

import numpy as np

from .registry import runtime


@runtime
def read_lanes(a: np.ndarray, I: object) -> np.ndarray:  # noqa: E741 - I is the field's word in generated code
    return a if a.shape[0] == 1 else a[I]


@runtime
def write_lanes(M: object, number: int, I: object, value: np.ndarray) -> None:  # noqa: E741
    """Write a register of some threads; a value shared by all is first spread out."""
    a = M.R[number]
    if a.shape[0] == 1:
        a = M.R[number] = np.full(M.T, a[0])
    a[I] = value


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


def threads_of(M: object, I: object, chosen: np.ndarray | None) -> np.ndarray:  # noqa: E741
    ids = M.threads if I is None else M.threads[I]
    return ids if chosen is None else ids[chosen]


@runtime
def special(M: object, I: object, name: str, dtype: type) -> np.ndarray:  # noqa: E741
    a = M.specials[name] if I is None else read_lanes(M.specials[name], I)
    return a if a.dtype == dtype else a.astype(dtype)
