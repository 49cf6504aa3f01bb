"""residual_layer_norm's generic path against a float64 formula in NumPy, its gates and its errors."""

from __future__ import annotations

from typing import Any

import kf_runtime
import numpy as np
import pytest
import torch

norm = kf_runtime.residual_layer_norm


def operands(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (2, 5, 5, 24)) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"x": shape, "residual": shape, "weight": shape[-1:], "bias": shape[-1:]}
    return {name: torch.randn(s, generator=draw).to(dtype) for name, s in shapes.items()}


def reference(x: Any, residual: Any, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> np.ndarray:
    total = x + residual
    centred = total - total.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


@pytest.mark.parametrize(("dtype", "bar"), [(torch.bfloat16, 3e-3), (torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 5, 24), (7, 24), (24,), (0, 24)])
def test_against_numpy(dtype: torch.dtype, bar: float, affine: bool, shape: tuple[int, ...]) -> None:
    """Every dtype and rank, with and without parameters."""
    given = operands(dtype, shape)
    if not affine:
        del given["weight"], given["bias"]
    out = norm(**given, eps=1e-3)
    want = reference(**{k: v.double().numpy() for k, v in given.items()}, eps=1e-3)
    assert out.shape == shape and out.dtype == dtype
    size = np.linalg.norm(want)
    assert np.linalg.norm(out.double().numpy() - want) <= bar * size


def test_sum_is_not_rounded() -> None:
    """x and residual of 1000 and -1000 and a small difference: a BF16 sum would lose it."""
    x = torch.full((1, 8), 1000.0).bfloat16()
    x[0, 0] = 1004.0
    out = norm(x, torch.linspace(-1, 1, 8)[None].bfloat16())
    want = reference(x.double().numpy(), torch.linspace(-1, 1, 8)[None].bfloat16().double().numpy())
    assert np.abs(out.double().numpy() - want).max() < 0.02


def test_gradients() -> None:
    """Grad calls are plain torch: first and second derivatives agree with finite differences."""
    given = {k: v.requires_grad_() for k, v in operands(torch.float64, (3, 6)).items()}
    assert torch.autograd.gradcheck(norm, tuple(given.values()))
    assert torch.autograd.gradgradcheck(norm, tuple(given.values()))


def test_compiled_equals_eager() -> None:
    """One graph, no break, the same values."""
    given = operands(torch.float32)
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**given), norm(**given))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"residual": torch.zeros(2, 5, 5, 23).bfloat16()}, "residual: expected torch.bfloat16"),
        ({"weight": torch.ones(23).bfloat16()}, "weight: expected"),
        ({"bias": torch.ones(24, dtype=torch.float64)}, "bias: expected torch.bfloat16 or torch.float32"),
        ({"x": torch.zeros(2, 5, 5, 24).bfloat16().to_sparse()}, "x: expected a dense tensor"),
        ({"x": [1.0]}, "x: expected a tensor; found list"),
        ({"residual": None}, "residual: expected a tensor; found NoneType"),
        ({"x": torch.tensor(1.0)}, "x: expected a floating tensor"),
        ({"residual": torch.zeros(2, 5, 5, 24)}, "found torch.float32"),
    ],
)
def test_errors_name_the_argument(change: dict[str, torch.Tensor], said: str) -> None:
    """A wrong shape or dtype is an ArgumentError that says what was expected and what came."""
    with pytest.raises(kf_runtime.ArgumentError, match=said):
        norm(**{**operands(), **change})


@pytest.mark.parametrize(
    ("change", "code"),
    [({}, "cpu"), (operands(torch.float32), "dtype")],
)
def test_explain_says_why(change: dict[str, torch.Tensor], code: str) -> None:
    """The reason of a declined call."""
    route = kf_runtime.explain("residual_layer_norm", **{**operands(), **change})
    assert isinstance(route, kf_runtime.Generic) and route.reason.code == code
