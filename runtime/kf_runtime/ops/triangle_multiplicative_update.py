"""triangle_multiplicative_update: the public function, and the order of its paths.

A kernel where one is admitted; else the plain formula, or the fused generic route for large eager
no-grad calls. Names and meanings follow the Apache-2.0 frontend ``cuequivariance_torch`` 0.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kf_runtime import dispatch
from kf_runtime.ops import trimul_fused, trimul_hot, trimul_kf
from kf_runtime.ops.trimul_arguments import Arguments, Precision, TriMulPrecision, check, fill
from kf_runtime.ops.trimul_formula import formula
from kf_runtime.route import Generic
from kf_runtime.untraced import untraced


def triangle_multiplicative_update(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: Precision = None,
) -> Tensor:
    """The triangle multiplicative update of a pair representation (AlphaFold 2, algorithms 11 and 12).

    ::

        h    = LayerNorm_C(x; eps)
        ab   = sigmoid(h g_inᵀ + b) · (h p_inᵀ + b) · mask[..., None]
        a, b = ab[..., :D], ab[..., D:]
        t    = Σ_k a_ik b_jk  (outgoing)   or   Σ_k a_ki b_kj  (incoming)
        y    = sigmoid(h g_outᵀ + b) · (LayerNorm_D(t; eps) p_outᵀ + b)

    Args:
        x: pair ``[*, N, N, C]``, any number of leading dimensions, any strides, any floating dtype.
        direction: "outgoing" or "incoming".
        mask: ``[*, N, N]``, real or Boolean; multiplies a and b. None: no mask.
        norm_in_weight, norm_in_bias: ``[C]``. None: ones, zeros.
        p_in_weight, g_in_weight: ``[2D, C]``. None: a fresh LeCun truncated normal (fan-in) each call.
        p_in_bias, g_in_bias: ``[2D]``. None: no bias.
        norm_out_weight, norm_out_bias: ``[D]``. None: ones, zeros.
        p_out_weight: ``[C, D]``; g_out_weight: ``[C, C]``. None: as p_in_weight.
        p_out_bias, g_out_bias: ``[C]``. None: no bias.
        eps: added to the variance in both LayerNorms.
        precision: None, a TriMulPrecision, or "bfloat16": round x, the mask and every parameter to
            BF16 first, differentiably, and compute in BF16. TriMulPrecision chooses how eager CUDA
            products of float32 operands are computed: TF32; IEEE and TF32x3 in full float32; else
            torch's own setting. The backward follows torch's setting.

    Returns:
        ``[*, N, N, C]`` in x's dtype.

    The parameters share one dtype: x's, or float32. A 16-bit pair with float32 parameters computes
    in float32; where a kernel is admitted for such a call, and precision does not ask for float32
    products, it rounds the parameters to BF16, anew in each call. Under BF16 autocast (precision None
    or a TriMulPrecision) the LayerNorms read the pair in float32 and only the products use BF16. D is
    p_in_weight.shape[0] // 2; without it, it comes from g_in_weight, norm_out_weight or p_out_weight;
    else D = C.

    Raises:
        ArgumentError (a ValueError): names the argument, what was expected and what came.
        NotAdmitted, Unavailable: under CUEQ_TRIMUL_KF_CAMPAIGN=force, where no kernel runs.
        DriverError: a launch failed.
    """
    compiling = torch.compiler.is_dynamo_compiling()  # other tracers show in trimul_hot.traced()
    known: Tensor | Generic | None = None
    if not compiling:
        known = trimul_hot.replay(
            x,
            direction,
            mask,
            (norm_in_weight, norm_in_bias, p_in_weight, g_in_weight,
             norm_out_weight, norm_out_bias, p_out_weight, g_out_weight),
            (p_in_bias, g_in_bias, p_out_bias, g_out_bias),
            eps,
            precision,
        )  # fmt: skip
        if isinstance(known, Tensor):
            return known
    call = arguments(
        x, direction, mask, norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias,
        norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias, eps, precision,
    )  # fmt: skip
    if isinstance(known, Generic):
        dispatch.current().counters.generic(known.reason.code)
        return generic(call)
    check(call)
    if compiling:
        from kf_runtime.ops import trimul_compiled  # here: it needs torch._dynamo, which is loaded while Dynamo traces

        traced = trimul_compiled.compiled(call)
        return generic(call) if traced is None else traced
    answer = trimul_kf.attempt(call)
    return answer if isinstance(answer, Tensor) else generic(call)


@untraced
def arguments(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: Precision = None,
) -> Arguments:
    """The record of a call, from the public signature."""
    return Arguments(
        x=x, direction=direction, mask=mask, norm_in_weight=norm_in_weight, norm_in_bias=norm_in_bias,
        p_in_weight=p_in_weight, p_in_bias=p_in_bias, g_in_weight=g_in_weight, g_in_bias=g_in_bias,
        norm_out_weight=norm_out_weight, norm_out_bias=norm_out_bias, p_out_weight=p_out_weight,
        p_out_bias=p_out_bias, g_out_weight=g_out_weight, g_out_bias=g_out_bias, eps=eps, precision=precision,
    )  # fmt: skip


def generic_path(*args: Any, **kwargs: Any) -> Tensor:
    """The op without any kernel: the arguments, checks, result and errors of ``triangle_multiplicative_update``.

    For measurements and for proofs; nothing is counted in ``status()``.
    """
    call = arguments(*args, **kwargs)
    check(call)
    return generic(call)


@untraced
def generic(call: Arguments) -> Tensor:
    """The generic path of a checked call: the formula, or the fused route for large eager no-grad calls."""
    call = fill(call)
    if torch.compiler.is_dynamo_compiling():
        return formula(call)
    plain = not torch.is_grad_enabled() and not trimul_kf.traced(call.tensors())
    with _products(call):
        return trimul_fused.fused(call) if plain and trimul_fused.applies(call) else formula(call)


@contextmanager
def _products(call: Arguments) -> Iterator[None]:
    """Eager CUDA products of float32 operands as ``precision`` says; torch's own setting otherwise."""
    wanted = {TriMulPrecision.TF32: "tf32", TriMulPrecision.TF32x3: "ieee", TriMulPrecision.IEEE: "ieee"}
    choice = wanted.get(TriMulPrecision(call.precision)) if isinstance(call.precision, int) else None
    if choice is None or call.x.device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = choice
    try:
        yield
    finally:
        matmul.fp32_precision = before
