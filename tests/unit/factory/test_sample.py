"""Samples of a grid: corners and edges are always there, and the seed decides the rest."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from kernel_factory import sample

grids = st.tuples(*[st.integers(1, 12)] * 3)


@given(grids, st.integers(1, 200), st.integers(0, 9))
def test_corners_are_always_in(grid: tuple[int, int, int], count: int, seed: int) -> None:
    """Every corner of the grid is in every sample, which has no duplicates and stays in the grid."""
    chosen = sample.choose(grid, count, seed)
    x, y, z = grid
    for cx in {0, x - 1}:
        for cy in {0, y - 1}:
            for cz in {0, z - 1}:
                assert (cz * y + cy) * x + cx in chosen
    assert len(set(chosen)) == len(chosen)
    assert min(chosen) >= 0 and max(chosen) < prod(grid)


@given(grids, st.integers(0, 9))
def test_enough_budget_runs_all(grid: tuple[int, int, int], seed: int) -> None:
    """A budget that covers the grid runs all of it."""
    assert sample.choose(grid, prod(grid), seed) == tuple(range(prod(grid)))


def test_seed_decides() -> None:
    """The same seed gives the same sample, another seed another."""
    grid = (50, 50, 1)
    assert sample.choose(grid, 100, 1) == sample.choose(grid, 100, 1) != sample.choose(grid, 100, 2)


@given(grids, st.data())
def test_position_inverts_the_linear_number(grid: tuple[int, int, int], data: st.DataObject) -> None:
    """x runs fastest, as on the device."""
    linear = data.draw(st.integers(0, prod(grid) - 1))
    x, y, z = sample.position(grid, linear)
    assert (z * grid[1] + y) * grid[0] + x == linear
