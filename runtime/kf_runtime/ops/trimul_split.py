"""triangle_multiplicative_update_split_parameters: the op with separate a and b projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kf_runtime.errors import ArgumentError
from kf_runtime.ops.triangle_multiplicative_update import triangle_multiplicative_update
from kf_runtime.ops.trimul_arguments import Precision
from kf_runtime.ops.trimul_formula import autocast_on


def triangle_multiplicative_update_split_parameters(
    x: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    *,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    a_p_weight: Tensor,
    a_p_bias: Tensor | None = None,
    a_g_weight: Tensor,
    a_g_bias: Tensor | None = None,
    b_p_weight: Tensor,
    b_p_bias: Tensor | None = None,
    b_g_weight: Tensor,
    b_g_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: Precision = None,
) -> Tensor:
    """``triangle_multiplicative_update`` with the projections of a and b apart: weights ``[D, C]``, biases ``[D]``.

    The halves are joined by torch at each call (no copy is kept), so gradients reach each of them and
    inference may use KF. Raises ArgumentError where the halves differ in shape, dtype or device, or
    only one of a pair of biases is given.
    """
    joined = {
        "p_in_weight": _join("a_p_weight", a_p_weight, "b_p_weight", b_p_weight),
        "p_in_bias": _join("a_p_bias", a_p_bias, "b_p_bias", b_p_bias),
        "g_in_weight": _join("a_g_weight", a_g_weight, "b_g_weight", b_g_weight),
        "g_in_bias": _join("a_g_bias", a_g_bias, "b_g_bias", b_g_bias),
    }
    return triangle_multiplicative_update(
        x, direction, mask, norm_in_weight, norm_in_bias, joined["p_in_weight"], joined["p_in_bias"],
        joined["g_in_weight"], joined["g_in_bias"], norm_out_weight, norm_out_bias, p_out_weight, p_out_bias,
        g_out_weight, g_out_bias, eps, precision,
    )  # fmt: skip


def _join(a_name: str, a: Tensor | None, b_name: str, b: Tensor | None) -> Tensor | None:
    if a is None and b is None:
        return None
    if a is None or b is None:
        missing, given = (a_name, b_name) if a is None else (b_name, a_name)
        raise ArgumentError(missing, expected=f"a tensor, as {given}", found=None)
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        expected = f"shape {list(a.shape)}, {a.dtype} on {a.device}, as {a_name}"
        raise ArgumentError(b_name, expected=expected, found=f"shape {list(b.shape)}, {b.dtype} on {b.device}")
    return concatenated((a, b))


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another, in their own dtype: autocast of float16 refuses to join BF16, and the reverse."""
    kind = parts[0].device.type
    if not autocast_on(kind):
        return torch.cat(tuple(parts))
    with torch.autocast(kind, enabled=False):
        return torch.cat(tuple(parts))
