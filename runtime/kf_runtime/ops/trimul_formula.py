"""The plain formula of triangle_multiplicative_update: any dtype, differentiable twice, traceable.

In float64 it is the oracle that kernels are measured against. Source: AlphaFold 2 supplement,
algorithms 11 and 12, in the arrangement of ``cuequivariance_torch`` 0.13 (the gate reads the
normalised pair, the mask multiplies both operands, a and b are concatenated).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kf_runtime.ops.trimul_arguments import PARAMETERS, Arguments

#: Largest magnitude that a float16 contraction may reach; the format ends at 65504.
HALF_RANGE: Final = 32768.0
#: Kinds of devices that have autocast, asked once: Dynamo of torch 2.11 cannot trace the question.
AUTOCAST_DEVICES: Final = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu", "mtia")))


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """In which dtypes a call computes: the LayerNorms' and the matrix products'."""

    norm: torch.dtype
    product: torch.dtype


def numerics(call: Arguments) -> Numerics:
    """The dtypes of a call, autocast and mixed parameters considered.

    Under autocast of x's device (and no "bfloat16"): LayerNorms in float32 at least, products in the
    autocast dtype, float64 left alone. Otherwise the wider of x and the parameters, throughout.
    """
    x = call.x
    if call.precision == "bfloat16":
        return Numerics(norm=torch.bfloat16, product=torch.bfloat16)
    if x.dtype != torch.float64 and autocast_on(x.device.type):
        return Numerics(norm=torch.float32, product=torch.get_autocast_dtype(x.device.type))
    wide = x.dtype
    for parameter in call.given().values():
        wide = torch.promote_types(wide, parameter.dtype)
    return Numerics(norm=wide, product=wide)


def rounded(call: Arguments, kind: Numerics) -> Arguments:
    """The call with its mask and parameters in the dtypes that it computes in; differentiable. x stays as it is."""
    norms = {name: kind.norm if name.startswith("norm") else kind.product for name in PARAMETERS}
    cast = {name: value.to(norms[name]) for name, value in call.given().items()}
    mask = None if call.mask is None else call.mask.to(kind.product)
    return call.with_tensors({"mask": mask, **cast})


def formula(call: Arguments) -> Tensor:
    """``sigmoid(h g_out) * (LayerNorm(t) p_out)`` with every weight given; the result has x's shape and dtype.

    Projections of a and b in eager mode: one product for both without grad, one for values and one for gates with
    it. The same for one operand at a time under torch.compile, which frees the projections of a before those of b
    are made: 5 pair tensors at the peak instead of 7 without grad, in the same time.
    """
    kind = numerics(call)
    if not autocast_on(call.x.device.type):
        return _formula(call, kind)
    with torch.autocast(call.x.device.type, enabled=False):
        return _formula(call, kind)


def autocast_on(device_type: str) -> bool:
    """Whether autocast is on for this kind of device; False for kinds that have none (meta)."""
    return device_type in AUTOCAST_DEVICES and torch.is_autocast_enabled(device_type)


def _formula(call: Arguments, kind: Numerics) -> Tensor:
    cast = rounded(call, kind)
    h = layer_norm(call.x.to(kind.norm), cast.norm_in_weight, cast.norm_in_bias, call.eps).to(kind.product)
    a, b = _gated_operands(h, cast)
    t = _contract(a, b, call.direction)
    u = layer_norm(t.movedim(-3, -1).to(_at_least(kind.norm, t.dtype)), *_norm_out(cast, t.dtype), call.eps)
    value = F.linear(u.to(kind.product), weight_of(cast.p_out_weight), cast.p_out_bias)
    gate = torch.sigmoid(F.linear(h, weight_of(cast.g_out_weight), cast.g_out_bias))
    return (gate * value).to(call.x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension; statistics in float32 at least."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _gated_operands(h: Tensor, call: Arguments) -> tuple[Tensor, Tensor]:
    """a and b, ``[*, N, N, D]`` each: sigmoid(h g_in) * (h p_in) * mask."""
    p, g, D = weight_of(call.p_in_weight), weight_of(call.g_in_weight), call.D
    if torch.compiler.is_compiling():
        a = _gated(h, p[:D], _part(call.p_in_bias, 0, D), g[:D], _part(call.g_in_bias, 0, D))
        b = _gated(h, p[D:], _part(call.p_in_bias, D, 2 * D), g[D:], _part(call.g_in_bias, D, 2 * D))
    else:
        a, b = torch.chunk(_gated(h, p, call.p_in_bias, g, call.g_in_bias), 2, dim=-1)
    if call.mask is not None:
        mask = call.mask.unsqueeze(-1)
        a, b = a * mask, b * mask
    return a, b


def _gated(h: Tensor, p: Tensor, p_bias: Tensor | None, g: Tensor, g_bias: Tensor | None) -> Tensor:
    """sigmoid(h g) * (h p): one product without grad; two with it, so that no gradient of a slice is put together."""
    if torch.is_grad_enabled():
        return torch.sigmoid(F.linear(h, g, g_bias)) * F.linear(h, p, p_bias)
    value, logit = torch.chunk(F.linear(h, torch.cat((p, g)), fused_bias(p, p_bias, g_bias)), 2, dim=-1)
    return torch.sigmoid(logit) * value


def _part(bias: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if bias is None else bias[start:end]


def fused_bias(p: Tensor, p_bias: Tensor | None, g_bias: Tensor | None) -> Tensor | None:
    """The biases of the fused projection with value weights p, value then gate; None where there is none."""
    if p_bias is None and g_bias is None:
        return None
    zeros = p.new_zeros(p.shape[0])
    return torch.cat((zeros if p_bias is None else p_bias, zeros if g_bias is None else g_bias))


def _contract(a: Tensor, b: Tensor, direction: str) -> Tensor:
    """t ``[*, D, N, N]``: sum over k of a_ik b_jk (outgoing) or a_ki b_kj (incoming)."""
    if a.dtype == torch.float16 and a.numel():
        return _contract_half(a, b, direction)
    return contract_channels(a.movedim(-1, -3).contiguous(), b.movedim(-1, -3).contiguous(), direction)


def contract_channels(a: Tensor, b: Tensor, direction: str) -> Tensor:
    """The same, from operands that are channel-first ``[*, D, N, N]`` already."""
    return torch.matmul(a, b.mT) if direction == "outgoing" else torch.matmul(a.mT, b)


def _contract_half(a: Tensor, b: Tensor, direction: str) -> Tensor:
    """A float16 contraction that cannot overflow: scaled by powers of the operands' ranges, unscaled in float32.

    LayerNorm would remove the scale up to eps; unscaling before it keeps eps exact.
    """
    limit = (HALF_RANGE / a.shape[-2]) ** 0.5
    wide = torch.float32
    scale_a = limit / a.detach().abs().amax().to(wide).clamp_min(1e-7)
    scale_b = limit / b.detach().abs().amax().to(wide).clamp_min(1e-7)
    a = (a.to(wide) * scale_a).to(a.dtype).movedim(-1, -3).contiguous()
    b = (b.to(wide) * scale_b).to(b.dtype).movedim(-1, -3).contiguous()
    t: Tensor = contract_channels(a, b, direction).to(wide) / (scale_a * scale_b)
    return t


def _norm_out(call: Arguments, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The middle LayerNorm's parameters, widened to float32 where t is."""
    weight, bias = call.norm_out_weight, call.norm_out_bias
    widened = [None if v is None else v.to(_at_least(v.dtype, dtype)) for v in (weight, bias)]
    return widened[0], widened[1]


def _at_least(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The wider of two dtypes where ``other`` is float32 (an unscaled float16 contraction); else ``dtype``."""
    return torch.promote_types(dtype, other) if other == torch.float32 else dtype


def weight_of(value: Tensor | None) -> Tensor:
    """A weight that ``fill`` has made sure of."""
    assert value is not None, "fill() gives every p and g weight"
    return value
