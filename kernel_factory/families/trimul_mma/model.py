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
    staged = Staged(cell, inputs, dtype)
    every = (slice(0, cell.B), slice(0, cell.D), slice(0, cell.N), slice(0, cell.N))
    t = torch.cat([staged.contracted(cell, (slice(b, b + 1), *every[1:])) for b in range(cell.B)])
    out = torch.cat(
        [staged.finalised(cell, slice(0, cell.B), slice(i, i + _ROWS_AT_ONCE), every[3], t) for i in _starts(cell.N)], 1
    )
    return {"ab": staged.ab, "t": t, "out": out}


class Staged:
    """The model, evaluated where it is asked for: what a sampled launch reads, and what its blocks should write.

    ``ab`` is there as a whole; t and the output are computed for the regions of a few blocks. The
    direction comes with each question, so that both directions share one projection.
    """

    def __init__(self, cell: Cell, inputs: Tensors, dtype: torch.dtype) -> None:
        self._values = {name: value.to(dtype) for name, value in inputs.items()}
        self.ab = _project(cell, self._values, padded(cell.N))

    def operand(self, cell: Cell, name: str, regions: list[Owned]) -> torch.Tensor:
        """A scratch operand. Elements of t that no block of ``regions`` reads are NaN."""
        if name == "ab":
            return self.ab
        t = torch.full((cell.B, cell.D, cell.N, cell.N), torch.nan, dtype=torch.bfloat16)
        for _, (batch, row, columns, _channels) in regions:
            t[batch, :, row, columns] = self._t_of(cell, batch, row, columns)[0, :, 0]
        return t

    def expected(self, cell: Cell, owned: Owned) -> torch.Tensor:
        """What the block that owns this region should have written there."""
        name, region = owned
        if name == "ab":
            return self.ab[region]
        if name == "t":
            batch, channel, rows, columns = region
            one = (slice(batch, batch + 1), slice(channel, channel + 1), rows, columns)
            return self.contracted(cell, one)[0, 0]
        batch, row, columns, _channels = region
        t = self._t_of(cell, batch, row, columns)
        return self.finalised(cell, slice(batch, batch + 1), slice(row, row + 1), columns, t)[0, 0]

    def _t_of(self, cell: Cell, batch: int, row: int, columns: slice) -> torch.Tensor:
        return self.contracted(cell, (slice(batch, batch + 1), slice(0, cell.D), slice(row, row + 1), columns))

    def contracted(self, cell: Cell, region: tuple[slice, slice, slice, slice]) -> torch.Tensor:
        """t of a region [batches, channels, rows, columns], in BF16."""
        batches, channels, rows, columns = region
        a, b = self.ab[0, batches, channels, :, : cell.N], self.ab[1, batches, channels, :, : cell.N]
        dtype = self._values["x"].dtype
        if cell.direction == "outgoing":
            return _round(a[:, :, rows].to(dtype) @ b[:, :, columns].to(dtype).mT)
        return _round(a[..., rows].to(dtype).mT @ b[..., columns].to(dtype))

    def finalised(self, cell: Cell, batches: slice, rows: slice, columns: slice, t: torch.Tensor) -> torch.Tensor:
        """The output of a region [batches, rows, columns, C], in BF16. ``t`` is of all rows, or of these alone."""
        values = self._values
        h = _normalised(values["x"][batches, rows, columns], values["norm_in_weight"], values["norm_in_bias"])
        here = t[:, :, rows] if t.shape[2] == cell.N else t
        pairs = here.permute(0, 2, 3, 1).to(h.dtype)
        normal = _normalised(pairs, values["norm_out_weight"], values["norm_out_bias"])
        return _round(torch.sigmoid(_linear(h, values, "g_out")) * _linear(normal, values, "p_out"))


def owned(cell: Cell, step: Step, block: tuple[int, int, int]) -> list[Owned]:
    """The regions that one block writes, each a buffer and an index (columns past N excluded).

    Indices: ``ab`` (half, batch, channels, row, columns), ``t`` (batch, channel, rows, columns),
    ``out`` (batch, row, columns, channels).
    """
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


def _starts(n: int) -> range:
    return range(0, n, _ROWS_AT_ONCE)


def _project(cell: Cell, values: Tensors, columns: int) -> torch.Tensor:
    """a and b, [2, B, D, N, columns] in BF16, zero past column N."""
    ab = torch.zeros(2, cell.B, cell.D, cell.N, columns, dtype=torch.bfloat16, device=values["x"].device)
    for start in _starts(cell.N):
        rows = slice(start, start + _ROWS_AT_ONCE)
        h = _normalised(values["x"][:, rows], values["norm_in_weight"], values["norm_in_bias"])
        product = torch.sigmoid(_linear(h, values, "g_in")) * _linear(h, values, "p_in")
        if cell.mask:
            product = product * values["mask"][:, rows, :, None]
        split = _round(product).unflatten(-1, (2, cell.D)).permute(3, 0, 4, 1, 2)
        ab[:, :, :, rows, : cell.N] = split
    return ab
