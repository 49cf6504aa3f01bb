"""ld and st of local memory and of generic addresses, which name their state space by a window (``move.WINDOWS``)."""

from __future__ import annotations

import numpy as np

from ..errors import Fault
from ..lanes import settle, spread, threads_of
from ..registry import RUNTIME, runtime
from .memory_access import (
    WORDS,
    columns,
    global_base,
    joined,
    load_global,
    load_shared,
    scatter_back,
    shared_base,
    store_global,
    store_shared,
)
from .move import WINDOWS


def _local_positions(M, sel, address, offset, nbytes, chosen, line, n):
    a = spread(address, n).astype(np.int64) + offset
    a = a if chosen is None else a[chosen]
    ids = threads_of(M, sel, chosen)
    bad = (a < 0) | (a + nbytes > M.local_bytes) | (a & (nbytes - 1) != 0)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise Fault(
            "out-of-bounds",
            line,
            f"local access of {nbytes} bytes at {int(a[at])} of {M.local_bytes} bytes",
            "correct the index into the local array",
            int(ids[at]),
        )
    return (ids * M.local_stride + a) >> (nbytes.bit_length() - 1)


@runtime
def load_local(M, sel, address, offset, dtype, count, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * count
    at = _local_positions(M, sel, address, offset, nbytes, chosen, line, n)
    return scatter_back(columns(M.local.view(WORDS[nbytes])[at], dtype, count), chosen, n)


@runtime
def store_local(M, sel, address, offset, dtype, values, mask, line, n):
    chosen = settle(mask)
    nbytes = np.dtype(dtype).itemsize * len(values)
    at = _local_positions(M, sel, address, offset, nbytes, chosen, line, n)
    data = np.ascontiguousarray(joined(values, n, dtype)).view(WORDS[nbytes]).reshape(-1)
    M.local.view(WORDS[nbytes])[at] = data if chosen is None else data[chosen]


def _generic(M, sel, address, mask, line):
    """Space and base of generic addresses, all in one space."""
    if mask is not None and address.shape[0] > 1 and not mask.all():
        if not mask.any():
            return "global", global_base(address)
        address = np.where(mask, address, address[np.argmax(mask)])
    top = address >> np.uint64(60)
    space = {1: "shared", 2: "local", 4: "param"}.get(int(top[0]), "global")
    plain = address - np.uint64(WINDOWS[space]) if space in WINDOWS else address
    if space == "shared":
        return ("shared", shared_base(M, sel, plain)) if M.cluster_size == 1 else ("cluster", plain.astype(np.int64))
    return space, global_base(plain) if space == "global" else plain


def generic_masks(address, mask, n):
    """Masks of the lanes whose addresses lie in one space; None when all (that are on) share one."""
    top = address >> np.uint64(60)
    if (top == top[0]).all():
        return None
    top, on = spread(top, n), np.ones(n, bool) if mask is None else spread(mask, n)
    spaces = np.unique(top[on])
    return [on & (top == space) for space in spaces] if spaces.shape[0] > 1 else None


@runtime
def load_generic(M, sel, address, offset, dtype, count, mask, line, n):
    masks = generic_masks(address, mask, n)
    if masks is not None:
        parts = [load_generic(M, sel, address, offset, dtype, count, one, line, n) for one in masks]
        return [np.select(masks, [spread(p[i], n) for p in parts]) for i in range(count)]
    space, base = _generic(M, sel, address, mask, line)
    if space == "param":
        return _parameters(M, base, offset, dtype, count, line)
    if space == "cluster":
        return RUNTIME["load_cluster"](M, sel, base, offset, dtype, count, mask, line, n)
    return {"shared": load_shared, "local": load_local, "global": load_global}[space](
        M, sel, base, offset, dtype, count, mask, line, n
    )


def _parameters(M, base, offset, dtype, count, line):
    """Parameter bytes at an address a thread, or at one for all."""
    size = np.dtype(dtype).itemsize
    at = base.astype(np.int64)[:, None] + offset + np.arange(size * count)
    if (at < 0).any() or (at >= len(M.param_bytes)).any():
        raise Fault(
            "out-of-bounds",
            line,
            f"load of {size * count} bytes at offset {int(at[:, 0].max())} of {len(M.param_bytes)} bytes of parameters",
            "correct the offset into the parameter",
            0,
        )
    return columns(np.frombuffer(M.param_bytes, np.uint8)[at].reshape(-1).view(WORDS[size * count]), dtype, count)


@runtime
def store_generic(M, sel, address, offset, dtype, values, mask, line, n):
    masks = generic_masks(address, mask, n)
    if masks is not None:
        for one in masks:
            store_generic(M, sel, address, offset, dtype, values, one, line, n)
        return None
    space, base = _generic(M, sel, address, mask, line)
    if space == "param":
        raise Fault("write-to-read-only", line, "store to a kernel parameter", "copy the parameter first", 0)
    if space == "cluster":
        return RUNTIME["store_cluster"](M, sel, base, offset, dtype, values, mask, line, n)
    return {"shared": store_shared, "local": store_local, "global": store_global}[space](
        M, sel, base, offset, dtype, values, mask, line, n
    )
