"""The rounding model of trimul_mma, and which elements each block of a launch writes.

The formula of the op with exactly the roundings to BF16 that the plan documents: h, a, b, t,
the output of the LayerNorm over D, and y. Everything between them is exact up to ``dtype``.
"""

from __future__ import annotations

import torch
from kf_runtime.cell import Cell

from kernel_factory.families.trimul_mma.plan import BLOCK, padded
from kernel_factory.family import Step

EPS = 1e-5
WRITES = {"project": "ab", "contract": "t", "finalize": "out"}
ROW_AXES = {"ab": 2, "t": 3, "out": 3}  # the axis along which one pair row of a buffer runs
_ROWS_AT_ONCE = 32  # rows of the pair that are projected together, which bounds the memory

Tensors = dict[str, torch.Tensor]
Owned = tuple[str, tuple[slice | int, ...]]


def model(cell: Cell, inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """Scratch and output buffers as the kernels should leave them, BF16, in the plan's layouts.

    ``ab`` [2, B, D, N, Np] (columns past N zero), ``t`` [B, D, N, N], ``out`` [B, N, N, C].
    """
    values = {name: value.to(dtype) for name, value in inputs.items()}
    a, b = _project(cell, values, padded(cell.N))
    t = _contract(cell, a[..., : cell.N].to(dtype), b[..., : cell.N].to(dtype))
    return {"ab": torch.stack((a, b)), "t": t, "out": _finalize(cell, values, t)}


def owned(cell: Cell, step: Step, block: tuple[int, int, int]) -> list[Owned]:
    """The regions that one block writes, each a buffer and an index (columns past N excluded)."""
    return _OWNED[step.spec.kernel](cell, step, block)


def _project_regions(cell: Cell, step: Step, block: tuple[int, int, int]) -> list[Owned]:
    x, _, batch = block
    spans = _spans(cell.N, padded(cell.N) // BLOCK, x, step.spec["warps"])
    return [("ab", (half, batch, slice(0, cell.D), row, columns)) for row, columns in spans for half in (0, 1)]


def _contract_regions(cell: Cell, step: Step, block: tuple[int, int, int]) -> list[Owned]:
    x, channel, batch = block
    m, n = divmod(x, -(-cell.N // step.spec["tile_n"]))
    rows, columns = _span(m, step.spec["tile_m"], cell.N), _span(n, step.spec["tile_n"], cell.N)
    return [("t", (batch, channel, rows, columns))]


def _finalize_regions(cell: Cell, step: Step, block: tuple[int, int, int]) -> list[Owned]:
    x, _, batch = block
    spans = _spans(cell.N, -(-cell.N // BLOCK), x, step.spec["warps"])
    return [("out", (batch, row, columns, slice(0, cell.C))) for row, columns in spans]


_OWNED = {"project": _project_regions, "contract": _contract_regions, "finalize": _finalize_regions}


def _spans(n: int, blocks_in_row: int, x: int, warps: int) -> list[tuple[int, slice]]:
    """Row and columns of each warp's block of positions; blocks past the pair, or past column N, have none."""
    blocks = range(x * warps, (x + 1) * warps)
    spans = [(block // blocks_in_row, _span(block % blocks_in_row, BLOCK, n)) for block in blocks]
    return [(row, columns) for row, columns in spans if row < n and columns.start < n]


def _span(index: int, size: int, n: int) -> slice:
    return slice(index * size, min((index + 1) * size, n))


def _round(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16)


def _normalised(value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """LayerNorm over the last axis, rounded to BF16 and widened again."""
    centred = value - value.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    return _round(centred * scale * weight + bias).to(value.dtype)


def _linear(value: torch.Tensor, values: Tensors, name: str) -> torch.Tensor:
    return torch.nn.functional.linear(value, values[f"{name}_weight"], values.get(f"{name}_bias"))


def _project(cell: Cell, values: Tensors, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b, each [B, D, N, columns] in BF16, zero past column N."""
    ab = torch.zeros(2, cell.B, cell.D, cell.N, columns, dtype=torch.bfloat16, device=values["x"].device)
    for start in range(0, cell.N, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        h = _normalised(values["x"][:, rows], values["norm_in_weight"], values["norm_in_bias"])
        product = torch.sigmoid(_linear(h, values, "g_in")) * _linear(h, values, "p_in")
        if cell.mask:
            product = product * values["mask"][:, rows, :, None]
        split = product.unflatten(-1, (2, cell.D)).permute(3, 0, 4, 1, 2)
        ab[:, :, :, rows, : cell.N] = _round(split)
    return ab[0], ab[1]


def _contract(cell: Cell, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """t [B, D, N, N] in BF16."""
    return _round(a @ b.mT if cell.direction == "outgoing" else a.mT @ b)


def _finalize(cell: Cell, values: Tensors, t: torch.Tensor) -> torch.Tensor:
    out = torch.empty(cell.B, cell.N, cell.N, cell.C, dtype=torch.bfloat16, device=t.device)
    for start in range(0, cell.N, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        h = _normalised(values["x"][:, rows], values["norm_in_weight"], values["norm_in_bias"])
        pairs = t[:, :, rows].permute(0, 2, 3, 1).to(h.dtype)
        normal = _normalised(pairs, values["norm_out_weight"], values["norm_out_bias"])
        out[:, rows] = _round(torch.sigmoid(_linear(h, values, "g_out")) * _linear(normal, values, "p_out"))
    return out
