"""Shape queries: would a call of this shape run a kernel here? From metadata alone, before tensors exist."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch

from kf_runtime import dispatch, route
from kf_runtime.campaign import Mode
from kf_runtime.cell import DIRECTIONS, Cell
from kf_runtime.errors import ArgumentError, Unavailable
from kf_runtime.ops import trimul_kf
from kf_runtime.route import Generic, Reason, Route

_PARAMETERS: Final = {torch.bfloat16: "bf16", torch.float32: "f32"}


def triangle_multiplicative_update_inference_shape_is_supported(
    shape: Sequence[int],
    hidden_dim: int,
    direction: str = "outgoing",
    *,
    dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype | None = None,
    has_mask: bool = True,
    has_bias: bool = False,
    device: torch.device | str | int | None = None,
) -> bool:
    """Whether a no-grad call with a pair of this ``shape [*, N, N, C]`` and hidden width D would run a kernel.

    Assumes dense, aligned tensors, every weight given, eps 1e-5 and no precision asked for. ``param_dtype``
    defaults to ``dtype``; ``device`` is where the tensors will be (a number, or by default: that CUDA device, the
    current one). ``shape_route`` gives the reason. Raises ArgumentError for a shape that is no pair.
    """
    found = shape_route(
        shape, hidden_dim, direction, dtype=dtype, param_dtype=param_dtype, has_mask=has_mask, has_bias=has_bias,
        device=device,
    )  # fmt: skip
    return not isinstance(found, Generic)


def prepare_triangle_multiplicative_update_training(
    shape: Sequence[int],
    hidden_dim: int,
    direction: str = "outgoing",
    *,
    dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype | None = None,
    has_mask: bool = True,
    has_bias: bool = False,
    device: torch.device | str | int | None = None,
) -> dict[str, str]:
    """Who would run a training step of this shape: ``{"owner": "kf" or "generic", "reason": ...}``.

    Until a KF backward exists the owner is "generic".
    """
    _check_shape(shape, hidden_dim, direction)
    return {"owner": "generic", "reason": str(trimul_kf.GRAD.reason)}


def shape_route(
    shape: Sequence[int],
    hidden_dim: int,
    direction: str,
    *,
    dtype: torch.dtype,
    param_dtype: torch.dtype | None,
    has_mask: bool,
    has_bias: bool,
    device: torch.device | str | int | None,
) -> Route:
    """The Route behind ``..._shape_is_supported``, with its reason."""
    _check_shape(shape, hidden_dim, direction)
    current = dispatch.current()
    if current.mode is Mode.OFF:
        return dispatch.OFF
    parameters = _PARAMETERS.get(param_dtype or dtype)
    if dtype != torch.bfloat16 or parameters is None:
        text = f"expected a BF16 pair with BF16 or float32 parameters; found {dtype} with {param_dtype or dtype}"
        return Generic(reason=Reason(code="dtype", text=text))
    if prod(shape) == 0:
        return Generic(reason=Reason(code="empty", text=f"no elements: shape {list(shape)}"))
    try:
        system = current.system_of(dispatch.place(device))
        if isinstance(system, Generic):
            return system
        cell = Cell(
            op=trimul_kf.OP, param_dtype=parameters, B=prod(shape[:-3]), N=shape[-2], C=shape[-1], D=hidden_dim,
            direction=direction, mask=has_mask, biases=has_bias, sm=system.sm,
        )  # fmt: skip
        return current.decide_cell(cell, system)
    except Unavailable as error:
        return route.unavailable(error)


def _check_shape(shape: Sequence[int], hidden_dim: int, direction: str) -> None:
    if not all(map(_is_integer, shape)) or len(shape) < 3 or shape[-2] != shape[-3] or min(shape) < 0:
        raise ArgumentError("shape", expected="[*, N, N, C], all integers", found=list(shape))
    if not _is_integer(hidden_dim) or hidden_dim < 1:
        raise ArgumentError("hidden_dim", expected="at least 1", found=hidden_dim)
    if direction not in DIRECTIONS:
        raise ArgumentError("direction", expected="'outgoing' or 'incoming'", found=repr(direction))


def _is_integer(value: object) -> bool:
    return hasattr(value, "__index__")
