"""Parameters: how near the oracle a cell stays when float32 parameters are rounded to BF16 within its call.

No kernel runs for this. The float32 parameters are drawn so that rounding gives back, to the bit, the
BF16 ones of the input sets on which the cell was proved: the kernels would compute from them what they
did then, within ``model_norm`` of the rounding model. What is left to measure is how far that model is
from the float64 oracle of the parameters as they were before rounding; a seeded block of the output
holds enough elements for that.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Final

import torch
import torch.nn.functional as F
from kf_runtime.cell import Cell

from kernel_factory.reference import REFERENCES, Tensors, relative_error
from kernel_factory.store import digest, sha256

ROWS: Final = 8  # of the output block; the first and the last row are among them
COLUMNS: Final = 64
EPS: Final = 1e-5
_PAIR: Final = ("x", "mask")


@lru_cache
def method(model: Path) -> str:
    """sha256 of the code that decides what a measurement says; ``model`` is the family's."""
    files = [Path(__file__), Path(__file__).with_name("reference.py"), model]
    return digest([[path.name, sha256(path.read_bytes())] for path in files])


def measure(cells: list[Cell], expectation: ModuleType, seed: int) -> list[dict[str, float]]:
    """Per cell and input set, the rounding model's error against the oracle of float32 parameters.

    Empty for an op that has no block oracle: its cells admit BF16 parameters alone. ``cells`` differ in direction
    alone: they share inputs and the model's projection.
    """
    torch.set_num_threads(1)
    first = cells[0]
    oracle = BLOCK_ORACLES.get(first.op)
    if oracle is None:
        return [{} for _ in cells]
    found: list[dict[str, float]] = [{} for _ in cells]
    reference = REFERENCES[first.op]
    for name in reference.input_sets(first):
        inputs = reference.inputs(first, name, seed)
        staged = expectation.Staged(first, inputs, torch.float32)
        wide = unrounded(inputs, seed)
        for cell, figures in zip(cells, found, strict=True):
            batch, rows, columns = block(cell, seed)
            regions = [("out", (batch, row, columns, slice(0, cell.C))) for row in rows]
            model = torch.stack([staged.expected(cell, region) for region in regions])
            error = relative_error(model, oracle(cell, wide, (batch, rows, columns)))
            figures[name] = float(f"{error:.3g}")  # a sample tells no more, and other CPUs sum in other orders
    return found


def unrounded(inputs: Tensors, seed: int) -> Tensors:
    """The pair in BF16, and float32 parameters, uniform among those that round to the BF16 ones; zeros stay zeros."""
    draw = torch.Generator().manual_seed(seed)

    def spread(value: torch.Tensor) -> torch.Tensor:
        offset = torch.randint(-0x7FFF, 0x8000, value.shape, generator=draw, dtype=torch.int32)
        wide = (value.float().view(torch.int32) + offset).view(torch.float32)
        return torch.where(value == 0, value.float(), wide)

    return {name: value if name in _PAIR else spread(value) for name, value in inputs.items()}


Block = tuple[int, list[int], slice]


def block(cell: Cell, seed: int) -> Block:
    """A seeded batch, rows with both ends, and a run of columns."""
    draw = random.Random(seed)
    width = min(COLUMNS, cell.N)
    start = draw.randrange(cell.N - width + 1)
    rows = sorted({0, cell.N - 1, *draw.sample(range(cell.N), min(ROWS - 2, cell.N))})
    return draw.randrange(cell.B), rows, slice(start, start + width)


def block_oracle(cell: Cell, inputs: Tensors, where: Block) -> torch.Tensor:
    """The op of ``triangle_multiplicative_update`` in float64 on a block: ``[rows, columns, C]``.

    A block needs the pair rows (incoming: columns) that its own indices name, and no others.
    """
    batch, rows, columns = where
    values = {name: value[batch] if name in _PAIR else value for name, value in inputs.items()}
    over = values if cell.direction == "outgoing" else {**values, **{n: values[n].mT for n in ("mask",) if n in values}}
    x = values["x"] if cell.direction == "outgoing" else values["x"].transpose(0, 1)
    a = _operand(over, x, rows, slice(0, cell.D))
    b = _operand(over, x, columns, slice(cell.D, 2 * cell.D))
    t = torch.einsum("ikd,jkd->ijd", a, b)
    gate = torch.sigmoid(_linear(values, "g_out", _norm(values, "norm_in", values["x"][rows][:, columns].double())))
    return gate * _linear(values, "p_out", _norm(values, "norm_out", t))


def _operand(values: Tensors, x: torch.Tensor, rows: list[int] | slice, half: slice) -> torch.Tensor:
    """a or b of these rows, ``[rows, N, D]``."""
    h = _norm(values, "norm_in", x[rows].double())
    product = torch.sigmoid(_linear(values, "g_in", h, half)) * _linear(values, "p_in", h, half)
    return product * values["mask"][rows].double()[..., None] if "mask" in values else product


def _norm(values: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = values[f"{name}_weight"].double(), values[f"{name}_bias"].double()
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _linear(values: Tensors, name: str, x: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
    bias = values.get(f"{name}_bias")
    return F.linear(x, values[f"{name}_weight"][part].double(), None if bias is None else bias[part].double())


#: By op.
BLOCK_ORACLES: Final = {"triangle_multiplicative_update": block_oracle}


def call_of(cell: Cell) -> Cell:
    """The cell without its SM, on which nothing here depends."""
    return replace(cell, sm="sm_0")
