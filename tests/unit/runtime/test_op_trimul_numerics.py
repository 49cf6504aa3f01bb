"""triangle_multiplicative_update's generic path against an independent float64 formula in NumPy."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import kf_runtime
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kf_runtime import TriMulPrecision
from kf_runtime.ops import trimul_arguments, trimul_fused

update = kf_runtime.triangle_multiplicative_update
NORMS = ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")
WEIGHTS = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
BIASES = ("p_in_bias", "g_in_bias", "p_out_bias", "g_out_bias")


def reference(x: Any, direction: str, mask: Any, p: dict[str, Any], eps: float) -> np.ndarray:
    """The formula of the contract, written as loops over the batch and one einsum; float64 throughout."""

    def norm(v: np.ndarray, weight: Any, bias: Any) -> np.ndarray:
        centred = v - v.mean(-1, keepdims=True)
        v = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        return v * (1 if weight is None else weight) + (0 if bias is None else bias)

    def linear(v: np.ndarray, weight: Any, bias: Any) -> np.ndarray:
        return np.einsum("...c,oc->...o", v, weight) + (0 if bias is None else bias)

    def sigmoid(v: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(v / 2))

    h = norm(x, p.get("norm_in_weight"), p.get("norm_in_bias"))
    ab = sigmoid(linear(h, p["g_in_weight"], p.get("g_in_bias"))) * linear(h, p["p_in_weight"], p.get("p_in_bias"))
    if mask is not None:
        ab = ab * mask[..., None]
    D = ab.shape[-1] // 2
    a, b = ab[..., :D], ab[..., D:]
    t = np.einsum("...ikd,...jkd->...ijd" if direction == "outgoing" else "...kid,...kjd->...ijd", a, b)
    u = norm(t, p.get("norm_out_weight"), p.get("norm_out_bias"))
    return sigmoid(linear(h, p["g_out_weight"], p.get("g_out_bias"))) * linear(
        u, p["p_out_weight"], p.get("p_out_bias")
    )


def make(
    lead: tuple[int, ...] = (1,),
    N: int = 6,
    C: int = 8,
    D: int = 12,
    *,
    names: tuple[str, ...] = (*NORMS, *WEIGHTS),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """A pair, a 0/1 mask and parameters."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, N, N, C, generator=rng, dtype=torch.float64).to(dtype)
    mask = (torch.rand(*lead, N, N, generator=rng) > 0.3).to(dtype)
    shapes = trimul_arguments.shapes(C, D)
    p = {
        n: (torch.randn(shapes[n], generator=rng, dtype=torch.float64) * shapes[n][-1] ** -0.5).to(dtype) for n in names
    }
    return x, mask, p


def expected(x: Any, direction: str, mask: Any, p: dict[str, Any], eps: float = 1e-5) -> torch.Tensor:
    wide = {n: v.detach().double().numpy() for n, v in p.items()}
    m = None if mask is None else mask.double().numpy()
    return torch.from_numpy(np.asarray(reference(x.detach().double().numpy(), direction, m, wide, eps)))


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Relative error in norm."""
    return float((out.double() - ref).norm() / ref.norm().clamp_min(1e-300))


@settings(max_examples=60, deadline=None)
@given(
    lead=st.sampled_from([(), (1,), (2,), (2, 3), (1, 1, 2)]),
    N=st.integers(1, 7),
    C=st.sampled_from([1, 3, 8]),
    D=st.sampled_from([2, 5, 8]),
    direction=st.sampled_from(["outgoing", "incoming"]),
    masked=st.booleans(),
    norms=st.sets(st.sampled_from(NORMS)),
    biases=st.sets(st.sampled_from(BIASES)),
    eps=st.sampled_from([1e-5, 1e-2]),
    grad=st.booleans(),
    fuse=st.booleans(),
)
def test_float64_equals_the_formula(
    lead: Any, N: int, C: int, D: int, direction: str, masked: bool, norms: Any, biases: Any, eps: float, grad: bool,
    fuse: bool,
) -> None:  # fmt: skip
    """Every option, both generic routes, grad mode or not: float64 agrees with the independent formula to 1e-11."""
    x, mask, p = make(lead, N, C, D, names=(*WEIGHTS, *norms, *biases))
    before = trimul_fused.MIN_PAIR_ROWS
    trimul_fused.MIN_PAIR_ROWS = 0 if fuse else before
    try:
        with torch.set_grad_enabled(grad):
            out = update(x, direction, mask if masked else None, eps=eps, **p)
    finally:
        trimul_fused.MIN_PAIR_ROWS = before
    assert out.shape == x.shape and out.dtype == x.dtype
    torch.testing.assert_close(out, expected(x, direction, mask if masked else None, p, eps), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_fused_blocks_cover_everything(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of a few rows, channels and batches, the fused route still equals the formula."""
    x, mask, p = make((3,), 9, 8, 6, names=(*NORMS, *WEIGHTS, *BIASES))
    monkeypatch.setattr(trimul_fused, "MIN_PAIR_ROWS", 0)
    for elements in (1, 300, 2500, 5000):
        monkeypatch.setattr(trimul_fused, "BLOCK_ELEMENTS", elements)
        with torch.no_grad():
            out = update(x, direction, mask, **p)
        torch.testing.assert_close(out, expected(x, direction, mask, p), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("device", "least"), [("meta", 182), ("cpu", 32)])
def test_fused_route_is_taken_from_2_to_the_15_pair_rows(
    monkeypatch: pytest.MonkeyPatch, device: str, least: int
) -> None:
    """Large eager no-grad calls are fused (on the CPU from 2**10 rows); smaller ones, grad and float16 are not."""
    taken: list[int] = []
    fused = trimul_fused.fused
    monkeypatch.setattr(trimul_fused, "fused", lambda call: taken.append(call.x.shape[-2]) or fused(call))
    names = (*NORMS, *WEIGHTS)
    large, _, p = make((), least, 4, 4, names=names, dtype=torch.float32)
    small, _, _ = make((), least - 1, 4, 4, names=names, dtype=torch.float32)
    large, small, p = large.to(device), small.to(device), {n: v.to(device) for n, v in p.items()}
    with torch.no_grad():
        for value in (large, small):
            update(value, **p)
        update(large.half(), **{n: v.half() for n, v in p.items()})
    update(large, **p)
    assert taken == [least]


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "bound"),
    [
        (torch.float32, torch.float32, 2e-6),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float16, 2.5e-3),
        (torch.bfloat16, torch.float32, 4e-3),
        (torch.float16, torch.float32, 5e-4),
    ],
)
def test_lower_precisions_stay_near(dtype: torch.dtype, param_dtype: torch.dtype, bound: float) -> None:
    """Each dtype mix stays within its rounding; a 16-bit pair with float32 parameters computes in float32."""
    for direction in ("outgoing", "incoming"):
        x, mask, p = make((2,), 24, 32, 16, names=(*NORMS, *WEIGHTS, *BIASES))
        x, p = x.to(dtype), {n: v.to(param_dtype) for n, v in p.items()}
        out = update(x, direction, mask, **p)
        assert out.dtype == dtype
        assert error(out, expected(x, direction, mask, p)) < bound


def test_float16_contraction_does_not_overflow() -> None:
    """Products that sum far beyond 65504 still give the formula's finite answer, and a tiny pair keeps its eps."""
    x, mask, p = make((1,), 64, 16, 16)
    p["p_in_weight"] = p["p_in_weight"] * 300
    half = {n: v.half() for n, v in p.items()}
    for scale in (1.0, 1e-3, 1e-6):
        half["p_in_weight"] = (p["p_in_weight"] * scale).half()
        out = update(x.half(), "outgoing", mask, **half)
        ref = expected(x.half(), "outgoing", mask, half)
        assert torch.isfinite(out).all()
        assert error(out, ref) < 5e-3


@pytest.mark.parametrize("grad", [False, True])
def test_bfloat16_precision_rounds_everything_first(grad: bool) -> None:
    """precision="bfloat16" on float32 inputs is the BF16 call on rounded inputs, mask included, bit for bit."""
    x, _, p = make((1,), 10, 16, 8, dtype=torch.float32)
    mask = torch.rand(1, 10, 10)
    with torch.set_grad_enabled(grad):
        out = update(x, "incoming", mask, precision="bfloat16", **p)
        narrow = update(x.bfloat16(), "incoming", mask.bfloat16(), **{n: v.bfloat16() for n, v in p.items()})
    assert out.dtype == torch.float32 and torch.equal(out, narrow.float())


def test_bfloat16_precision_is_differentiable() -> None:
    """The rounding passes gradients through to every float32 input."""
    x, mask, p = make((1,), 5, 8, 8, names=(*NORMS, *WEIGHTS, *BIASES), dtype=torch.float32)
    leaves = [x, mask, *p.values()]
    for leaf in leaves:
        leaf.requires_grad_()
    update(x, "outgoing", mask, precision="bfloat16", **p).square().sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32 and leaf.grad.abs().sum() > 0


def test_autocast_reads_the_float32_pair_in_the_norms() -> None:
    """Under BF16 autocast a pair with mean 1000 keeps its LayerNorm (float32); rounding it first would not."""
    x, mask, p = make((1,), 16, 32, 16, dtype=torch.float32)
    x = x + 1000
    ref = expected(x, "outgoing", mask, p)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = update(x, "outgoing", mask, **p)
    assert out.dtype == torch.float32 and error(out, ref) < 2e-2
    assert error(update(x, "outgoing", mask, precision="bfloat16", **p), ref) > 0.2


def test_autocast_leaves_float64_alone() -> None:
    """The oracle does not lose precision under autocast."""
    x, mask, p = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(update(x, "outgoing", mask, **p), expected(x, "outgoing", mask, p))


@pytest.mark.parametrize("precision", [None, *TriMulPrecision])
def test_precision_values_change_nothing_on_the_cpu(precision: Any) -> None:
    """Every TriMulPrecision is accepted; on the CPU all are full float32."""
    x, mask, p = make(dtype=torch.float32)
    assert torch.equal(update(x, "outgoing", mask, precision=precision, **p), update(x, "outgoing", mask, **p))


def test_another_packages_precision_enum_is_accepted() -> None:
    """A model may pass the TriMulPrecision of the frontend that it was written for."""
    other = IntEnum("TriMulPrecision", {"NONE": -1, "DEFAULT": 0, "TF32": 1, "TF32x3": 2, "IEEE": 3})
    x, mask, p = make(dtype=torch.float32)
    assert torch.equal(update(x, "outgoing", mask, precision=other.IEEE, **p), update(x, "outgoing", mask, **p))


def test_gradients_are_right_to_second_order() -> None:
    """gradcheck and gradgradcheck pass in float64 for the pair, the mask and every parameter, both directions."""
    for direction in ("outgoing", "incoming"):
        x, mask, p = make((1,), 2, 3, 2, names=(*NORMS, *WEIGHTS, *BIASES))
        names = list(p)
        leaves = [t.clone().requires_grad_() for t in (x, mask * 0.5 + 0.25, *p.values())]

        def function(x: Any, mask: Any, *values: Any, way: str = direction, names: Any = names) -> torch.Tensor:
            return update(x, way, mask, eps=0.1, **dict(zip(names, values, strict=True)))

        assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("fuse", [False, True])
def test_awkward_inputs(fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposed, sliced, expanded and empty pairs and masks are right."""
    if fuse:
        monkeypatch.setattr(trimul_fused, "MIN_PAIR_ROWS", 0)
    x, mask, p = make((2,), 6, 8, 4)
    cases = [
        (x.transpose(1, 2), mask.transpose(1, 2)),
        (x.flip(0)[:, ::2, ::2], mask[:, ::2, ::2]),
        (x[:1].expand(3, -1, -1, -1), mask[:1, :1].expand(3, 6, 6)),
        (x[:, :1, :1].expand(-1, 4, 4, -1), None),
        (x.movedim(-1, 0).contiguous().movedim(0, -1), mask),
    ]
    with torch.no_grad():
        for pair, m in cases:
            torch.testing.assert_close(update(pair, "outgoing", m, **p), expected(pair, "outgoing", m, p))
        for shape in ((1, 0, 0, 8), (0, 5, 5, 8), (2, 0, 3, 3, 8)):
            assert update(x.new_zeros(shape), **p).shape == shape


def test_a_mask_of_zeros_gives_the_formulas_finite_answer() -> None:
    """With every pair masked, t is zero, its LayerNorm is its bias, and the output is finite."""
    x, mask, p = make((1,), 5)
    out = update(x, "outgoing", mask * 0, **p)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, expected(x, "outgoing", mask * 0, p))


def test_missing_weights_are_fresh_lecun_normals() -> None:
    """None weights are drawn anew each call: standard deviation fan_in**-0.5, cut at two of the normal's own."""
    x, _, p = make((1,), 6, 64, 64)
    torch.manual_seed(0)
    first, second = update(x), update(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, update(x))
    weight = trimul_arguments.lecun_truncated_normal((400, 64), dtype=torch.float64, device=torch.device("cpu"))
    assert abs(float(weight.std()) * 8 - 1) < 0.02
    assert float(weight.abs().max()) <= 2 / 8 / trimul_arguments.TRUNCATED_NORMAL_STD + 1e-6
    assert update(x, p_in_weight=p["p_in_weight"][:20]).shape == x.shape


def test_hidden_width_comes_from_the_first_weight_that_is_given() -> None:
    """D: p_in, else g_in, else norm_out, else p_out, else C."""
    x, _, p = make((1,), 4, 8, 12)
    for name in ("p_in_weight", "g_in_weight", "norm_out_weight", "p_out_weight"):
        call = trimul_arguments.Arguments(
            **{n: p.get(n) if n == name else None for n in trimul_arguments.PARAMETERS},
            x=x, direction="outgoing", mask=None, eps=1e-5, precision=None,
        )  # fmt: skip
        assert call.D == 12 and trimul_arguments.fill(call).p_in_weight.shape == (24, 8)
        assert update(x, **{name: p[name]}).shape == x.shape


@pytest.mark.parametrize("rows", [8, 190])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_input_twice_gives_the_same_bits(rows: int, dtype: torch.dtype) -> None:
    """Formula and fused route are deterministic."""
    x, mask, p = make((), rows, 8, 8, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(update(x, "incoming", mask, **p), update(x, "incoming", mask, **p))


def test_module_has_the_fields_parameter_names_and_calls_the_op() -> None:
    """state_dict keys are the field's; forward equals the op; a fresh module's update is zero."""
    module = kf_runtime.TriangleMultiplicativeUpdate(8, 12, "incoming", bias=True, dtype=torch.float64)
    parts = ("norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out")
    assert set(module.state_dict()) == {f"{part}.{leaf}" for part in parts for leaf in ("weight", "bias")}
    x, mask, p = make(names=(*NORMS, *WEIGHTS, *BIASES))
    assert torch.equal(module(x, mask), torch.zeros_like(x))
    module.load_state_dict({name.replace("_weight", ".weight").replace("_bias", ".bias"): v for name, v in p.items()})
    torch.testing.assert_close(module(x, mask), expected(x, "incoming", mask, p))
    assert "p_in.bias" not in kf_runtime.TriangleMultiplicativeUpdate(8).state_dict()
