"""Places of the race checker's shadow: each width reads and writes exactly its cells."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_factory.emulator.shadow import Places


@pytest.mark.parametrize("cell", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [1, 4, 16])
def test_marks_land_on_the_cells_of_each_access(cell, nbytes):
    """One mark for each access, on cells found here byte by byte."""
    rng = np.random.default_rng(cell * nbytes)
    shadow = rng.integers(1, 1000, 256 // cell).astype(np.int32)
    size = max(cell, nbytes)
    flat = rng.permutation(256 // size)[:6].reshape(3, 2) * size
    places = Places.of(flat, nbytes, cell)
    touched = [[at // cell + i for at in row for i in range(size // cell)] for row in flat.tolist()]
    assert places.cells.tolist() == touched
    assert np.array_equal(places.take(shadow), shadow[np.array(touched)])
    want = shadow.copy()
    for row, mark in zip(touched, (7, 8, 9), strict=True):
        want[row] = mark
    places.put(shadow, np.array([7, 8, 9]))
    assert np.array_equal(shadow, want)
    places.put(shadow, 5)
    want[np.array(touched)] = 5
    assert np.array_equal(shadow, want)


def test_rows_of_a_table():
    """Each access has its own row of a flattened table."""
    table = np.zeros((3, 8), np.int32)
    Places.of(np.array([0, 16]), 16, 4).row(np.array([2, 1]), 8).put(table.reshape(-1), np.array([3, 4]))
    assert table.tolist() == [[0] * 8, [0, 0, 0, 0, 4, 4, 4, 4], [3, 3, 3, 3, 0, 0, 0, 0]]
