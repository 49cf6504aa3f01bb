"""The torch.library operator: opcheck for every option, strides, gradients, double backward and vmap."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kf_runtime.ops.operators import OPERATOR, call_of, operands
from kf_runtime.ops.triangle_multiplicative_update import arguments, generic_path
from runtime_fakes import operands as cell_operands
from runtime_fakes import trimul_cell

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "incoming": {"direction": "incoming"},
    "no_mask": {"mask": None},
    "no_norms": {"norm_in_weight": None, "norm_in_bias": None, "norm_out_weight": None, "norm_out_bias": None},
    "one_bias": {"g_out_bias": torch.zeros(16)},
    "eps": {"eps": 1e-3},
    "ieee": {"precision": "IEEE"},
    "bfloat16": {"precision": "bfloat16"},
    "transposed": {"x": torch.randn(1, 16, 8, 8).movedim(1, -1)},
    "expanded": {"x": torch.randn(1, 8, 8, 16).expand(2, 8, 8, 16), "mask": torch.ones(8, 8).expand(2, 8, 8)},
    "empty": {"x": torch.zeros(0, 8, 8, 16), "mask": None},
    "three_dimensions": {"x": torch.randn(8, 8, 16), "mask": torch.rand(8, 8) > 0.5},
}


def positional(dtype: torch.dtype = torch.float32, grad: bool = False, **changes: Any) -> tuple[Any, ...]:
    """Operator arguments of the small cell, as leaves."""
    named: dict[str, Any] = {
        "direction": "outgoing", "eps": 1e-5,
        **{n: v.to(dtype) for n, v in cell_operands(trimul_cell(biases=changes.pop("biases", False))).items()},
    }  # fmt: skip
    precision = changes.pop("precision", None)
    named.update(changes)
    flat = (*operands(arguments(**named))[:-1], precision)
    return tuple(
        a.detach().requires_grad_(grad) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in flat
    )


#: Options that `make test` checks with gradients; all of them with KF_LONG=1.
WITH_GRAD = list(OPTIONS) if os.environ.get("KF_LONG") else ["transposed"]


@pytest.mark.parametrize(("option", "grad"), [*((o, False) for o in OPTIONS), *((o, True) for o in WITH_GRAD)])
def test_opcheck(option: str, grad: bool) -> None:
    """Schema, autograd registration, fake strides and AOT tracing with symbolic sizes, for every option."""
    torch.library.opcheck(OPERATOR, positional(grad=grad, **OPTIONS[option]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", list(OPTIONS))
def test_fake_and_real_are_row_major(option: str) -> None:
    """The result is dense, row-major and in x's dtype, whatever x's strides."""
    args = positional(**OPTIONS[option])
    out = OPERATOR(*args)
    assert out.is_contiguous() and out.shape == args[0].shape and out.dtype == args[0].dtype
    torch.testing.assert_close(out, generic_path(**vars(call_of(*args))), rtol=1e-5, atol=1e-5)


def test_gradients_twice() -> None:
    """First and second derivatives are right in float64 (against finite differences), biases included."""
    x = torch.randn(1, 3, 3, 2, dtype=torch.float64)
    shapes = {n: tuple(torch.randn(s, dtype=torch.float64) for s in (2, (4, 2))) for n in "ab"}
    vector, matrix = shapes["a"]
    square = torch.randn(2, 2, dtype=torch.float64)
    args = (x, "outgoing", torch.rand(1, 3, 3, dtype=torch.float64), vector, vector, matrix, matrix[:, 0], matrix,
            None, vector, vector, square, vector, square, None, 1e-5, None)  # fmt: skip
    leaves = tuple(a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    assert torch.autograd.gradcheck(OPERATOR, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(OPERATOR, leaves, fast_mode=True)


def test_vmap_over_pairs_and_over_parameters() -> None:
    """vmap equals a loop, over x and mask together, over x alone, and over a weight."""
    args = positional()
    xs, masks = torch.randn(3, 1, 8, 8, 16), torch.rand(3, 1, 8, 8)
    rest = args[3:]
    both = torch.vmap(lambda x, m: OPERATOR(x, "outgoing", m, *rest))(xs, masks)
    alone = torch.vmap(lambda x: OPERATOR(x, "outgoing", args[2], *rest))(xs)
    weights = torch.randn(3, 16)
    weighted = torch.vmap(lambda w: OPERATOR(args[0], "outgoing", args[2], w, *rest[1:]))(weights)
    for i in range(3):
        torch.testing.assert_close(both[i], OPERATOR(xs[i], "outgoing", masks[i], *rest))
        torch.testing.assert_close(alone[i], OPERATOR(xs[i], "outgoing", args[2], *rest))
        torch.testing.assert_close(weighted[i], OPERATOR(args[0], "outgoing", args[2], weights[i], *rest[1:]))


def test_the_operator_raises_as_the_function_does() -> None:
    """A wrong shape is the same ArgumentError, for real and in the fake."""
    args = list(positional())
    args[5] = torch.zeros(33, 16)
    with pytest.raises(ValueError, match="p_in_weight: expected"):
        OPERATOR(*args)
    with pytest.raises(ValueError, match="p_in_weight: expected"):
        OPERATOR(*[a.to("meta") if isinstance(a, torch.Tensor) else a for a in args])
