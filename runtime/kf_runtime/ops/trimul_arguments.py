"""Arguments of triangle_multiplicative_update: the record, its checks, and what a None stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final, Literal

import torch
from torch import Tensor

from kf_runtime.cell import DIRECTIONS
from kf_runtime.errors import ArgumentError
from kf_runtime.untraced import untraced

#: A unit normal cut off at two standard deviations has this standard deviation (LeCun initialisation divides by it).
TRUNCATED_NORMAL_STD: Final = 0.8796256610342398
#: The share of a normal within two standard deviations: erf(2**0.5).
TWO_SIGMA: Final = 0.9544997361036416


class TriMulPrecision(IntEnum):
    """How float32 matrix products are computed; products of 16-bit operands are the same under all of them."""

    NONE = -1
    DEFAULT = 0
    TF32 = 1
    TF32x3 = 2
    IEEE = 3


Precision = TriMulPrecision | Literal["bfloat16"] | None


def is_precision(value: object) -> bool:
    """Whether ``value`` is a TriMulPrecision, ours or another package's of the same values."""
    return isinstance(value, IntEnum) and type(value).__name__ == "TriMulPrecision" and -1 <= value <= 3


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """One call: pair ``[*, N, N, C]``, mask ``[*, N, N]`` or None, and the parameters by their public names."""

    x: Tensor
    direction: str
    mask: Tensor | None
    norm_in_weight: Tensor | None
    norm_in_bias: Tensor | None
    p_in_weight: Tensor | None
    p_in_bias: Tensor | None
    g_in_weight: Tensor | None
    g_in_bias: Tensor | None
    norm_out_weight: Tensor | None
    norm_out_bias: Tensor | None
    p_out_weight: Tensor | None
    p_out_bias: Tensor | None
    g_out_weight: Tensor | None
    g_out_bias: Tensor | None
    eps: float
    precision: Precision

    @property
    def C(self) -> int:
        """Pair width."""
        return self.x.shape[-1]

    @property
    def D(self) -> int:
        """Hidden width, from the first of p_in, g_in, norm_out and p_out that is given; else C."""
        for weight in (self.p_in_weight, self.g_in_weight):
            if weight is not None:
                return weight.shape[0] // 2
        if self.norm_out_weight is not None:
            return self.norm_out_weight.shape[0]
        if self.p_out_weight is not None:
            return self.p_out_weight.shape[1]
        return self.C

    def parameters(self) -> dict[str, Tensor | None]:
        """The parameters by name, in the public order."""
        return {name: getattr(self, name) for name in PARAMETERS}

    def tensors(self) -> list[Tensor]:
        """Every tensor of the call: x, the mask, and the parameters that are given."""
        return [tensor for tensor in _every_tensor(self) if tensor is not None]

    def given(self) -> dict[str, Tensor]:
        """The parameters that are not None."""
        return {name: value for name, value in self.parameters().items() if value is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor | None]) -> Arguments:
        """The call with other tensors under their names."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)


PARAMETERS: Final = (
    "norm_in_weight",
    "norm_in_bias",
    "p_in_weight",
    "p_in_bias",
    "g_in_weight",
    "g_in_bias",
    "norm_out_weight",
    "norm_out_bias",
    "p_out_weight",
    "p_out_bias",
    "g_out_weight",
    "g_out_bias",
)
_every_tensor: Final = attrgetter("x", "mask", *PARAMETERS)


@untraced
def check(call: Arguments) -> None:
    """Raises ArgumentError for the first argument outside its domain."""
    _check_options(call)
    _check_pair(call)
    _check_width(call)
    _check_parameters(call)


def _check_options(call: Arguments) -> None:
    if call.direction not in DIRECTIONS:
        raise ArgumentError("direction", expected="'outgoing' or 'incoming'", found=repr(call.direction))
    precision = call.precision
    if not (precision is None or precision == "bfloat16" or is_precision(precision)):
        expected = "None, a TriMulPrecision or 'bfloat16'"
        raise ArgumentError("precision", expected=expected, found=repr(precision))
    if not (isinstance(call.eps, (int, float)) and call.eps >= 0):
        raise ArgumentError("eps", expected="a number of at least 0", found=repr(call.eps))


def _check_pair(call: Arguments) -> None:
    x, mask = call.x, call.mask
    if not isinstance(x, Tensor):
        raise ArgumentError("x", expected="a tensor of shape [*, N, N, C]", found=type(x).__name__)
    check_dense("x", x)
    if x.dim() < 3 or x.shape[-2] != x.shape[-3]:
        raise ArgumentError("x", expected="shape [*, N, N, C]", found=f"shape {list(x.shape)}")
    if x.shape[-1] < 1:
        raise ArgumentError("x", expected="at least one channel", found=f"shape {list(x.shape)}")
    if not x.is_floating_point():
        raise ArgumentError("x", expected="a floating-point dtype", found=x.dtype)
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ArgumentError("mask", expected="a tensor of shape [*, N, N] or None", found=type(mask).__name__)
    check_dense("mask", mask)
    if mask.shape != x.shape[:-1]:
        raise ArgumentError("mask", expected=f"shape {list(x.shape[:-1])}", found=f"shape {list(mask.shape)}")
    if mask.is_complex():
        raise ArgumentError("mask", expected="a real or boolean dtype", found=mask.dtype)
    if mask.device != x.device:
        raise ArgumentError("mask", expected=f"a tensor on {x.device}, as x", found=f"one on {mask.device}")


def check_dense(name: str, value: object) -> None:
    """No sparse, MKL-DNN or nested tensor: the formula has no answer for most of those, and a kernel for none."""
    if not isinstance(value, Tensor):
        raise ArgumentError(name, expected="a tensor", found=type(value).__name__)
    if value.layout is not torch.strided or value.is_nested:
        found = "a nested tensor" if value.is_nested else value.layout
        raise ArgumentError(name, expected="a dense tensor (torch.strided)", found=found)


def address_of(name: str, value: Tensor) -> int:
    """The address of a dense tensor; 0 for one without elements, and for a placeholder (a ZeroTensor, for one).

    Raises ArgumentError where the memory was taken away, which torch's own operations do not notice.
    """
    address = value.data_ptr()
    if address == 0 and value.numel() and not (value._is_zerotensor() or torch._is_functional_tensor(value)):
        raise ArgumentError(name, expected="a tensor with memory", found="one whose storage was freed")
    return address


def _check_width(call: Arguments) -> None:
    """D is read from the shape of a weight: the weights come first."""
    for name in ("p_in_weight", "g_in_weight", "norm_out_weight", "p_out_weight"):
        value = getattr(call, name)
        if value is None:
            continue
        rank = 1 if name == "norm_out_weight" else 2
        if not isinstance(value, Tensor):
            raise ArgumentError(name, expected="a tensor or None", found=type(value).__name__)
        if value.dim() != rank:
            raise ArgumentError(name, expected=f"{rank} dimension(s)", found=f"shape {list(value.shape)}")
        if name in ("p_in_weight", "g_in_weight") and (value.shape[0] % 2 or value.shape[0] < 2):
            raise ArgumentError(name, expected="shape [2D, C]", found=f"shape {list(value.shape)}")


def _check_parameters(call: Arguments) -> None:
    """Shape, device and dtype of every parameter that is given."""
    x, C, D = call.x, call.C, call.D
    device, own = x.device, x.dtype
    dtype: torch.dtype | None = None
    for name, shape in shapes(C, D).items():
        value = getattr(call, name)
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise ArgumentError(name, expected="a tensor or None", found=type(value).__name__)
        if value.shape != shape:
            expected = f"shape {list(shape)} (C = {C}, D = {D})"
            raise ArgumentError(name, expected=expected, found=f"shape {list(value.shape)}")
        if value.device != device:
            raise ArgumentError(name, expected=f"a tensor on {device}, as x", found=f"one on {value.device}")
        if value.dtype is dtype:
            continue
        if value.dtype not in (own, torch.float32):
            raise ArgumentError(name, expected=f"dtype {own} (as x) or torch.float32", found=value.dtype)
        if dtype is not None:
            raise ArgumentError(name, expected=f"dtype {dtype}, as the parameters before it", found=value.dtype)
        dtype = value.dtype


def shapes(C: int, D: int) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter."""
    return {
        "norm_in_weight": (C,),
        "norm_in_bias": (C,),
        "p_in_weight": (2 * D, C),
        "p_in_bias": (2 * D,),
        "g_in_weight": (2 * D, C),
        "g_in_bias": (2 * D,),
        "norm_out_weight": (D,),
        "norm_out_bias": (D,),
        "p_out_weight": (C, D),
        "p_out_bias": (C,),
        "g_out_weight": (C, C),
        "g_out_bias": (C,),
    }


def fill(call: Arguments) -> Arguments:
    """The call with a fresh LeCun truncated normal (fan-in) for each p or g weight that is None.

    The fresh weights take the dtype of the other parameters, or x's where there are none.
    """
    missing = [name for name in PARAMETERS if name[:2] in ("p_", "g_") and name.endswith("weight")]
    missing = [name for name in missing if getattr(call, name) is None]
    if not missing:
        return call
    dtype = next((value.dtype for value in call.given().values()), call.x.dtype)
    sizes = shapes(call.C, call.D)
    fresh = {name: lecun_truncated_normal(sizes[name], dtype=dtype, device=call.x.device) for name in missing}
    return call.with_tensors(fresh)


def lecun_truncated_normal(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight ``[fan_out, fan_in]`` of standard deviation fan_in**-0.5, cut off at two of the normal's own.

    By the inverse of the normal's distribution: no branch on data, so that it can be traced and never waits.
    """
    std = shape[1] ** -0.5 / TRUNCATED_NORMAL_STD
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    uniform = torch.rand(shape, dtype=wide, device=device)
    weight: Tensor = torch.erfinv((2 * uniform - 1) * TWO_SIGMA) * (std * 2**0.5)
    return weight.to(dtype)
