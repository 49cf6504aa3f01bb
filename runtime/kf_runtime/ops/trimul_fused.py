"""The fused generic route: the same formula for large eager no-grad calls, with bounded scratch.

Blocks of pair rows go through LayerNorm and one projection GEMM whose output is channel-first, so
the contraction's operands are contiguous without a transpose. The contraction runs in blocks of
channels and writes over its left operand; the right one is gone before the output is allocated.
Scratch is a and b (``2 D N N`` elements for a block of batches) and one block (see ``_block``).
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
#: The same on the CPU, where no launches count: with C = D = 128 it is 5 to 20 % faster than the formula from
#: N = 32 on (tools/bench/pytorch.py, one thread of an AVX-512 machine).
MIN_PAIR_ROWS_CPU: Final = 2**10
#: Elements of the widest temporary of one block, at least; and into how many blocks a larger call is cut.
BLOCK_ELEMENTS: Final = 2**20
BLOCKS: Final = 32
#: Elements of a and b, above which batches are taken one after another.
BATCH_ELEMENTS: Final = 2**27


def applies(call: Arguments) -> bool:
    """Whether an eager no-grad call takes this route. Float16 stays with the formula, which scales its contraction."""
    least = MIN_PAIR_ROWS_CPU if call.x.is_cpu else MIN_PAIR_ROWS
    return call.x.numel() // call.C >= least and numerics(call).product != torch.float16


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
    projection = torch.cat((weight_of(cast.p_in_weight), weight_of(cast.g_in_weight)))
    parts = list(_blocks(B, N * N * 2 * call.D, BATCH_ELEMENTS))
    out = None if len(parts) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for batches in parts:
        t = _contracted(x[batches], None if mask is None else mask[batches], projection, cast, kind)
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _finalize(x[batches], t, cast, kind, out[batches])
    assert out is not None, "a call of this route has at least one batch"
    return out.view(call.x.shape)


def _contracted(x: Tensor, mask: Tensor | None, projection: Tensor, call: Arguments, kind: Numerics) -> Tensor:
    """t ``[D, B, N, N]``, written over a."""
    B, N, _, C = x.shape
    D = call.D
    bias = fused_bias(weight_of(call.p_in_weight), call.p_in_bias, call.g_in_bias)
    a, b = (torch.empty((D, B, N, N), dtype=kind.product, device=x.device) for _ in range(2))
    for rows in _blocks(N, B * N * 4 * D, _block(x, 4 * D)):
        h = _normalised(x[:, rows], call, kind)
        both = projection @ h.reshape(-1, C).T
        del h
        if bias is not None:
            both += bias[:, None]
        gate = both[2 * D :].sigmoid_()
        if mask is not None:
            gate *= mask[:, rows].reshape(-1)
        for half, target in enumerate((a, b)):
            part = slice(half * D, half * D + D)
            torch.mul(both[part].view(D, B, -1, N), gate[part].view(D, B, -1, N), out=target[:, :, rows])
    for channels in _blocks(D, a[0].numel(), _block(x, D)):
        a[channels] = contract_channels(a[channels], b[channels], call.direction)
    return a


def _finalize(x: Tensor, t: Tensor, call: Arguments, kind: Numerics, out: Tensor) -> None:
    """LayerNorm over D, output projection and gate, into ``out [B, N, N, C]``."""
    B, N = x.shape[:2]
    p, g = weight_of(call.p_out_weight), weight_of(call.g_out_weight)
    for rows in _blocks(N, B * N * (call.C + call.D), _block(x, call.C + call.D)):
        u = t[:, :, rows].movedim(0, -1).to(kind.norm)
        u = layer_norm(u, call.norm_out_weight, call.norm_out_bias, call.eps).to(kind.product)
        value = F.linear(u, p, call.p_out_bias)
        del u
        gate = F.linear(_normalised(x[:, rows], call, kind), g, call.g_out_bias).sigmoid_()
        if out.dtype == gate.dtype:
            torch.mul(gate, value, out=out[:, rows])
        else:
            out[:, rows] = gate.mul_(value)


def _normalised(x: Tensor, call: Arguments, kind: Numerics) -> Tensor:
    return layer_norm(x.to(kind.norm), call.norm_in_weight, call.norm_in_bias, call.eps).to(kind.product)


def _block(x: Tensor, width: int) -> int:
    """Elements of one block: few enough to stay small beside a and b, enough to fill the device."""
    return max(BLOCK_ELEMENTS, x.numel() // x.shape[-1] * width // BLOCKS)


def _blocks(extent: int, elements: int, size: int) -> Iterator[slice]:
    """Slices of ``extent`` items of ``elements`` elements each, about ``size`` elements a slice."""
    step = max(1, size // max(1, elements))
    for start in range(0, extent, step):
        yield slice(start, start + step)
