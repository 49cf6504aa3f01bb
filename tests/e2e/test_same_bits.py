"""The same input twice gives the same bits: generic routes here, kernels in test_wheel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kf_runtime import triangle_multiplicative_update
from kf_runtime.cell import Cell

from kernel_factory.reference import trimul_inputs

ROUTES = [(24, torch.float32), (24, torch.bfloat16), (24, torch.float64), (192, torch.bfloat16), (192, torch.float32)]


@pytest.mark.parametrize(("n", "dtype"), ROUTES, ids=lambda v: str(v))
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_generic_routes_repeat_to_the_bit(n: int, dtype: torch.dtype, direction: str) -> None:
    """Below and above 2**15 pair rows, in every dtype, alone and from four threads at once."""
    cell = Cell(op="triangle_multiplicative_update", B=1, N=n, C=32, D=16, direction=direction, mask=True, sm="sm_90a")
    inputs = {name: value.to(dtype) for name, value in trimul_inputs(cell, "random", 4).items()}
    x, mask = inputs.pop("x"), inputs.pop("mask")

    def call(_: int) -> torch.Tensor:
        with torch.no_grad():
            return triangle_multiplicative_update(x, direction, mask, **inputs)

    first = call(0)
    assert first.norm() > 0
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(first, again) for again in pool.map(call, range(4)))
