"""The fused generic route: the same formula for large eager no-grad calls, with bounded scratch.

Blocks of pair rows go through LayerNorm and one projection GEMM whose output is channel-first, so
the contraction's operands are contiguous without a transpose. The contraction runs in blocks of
channels and writes over its left operand. Beside a and b (the size of ``2 D N N`` for a block of
batches) and the output, scratch stays near ``BLOCK_ELEMENTS`` elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kf_runtime.ops.trimul_arguments import Arguments
from kf_runtime.ops.trimul_formula import (
    Numerics,
    autocast_on,
    contract_channels,
    fused_bias,
    layer_norm,
    numerics,
    rounded,
    weight_of,
)

#: From this many pair rows (B N N) on, eager no-grad calls take this route.
MIN_PAIR_ROWS: Final = 2**15
#: Elements of the widest temporary of one block.
BLOCK_ELEMENTS: Final = 2**25


def applies(call: Arguments) -> bool:
    """Whether an eager no-grad call takes this route. Float16 stays with the formula, which scales its contraction."""
    return call.x.numel() // call.C >= MIN_PAIR_ROWS and numerics(call).product != torch.float16


def fused(call: Arguments) -> Tensor:
    """The update of a call for which ``applies`` is true; the result has x's shape and dtype."""
    kind = numerics(call)
    if not autocast_on(call.x.device.type):
        return _fused(call, kind)
    with torch.autocast(call.x.device.type, enabled=False):
        return _fused(call, kind)


def _fused(call: Arguments, kind: Numerics) -> Tensor:
    cast = rounded(call, kind)
    N, C = call.x.shape[-2], call.C
    B = prod(call.x.shape[:-3])
    x = call.x.reshape(B, N, N, C)
    mask = None if cast.mask is None else cast.mask.reshape(B, N, N)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    projection = torch.cat((weight_of(cast.p_in_weight), weight_of(cast.g_in_weight)))
    for batches in _blocks(B, N * N * 4 * call.D):
        ab = _project(x[batches], None if mask is None else mask[batches], projection, cast, kind)
        t = _contract_in_place(ab, call.direction)
        _finalize(x[batches], t, cast, kind, out[batches])
    return out.view(call.x.shape)


def _project(x: Tensor, mask: Tensor | None, projection: Tensor, call: Arguments, kind: Numerics) -> Tensor:
    """a and b, channel-first: ``[2D, B, N, N]``."""
    B, N, _, C = x.shape
    D = call.D
    bias = fused_bias(call)
    ab = torch.empty((2 * D, B, N, N), dtype=kind.product, device=x.device)
    for rows in _blocks(N, B * N * 4 * D):
        h = _normalised(x[:, rows], call, kind)
        both = projection @ h.reshape(-1, C).T
        if bias is not None:
            both += bias[:, None]
        gated = torch.sigmoid_(both[2 * D :]).mul_(both[: 2 * D])
        if mask is not None:
            gated *= mask[:, rows].reshape(-1)
        ab[:, :, rows] = gated.view(2 * D, B, -1, N)
    return ab


def _contract_in_place(ab: Tensor, direction: str) -> Tensor:
    """t ``[D, B, N, N]``, written over a."""
    a, b = ab.chunk(2)
    for channels in _blocks(a.shape[0], a[0].numel()):
        a[channels] = contract_channels(a[channels], b[channels], direction)
    return a


def _finalize(x: Tensor, t: Tensor, call: Arguments, kind: Numerics, out: Tensor) -> None:
    """LayerNorm over D, output projection and gate, into ``out [B, N, N, C]``."""
    B, N = x.shape[:2]
    for rows in _blocks(N, B * N * (call.C + call.D)):
        u = t[:, :, rows].movedim(0, -1).to(kind.norm)
        u = layer_norm(u, call.norm_out_weight, call.norm_out_bias, call.eps).to(kind.product)
        value = F.linear(u, weight_of(call.p_out_weight), call.p_out_bias)
        gate = torch.sigmoid_(
            F.linear(_normalised(x[:, rows], call, kind), weight_of(call.g_out_weight), call.g_out_bias)
        )
        out[:, rows] = gate.mul_(value)


def _normalised(x: Tensor, call: Arguments, kind: Numerics) -> Tensor:
    return layer_norm(x.to(kind.norm), call.norm_in_weight, call.norm_in_bias, call.eps).to(kind.product)


def _blocks(extent: int, elements: int) -> Iterator[slice]:
    """Slices of ``extent`` items of ``elements`` elements each, about BLOCK_ELEMENTS a slice."""
    step = max(1, BLOCK_ELEMENTS // max(1, elements))
    for start in range(0, extent, step):
        yield slice(start, start + step)
