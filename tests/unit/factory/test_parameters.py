"""Float32 parameters: what is drawn, and that the block of the oracle is the op's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kf_runtime.cell import Cell
from kf_runtime.ops.triangle_multiplicative_update import generic_path

from kernel_factory import parameters
from kernel_factory.family import discover
from kernel_factory.reference import TRIMUL_SETS, Tensors, relative_error, trimul_inputs

CELL = Cell(op="triangle_multiplicative_update", B=2, N=12, C=16, D=16, direction="outgoing", mask=True, sm="sm_0")
EXPECTATION = discover()["trimul_mma"].expectation


def oracle(cell: Cell, inputs: Tensors) -> torch.Tensor:
    """The generic path in float64, of unrounded parameters."""
    wide = {name: value.double() for name, value in inputs.items()}
    return generic_path(wide.pop("x"), cell.direction, wide.pop("mask", None), **wide)


@pytest.mark.parametrize("name", TRIMUL_SETS)
def test_unrounded_parameters_round_back_to_the_proved_ones(name: str) -> None:
    """To the bit, and they fill the interval that does: their spread is that of a uniform half unit each way."""
    inputs = trimul_inputs(replace(CELL, C=128, D=128), name, 5)
    wide = parameters.unrounded(inputs, 5)
    gaps = []
    for key, value in wide.items():
        assert torch.equal(value.to(torch.bfloat16).view(torch.int16), inputs[key].view(torch.int16)), key
        if key not in ("x", "mask"):
            assert value.dtype == torch.float32
            unit = torch.frexp(inputs[key].float())[1].sub(8).float().exp2()
            gaps.append(((value - inputs[key].float()) / unit)[inputs[key] != 0].flatten())
    spread = torch.cat(gaps)
    assert abs(float(spread.mean())) < 0.01 and abs(float(spread.std()) - 12**-0.5) < 0.02


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(("mask", "biases"), [(True, True), (False, False)])
def test_the_block_of_the_oracle_is_the_ops_own(direction: str, mask: bool, biases: bool) -> None:
    """A block of rows and columns, from the rows that it needs alone, equals that block of the whole op in float64."""
    cell = replace(CELL, direction=direction, mask=mask, biases=biases)
    wide = parameters.unrounded(trimul_inputs(cell, "random", 7), 7)
    batch, rows, columns = where = 1, [0, 5, 11], slice(3, 10)
    assert (
        relative_error(parameters.block_oracle(cell, wide, where), oracle(cell, wide)[batch][rows][:, columns]) < 1e-13
    )


def test_a_measurement_is_that_of_the_whole_output() -> None:
    """Both directions, every set: the sampled figure is near the error of the whole model against the whole oracle."""
    cells = [replace(CELL, N=40, C=64, D=64, direction=d) for d in ("outgoing", "incoming")]
    for cell, figures in zip(cells, parameters.measure(cells, EXPECTATION, 9), strict=True):
        assert list(figures) == [*TRIMUL_SETS, "mask-zero-rows"]
        inputs = trimul_inputs(cell, "random", 9)
        whole = EXPECTATION.model(cell, inputs, torch.float32)["out"]
        expected = relative_error(whole, oracle(cell, parameters.unrounded(inputs, 9)))
        assert expected > 4e-3 and abs(figures["random"] / expected - 1) < 0.1


def test_a_model_that_is_wrong_shows() -> None:
    """A model that ignores one LayerNorm bias is far outside any bar."""

    class Wrong(EXPECTATION.Staged):  # type: ignore[misc, name-defined]
        def __init__(self, cell: Cell, inputs: Tensors, dtype: torch.dtype) -> None:
            super().__init__(cell, {**inputs, "norm_out_bias": torch.zeros_like(inputs["norm_out_bias"])}, dtype)

    (figures,) = parameters.measure([CELL], SimpleNamespace(Staged=Wrong), 9)
    assert figures["random"] > 3e-2
