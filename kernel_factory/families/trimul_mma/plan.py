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
_BF16: Final = 2
_GRID_YZ: Final = 65535
_FULL_DEVICE: Final = 128  # SMs, near enough: 108 to 148 on the parts this family targets
_CTA_RESERVED_BYTES: Final = 1024  # what the driver adds to each CTA
_SM_SHARED_BYTES: Final = {
    "sm_80": 164 << 10,
    "sm_89": 100 << 10,
    "sm_120a": 100 << 10,
    **dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), 228 << 10),
}


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
    """``warps`` blocks of 32 positions a CTA, ``stages`` of the weight ring."""

    warps: int
    stages: int

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
    """``warps`` blocks of 32 positions a CTA, ``stages`` of the weight ring."""

    warps: int
    stages: int

    def shared_bytes(self, c: int, d: int) -> int:
        """The weight ring; the staged t precedes all but its early stages in the same bytes."""
        stage, staged_t = STAGE_ROWS * (c + d), self.warps * BLOCK * d
        return (EARLY_STAGES * stage + max((self.stages - EARLY_STAGES) * stage, staged_t)) * _BF16


def padded(n: int) -> int:
    """Np: the row length of ab and t."""
    return ceil(n / PAD) * PAD


def project_tile(n: int, batch: int) -> ProjectTile:
    """Four warps a CTA, fewer while that would leave SMs empty."""
    return ProjectTile(warps=_warps(batch * n * padded(n) // BLOCK), stages=4)


def finalize_tile(n: int, batch: int) -> FinalizeTile:
    """As ``project_tile``."""
    return FinalizeTile(warps=_warps(batch * n * ceil(n / BLOCK)), stages=4)


def _warps(blocks: int) -> int:
    """Warps that share a weight ring. x and t are never read twice to make more CTAs."""
    return next((warps for warps in (4, 2) if blocks >= warps * _FULL_DEVICE), 1)


def contract_tile(n: int, batch: int, d: int, sm: str) -> ContractTile:
    """128 x 128 with 64 x 64 a warp, or 64 x 64 where the large tile would leave SMs with less than two CTAs.

    A 64 x 64 warp tile reads half the SMEM bytes a multiply-add of a 32 x 32 one, and two thirds of a
    64 x 32 one. Of the K depths, the deepest that lets two CTAs share an SM.
    """
    small = n <= 64 or batch * d * ceil(n / 128) ** 2 < 2 * _FULL_DEVICE
    edge = 64 if small else 128
    tiles = [
        ContractTile(tile_m=edge, tile_n=edge, bk=bk, stages=stages, warps_m=2, warps_n=2)
        for bk, stages in ((64, 3), (32, 4), (32, 3))
    ]
    capacity = _SM_SHARED_BYTES.get(sm, _SM_SHARED_BYTES["sm_89"])
    return next(t for t in tiles if 2 * (t.shared_bytes() + _CTA_RESERVED_BYTES) <= capacity)


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
        **project_tile(cell.N, cell.B).constants(),
    )
    operands = (
        *("x", "norm_in_weight", "norm_in_bias", "p_in_weight", "g_in_weight"),
        *(("p_in_bias", "g_in_bias") if cell.biases else ()),
        *(("mask",) if cell.mask else ()),
        "ab",
    )
    return Step(spec=spec, operands=operands, scalars=(cell.N, cell.B))


def _contract(cell: Cell) -> Step:
    tile = contract_tile(cell.N, cell.B, cell.D, cell.sm)
    spec = KernelSpec.of(NAME, "contract", D=cell.D, direction=cell.direction, **tile.constants())
    return Step(spec=spec, operands=("ab", "t"), scalars=(cell.N, cell.B))


def _finalize(cell: Cell) -> Step:
    spec = KernelSpec.of(
        NAME,
        "finalize",
        C=cell.C,
        D=cell.D,
        biases=cell.biases,
        **finalize_tile(cell.N, cell.B).constants(),
    )
    operands = (
        *("x", "t", "norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias"),
        *("p_out_weight", "g_out_weight"),
        *(("p_out_bias", "g_out_bias") if cell.biases else ()),
        "out",
    )
    return Step(spec=spec, operands=operands, scalars=(cell.N, cell.B))
