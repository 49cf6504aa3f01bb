"""ld and st of local memory and of generic addresses, which name their state space by a window (``move.WINDOWS``)."""

from __future__ import annotations

import numpy as np

from ..issue import Issue
from ..lanes import spread
from ..registry import RUNTIME, runtime
from .memory_access import WORDS, columns, global_base, packed, shared_base, unpacked
from .move import WINDOWS

_SPACES = {1: "shared", 2: "local", 4: "param"}


def _local_positions(issue: Issue, place: tuple, nbytes: int) -> np.ndarray:
    M = issue.M
    a = issue.each(place[0]).astype(np.int64) + place[1]
    bad = (a < 0) | (a + nbytes > M.local_bytes) | (a & (nbytes - 1) != 0)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise issue.fault(
            "out-of-bounds",
            f"local access of {nbytes} bytes at {int(a[at])} of {M.local_bytes} bytes",
            "correct the index into the local array",
            at,
        )
    return (issue.threads * M.local_stride + a) >> (nbytes.bit_length() - 1)


@runtime
def load_local(issue: Issue, place: tuple, dtype: type, count: int) -> list[np.ndarray]:
    nbytes = np.dtype(dtype).itemsize * count
    at = _local_positions(issue, place, nbytes)
    return unpacked(issue, issue.M.local.view(WORDS[nbytes])[at], dtype, count)


@runtime
def store_local(issue: Issue, place: tuple, dtype: type, values: list[np.ndarray]) -> None:
    nbytes = np.dtype(dtype).itemsize * len(values)
    at = _local_positions(issue, place, nbytes)
    issue.M.local.view(WORDS[nbytes])[at] = packed(issue, values, dtype)


# -- generic ----------------------------------------------------------------------------------------------------------
def space_of(issue: Issue, place: tuple) -> tuple[str, tuple]:
    """The space of generic addresses that all lie in one, and their place there."""
    (address, offset), M, first = place, issue.M, 0
    if issue.chosen is not None and address.shape[0] > 1:
        if issue.chosen.size == 0:
            return "global", (global_base(address), offset)
        first = issue.chosen[0]
    space = _SPACES.get(int(address[first] >> np.uint64(60)), "global")
    plain = address - np.uint64(WINDOWS[space]) if space in WINDOWS else address
    if space == "shared":
        if M.cluster_size > 1:
            return "cluster", (plain.astype(np.int64), offset)
        return "shared", (shared_base(M, issue.sel, plain), offset)
    return space, (global_base(plain) if space == "global" else plain, offset)


def by_space(issue: Issue, address: np.ndarray) -> list[Issue] | None:
    """One issue for each space that the addresses lie in; None when all (that are on) share one."""
    top = address >> np.uint64(60)
    if (top == top[0]).all():
        return None
    top = issue.each(top)
    spaces = np.unique(top)
    return [issue.narrowed(issue.lanes[top == space]) for space in spaces] if spaces.shape[0] > 1 else None


def merged(parts: list[Issue], found: list[list[np.ndarray]]) -> list[np.ndarray]:
    """Results of the parts, each where its own lanes are."""
    out = []
    for results in zip(*found, strict=True):
        whole = np.zeros(parts[0].n, results[0].dtype)
        for part, result in zip(parts, results, strict=True):
            whole[part.chosen] = spread(result, part.n)[part.chosen]
        out.append(whole)
    return out


@runtime
def load_generic(issue: Issue, place: tuple, dtype: type, count: int) -> list[np.ndarray]:
    parts = by_space(issue, place[0])
    if parts is not None:
        return merged(parts, [load_generic(one, place, dtype, count) for one in parts])
    space, there = space_of(issue, place)
    if space == "param":
        return _parameters(issue, there, dtype, count)
    return RUNTIME[f"load_{space}"](issue, there, dtype, count)


def _parameters(issue: Issue, place: tuple, dtype: type, count: int) -> list[np.ndarray]:
    """Parameter bytes at an address a thread, or at one for all."""
    size, held = np.dtype(dtype).itemsize * count, issue.M.param_bytes
    at = place[0].astype(np.int64)[:, None] + place[1] + np.arange(size)
    if (at < 0).any() or (at >= len(held)).any():
        raise issue.fault(
            "out-of-bounds",
            f"load of {size} bytes at offset {int(at[:, 0].max())} of {len(held)} bytes of parameters",
            "correct the offset into the parameter",
        )
    return columns(np.frombuffer(held, np.uint8)[at].reshape(-1).view(WORDS[size]), dtype, count)


@runtime
def store_generic(issue: Issue, place: tuple, dtype: type, values: list[np.ndarray]) -> None:
    parts = by_space(issue, place[0])
    if parts is not None:
        for one in parts:
            store_generic(one, place, dtype, values)
        return
    space, there = space_of(issue, place)
    if space == "param":
        raise issue.fault("write-to-read-only", "store to a kernel parameter", "copy the parameter first")
    RUNTIME[f"store_{space}"](issue, there, dtype, values)
