"""Reference: what validation feeds an op, and the float64 answer it must come near.

One ``Reference`` per op, shared by every family of that op. Inputs are BF16 on the host, drawn
from a seed. A set stresses one thing; each is named after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from kf_runtime.cell import DIRECTIONS, NO_DIRECTION, Cell

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Inputs and oracle of an op.

    ``directions`` are those that its cells may have. ``input_sets(cell)`` names the sets that apply.
    ``inputs(cell, name, seed)`` draws one.
    ``call(cell, inputs)`` calls the op itself.
    """

    directions: tuple[str, ...]
    input_sets: Callable[[Cell], tuple[str, ...]]
    inputs: Callable[[Cell, str, int], Tensors]
    call: Callable[[Cell, Tensors], torch.Tensor]

    def oracle(self, cell: Cell, inputs: Tensors) -> torch.Tensor:
        """The generic path of the op on the same BF16 values, in float64. Shape of x."""
        return self.call(cell, {name: value.double() for name, value in inputs.items()})


TRIMUL_SETS: Final = (
    "random",
    "mean-1000",
    "gate-in-x20",
    "gate-out-x20",
    "value-bias+3",
    "gate-bias-6",
    "gate-bias-20",
)
ZERO_ROWS: Final = "mask-zero-rows"


def _trimul_sets(cell: Cell) -> tuple[str, ...]:
    return (*TRIMUL_SETS, ZERO_ROWS) if cell.mask else TRIMUL_SETS


def trimul_inputs(cell: Cell, name: str, seed: int) -> Tensors:
    """Inputs of ``triangle_multiplicative_update``.

    x [B, N, N, C] of unit variance, projections with fan-in scaling, norm weights near 1, a mask
    [B, N, N] that keeps 85 % of the pairs. A cell without projection biases gets its biased sets
    through a channel whose norm weight is 0 and norm bias 1: h is 1 there, so that the column of
    a projection weight that reads it acts as the bias.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * scale

    B, N, C, D = cell.B, cell.N, cell.C, cell.D
    values = {
        "x": normal(B, N, N, C),
        "norm_in_weight": 1 + normal(C, scale=0.1),
        "norm_in_bias": normal(C, scale=0.1),
        "p_in_weight": normal(2 * D, C, scale=C**-0.5),
        "g_in_weight": normal(2 * D, C, scale=C**-0.5),
        "norm_out_weight": 1 + normal(D, scale=0.1),
        "norm_out_bias": normal(D, scale=0.1),
        "p_out_weight": normal(C, D, scale=D**-0.5),
        "g_out_weight": normal(C, C, scale=C**-0.5),
    }
    if cell.mask:
        values["mask"] = (torch.rand(B, N, N, generator=draw) < 0.85).float()
    if cell.biases:
        values |= {f"{p}_in_bias": normal(2 * D, scale=0.2) for p in ("p", "g")}
        values |= {f"{p}_out_bias": normal(C, scale=0.2) for p in ("p", "g")}
    _stress(values, name)
    return {key: value.to(torch.bfloat16) for key, value in values.items()}


def _stress(values: Tensors, name: str) -> None:
    """Turn random inputs into the named set, in place."""
    match name:
        case "random":
            pass
        case "mean-1000":
            values["x"] += 1000
        case "gate-in-x20":
            values["g_in_weight"] *= 20
        case "gate-out-x20":
            values["g_out_weight"] *= 20
        case "value-bias+3":
            _as_bias(values, "p_in_weight", 3.0)
        case "gate-bias-6":
            _as_bias(values, "g_in_weight", -6.0)
        case "gate-bias-20":
            _as_bias(values, "g_in_weight", -20.0)
            _as_bias(values, "g_out_weight", -20.0)
        case "mask-zero-rows":
            n = values["mask"].shape[1]
            values["mask"][:, :: max(2, n // 5)] = 0
            values["mask"][:, :, n - 1] = 0
        case _:
            raise ValueError(f"input set: expected one of {', '.join((*TRIMUL_SETS, ZERO_ROWS))}; found {name!r}")


def _as_bias(values: Tensors, weight: str, bias: float) -> None:
    values["norm_in_weight"][-1], values["norm_in_bias"][-1] = 0, 1
    values[weight][:, -1] = bias


def trimul_call(cell: Cell, inputs: Tensors) -> torch.Tensor:
    """``triangle_multiplicative_update`` as this cell calls it. Shape of x."""
    from kf_runtime import triangle_multiplicative_update

    values = dict(inputs)
    return triangle_multiplicative_update(values.pop("x"), cell.direction, values.pop("mask", None), **values)


def residual_norm_inputs(cell: Cell, name: str, seed: int) -> Tensors:
    """Inputs of ``residual_layer_norm``: x and residual [B, N, N, C] of unit variance, a weight [C] near 1."""
    draw = torch.Generator().manual_seed(seed)
    shape = (cell.B, cell.N, cell.N, cell.C)
    values = {
        "x": torch.randn(shape, generator=draw),
        "residual": torch.randn(shape, generator=draw),
        "weight": 1 + 0.1 * torch.randn(cell.C, generator=draw),
        "bias": 0.1 * torch.randn(cell.C, generator=draw),
    }
    if name == "mean-1000":
        values["x"] += 1000
    return {key: value.to(torch.bfloat16) for key, value in values.items()}


def residual_norm_call(cell: Cell, inputs: Tensors) -> torch.Tensor:
    """``residual_layer_norm``. Shape of x."""
    from kf_runtime import residual_layer_norm

    return residual_layer_norm(**inputs)


TRIMUL: Final = Reference(directions=DIRECTIONS, input_sets=_trimul_sets, inputs=trimul_inputs, call=trimul_call)
REFERENCES: Final = {
    "triangle_multiplicative_update": TRIMUL,
    "residual_layer_norm": Reference(
        directions=(NO_DIRECTION,),
        input_sets=lambda cell: ("random", "mean-1000"),
        inputs=residual_norm_inputs,
        call=residual_norm_call,
    ),
}
trimul_oracle: Final = TRIMUL.oracle


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; NaN anywhere gives NaN, and 0/0 gives 0."""
    gap = (found.double() - expected.double()).norm().item()
    size = expected.double().norm().item()
    return gap / size if size else (0.0 if gap == 0 else math.inf)


def worst_row(found: torch.Tensor, expected: torch.Tensor, axis: int) -> float:
    """The largest ‖row difference‖ over the rms row norm of ``expected``; a row runs along ``axis``."""
    gaps = (found.double() - expected.double()).norm(dim=axis)
    rms = expected.double().norm(dim=axis).square().mean().sqrt().item()
    largest = gaps.max().item()
    return largest / rms if rms else (0.0 if largest == 0 else math.inf)
