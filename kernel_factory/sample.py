"""Sample: which blocks of a grid a partial run executes."""

from __future__ import annotations

import random
from itertools import product
from math import prod

Grid = tuple[int, int, int]


def corners(grid: Grid) -> list[int]:
    """Linear numbers of the blocks at every corner, and in the middle of every edge, of a grid."""
    x, y, _ = grid
    marks = [sorted({0, extent // 2, extent - 1}) for extent in grid]
    ends = [{0, extent - 1} for extent in grid]
    picked = set()
    for block in product(*marks):
        inside = sum(i not in end for i, end in zip(block, ends, strict=True))
        if inside <= 1:
            picked.add((block[2] * y + block[1]) * x + block[0])
    return sorted(picked)


def choose(grid: Grid, count: int, seed: int) -> tuple[int, ...]:
    """At least the corners and edges; with seeded random blocks up to ``count``; all where that covers the grid."""
    total = prod(grid)
    if count >= total:
        return tuple(range(total))
    picked = corners(grid)
    rest = sorted(set(range(total)) - set(picked)) if count > len(picked) else []
    extra = random.Random(seed).sample(rest, min(len(rest), count - len(picked))) if rest else []
    return tuple(sorted([*picked, *extra]))


def position(grid: Grid, linear: int) -> Grid:
    """(x, y, z) of a linear block number."""
    x, y, _ = grid
    return linear % x, linear // x % y, linear // (x * y)
