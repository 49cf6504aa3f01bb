"""What trimul_mma launches for a cell: three kernels, their tile configs and the scratch between them.

    project   x -> ab [2, B, D, N, Np]      contract   ab -> t [B, D, N, Np]      finalize   x, t -> y

Np is N rounded up to 64 elements, a 128-byte row. Pure: this module imports no compiler. Only
``contract`` is compiled for a direction; N and B are run-time scalars of all three.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Final, Self

from kf_runtime.cell import Cell
from kf_runtime.plan import Buffer

from kernel_factory.family import CellPlan, KernelSpec, Step

NAME: Final = "trimul_mma"
BLOCK: Final = 32
"""Positions of one row of the pair that a warp of project or finalize owns."""
PAD: Final = 64
"""Rows of scratch are padded to a multiple of this many elements."""
STAGE_ROWS: Final = 16
"""Gate rows, and value rows, in one stage of a weight ring."""
EARLY_STAGES: Final = 2
"""Stages of finalize's weight ring that fill while t is still staged."""
MAX_SHARED_BYTES: Final = 101376
"""What every SM from 8.0 on grants one block."""
_BF16: Final = 2
_GRID_YZ: Final = 65535
_TARGET_CTAS: Final = 256  # about two blocks for each SM of the larger parts


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """A tile config; its fields are compile-time constants of a KernelSpec."""

    @classmethod
    def of(cls, spec: KernelSpec) -> Self:
        """The config that ``spec`` was made from."""
        return cls(**{name: spec[name] for name in cls.__dataclass_fields__})

    def constants(self) -> dict[str, int]:
        """The fields, as KernelSpec constants."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ProjectTile(_Tile):
    """``warps`` blocks of 32 positions a CTA; ``splits`` CTAs share the channels of a block."""

    warps: int
    stages: int
    splits: int

    def shared_bytes(self, c: int) -> int:
        """The weight ring."""
        return self.stages * 2 * STAGE_ROWS * c * _BF16


@dataclass(frozen=True, kw_only=True)
class ContractTile(_Tile):
    """A tile_m x tile_n output tile over K steps of bk, warps_m x warps_n warps."""

    tile_m: int
    tile_n: int
    bk: int
    stages: int
    warps_m: int
    warps_n: int

    def shared_bytes(self) -> int:
        """The operand stages."""
        return self.stages * (self.tile_m + self.tile_n) * self.bk * _BF16


@dataclass(frozen=True, kw_only=True)
class FinalizeTile(_Tile):
    """``warps`` blocks of 32 positions a CTA; ``splits`` CTAs share the output channels of a block."""

    warps: int
    stages: int
    splits: int

    def shared_bytes(self, c: int, d: int) -> int:
        """The weight ring; the staged t precedes all but its early stages in the same bytes."""
        stage, staged_t = STAGE_ROWS * (c + d), self.warps * BLOCK * d
        return (EARLY_STAGES * stage + max((self.stages - EARLY_STAGES) * stage, staged_t)) * _BF16


def padded(n: int) -> int:
    """Np: the row length of ab and t."""
    return ceil(n / PAD) * PAD


def project_tile(n: int, batch: int, d: int) -> ProjectTile:
    """Four warps; the channels are split while the CTAs would not fill the device."""
    ctas = batch * ceil(n * padded(n) / BLOCK / 4)
    return ProjectTile(warps=4, stages=4, splits=_splits(ctas, 2 * d // STAGE_ROWS))


def finalize_tile(n: int, batch: int, c: int) -> FinalizeTile:
    """As ``project_tile``, over blocks of 32 output channels."""
    ctas = batch * ceil(n * ceil(n / BLOCK) / 4)
    return FinalizeTile(warps=4, stages=4, splits=_splits(ctas, c // 32))


def _splits(ctas: int, units: int) -> int:
    """The smallest of 1, 2, 4 that divides ``units`` and gives enough CTAs, or the largest that divides."""
    divisors = [s for s in (1, 2, 4) if units % s == 0]
    return next((s for s in divisors if ctas * s >= _TARGET_CTAS), divisors[-1])


_LARGE: Final = ContractTile(tile_m=128, tile_n=128, bk=32, stages=4, warps_m=2, warps_n=2)
_SMALL: Final = ContractTile(tile_m=64, tile_n=64, bk=64, stages=3, warps_m=2, warps_n=2)
_SMALL_COST: Final = 1.5  # SMEM bytes per multiply-add of the small tile's warps over the large one's, less the overlap


def contract_tile(n: int, batch: int, d: int) -> ContractTile:
    """The large tile, unless it covers too much padding or too few SMs."""
    large, small = (ceil(n / t.tile_m) * t.tile_m for t in (_LARGE, _SMALL))
    few = batch * d * ceil(n / _LARGE.tile_m) ** 2 < _TARGET_CTAS // 2
    return _SMALL if few or small * small * _SMALL_COST < large * large else _LARGE


def plan(cell: Cell) -> CellPlan:
    """The buffers and steps of ``cell``. Raises ValueError naming the field that this family cannot serve."""
    _check(cell)
    return CellPlan(buffers=_buffers(cell), steps=(_project(cell), _contract(cell), _finalize(cell)))


def _check(cell: Cell) -> None:
    rules: tuple[tuple[str, bool, str], ...] = (
        ("phase", cell.phase == "inference", "inference"),
        ("dtype", cell.dtype == "bf16", "bf16"),
        ("param_dtype", cell.param_dtype == "bf16", "bf16"),
        ("C", cell.C in (64, 128), "64 or 128"),
        ("D", cell.D in (64, 128), "64 or 128"),
        ("B", cell.B <= _GRID_YZ, f"at most {_GRID_YZ}"),
    )
    for name, holds, expected in rules:
        if not holds:
            raise ValueError(f"{NAME}: {name}: expected {expected}; found {getattr(cell, name)!r} in {cell.key}")


def _buffers(cell: Cell) -> tuple[Buffer, ...]:
    b, n, c, d = cell.B, cell.N, cell.C, cell.D
    inputs: dict[str, tuple[int, ...]] = {
        "x": (b, n, n, c),
        **({"mask": (b, n, n)} if cell.mask else {}),
        "norm_in_weight": (c,),
        "norm_in_bias": (c,),
        "p_in_weight": (2 * d, c),
        **({"p_in_bias": (2 * d,)} if cell.biases else {}),
        "g_in_weight": (2 * d, c),
        **({"g_in_bias": (2 * d,)} if cell.biases else {}),
        "norm_out_weight": (d,),
        "norm_out_bias": (d,),
        "p_out_weight": (c, d),
        **({"p_out_bias": (c,)} if cell.biases else {}),
        "g_out_weight": (c, c),
        **({"g_out_bias": (c,)} if cell.biases else {}),
    }
    scratch = {"ab": (2, b, d, n, padded(n)), "t": (b, d, n, padded(n))}
    return (
        *(Buffer.contiguous(name, "input", "bf16", shape) for name, shape in inputs.items()),
        Buffer.contiguous("out", "output", "bf16", (b, n, n, c)),
        *(Buffer.contiguous(name, "scratch", "bf16", shape, alignment=128) for name, shape in scratch.items()),
    )


def _project(cell: Cell) -> Step:
    spec = KernelSpec.of(
        NAME,
        "project",
        C=cell.C,
        D=cell.D,
        mask=cell.mask,
        biases=cell.biases,
        **project_tile(cell.N, cell.B, cell.D).constants(),
    )
    operands = (
        *("x", "norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight"),
        *(("p_in_bias", "g_in_bias") if cell.biases else ()),
        *(("mask",) if cell.mask else ()),
        "ab",
    )
    return Step(spec=spec, operands=operands, scalars=(cell.N, cell.B))


def _contract(cell: Cell) -> Step:
    tile = contract_tile(cell.N, cell.B, cell.D)
    spec = KernelSpec.of(NAME, "contract", D=cell.D, direction=cell.direction, **tile.constants())
    return Step(spec=spec, operands=("ab", "t"), scalars=(cell.N, cell.B))


def _finalize(cell: Cell) -> Step:
    spec = KernelSpec.of(
        NAME,
        "finalize",
        C=cell.C,
        D=cell.D,
        biases=cell.biases,
        **finalize_tile(cell.N, cell.B, cell.C).constants(),
    )
    operands = (
        *("x", "t", "norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias"),
        *("p_out_weight", "g_out_weight"),
        *(("p_out_bias", "g_out_bias") if cell.biases else ()),
        "out",
    )
    return Step(spec=spec, operands=operands, scalars=(cell.N, cell.B))
