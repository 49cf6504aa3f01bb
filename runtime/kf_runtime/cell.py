"""Cell: what one call of an op is. The unit of coverage, and its canonical key.

A key reads left to right from the op to the SM::

    triangle_multiplicative_update/inference/bf16.bf16/B1.N64.C128.D128/outgoing/mask/nobias/sm_90a

This module imports the standard library only; both sides of the border use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from kf_runtime.errors import CellKeyError

PHASES: Final = ("inference", "forward", "backward")
DIRECTIONS: Final = ("outgoing", "incoming")
NO_DIRECTION: Final = "none"
DTYPES: Final = ("bf16", "f16", "f32")

_KEY: Final = re.compile(
    r"(?P<op>[a-z0-9_]+)/(?P<phase>[a-z]+)/(?P<dtype>[a-z0-9]+)\.(?P<param_dtype>[a-z0-9]+)"
    r"/B(?P<B>\d+)\.N(?P<N>\d+)\.C(?P<C>\d+)\.D(?P<D>\d+)"
    r"/(?P<direction>[a-z]+)/(?P<mask>mask|nomask)/(?P<biases>bias|nobias)/(?P<sm>sm_\d+[af]?)"
)


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One exact call: pair ``[B, N, N, C]``, hidden width ``D``, on one SM.

    ``dtype`` is the pair's, ``param_dtype`` the parameters'. ``biases`` says that all four
    projections carry a bias. An op without a direction has "none", one without a hidden width D = C.
    Raises ValueError where a field is outside its domain.
    """

    op: str
    phase: str = "inference"
    dtype: str = "bf16"
    param_dtype: str = "bf16"
    B: int
    N: int
    C: int
    D: int
    direction: str
    mask: bool
    biases: bool = False
    sm: str

    def __post_init__(self) -> None:
        directions = (*DIRECTIONS, NO_DIRECTION)
        for name, domain in (("phase", PHASES), ("direction", directions), ("dtype", DTYPES), ("param_dtype", DTYPES)):
            if getattr(self, name) not in domain:
                raise ValueError(f"Cell.{name}: expected one of {', '.join(domain)}; found {getattr(self, name)!r}")
        for name in ("B", "N", "C", "D"):
            if getattr(self, name) < 1:
                raise ValueError(f"Cell.{name}: expected at least 1; found {getattr(self, name)}")

    @property
    def key(self) -> str:
        """The canonical text; ``Cell.parse(cell.key) == cell``."""
        return "/".join(
            (
                self.op,
                self.phase,
                f"{self.dtype}.{self.param_dtype}",
                f"B{self.B}.N{self.N}.C{self.C}.D{self.D}",
                self.direction,
                "mask" if self.mask else "nomask",
                "bias" if self.biases else "nobias",
                self.sm,
            )
        )

    @classmethod
    def parse(cls, key: str) -> Cell:
        """The cell that ``key`` names. Raises CellKeyError with the form that was expected."""
        found = _KEY.fullmatch(key)
        if found is None:
            raise CellKeyError(key)
        text: dict[str, Any] = found.groupdict()
        numbers = {name: int(text[name]) for name in ("B", "N", "C", "D")}
        flags = {"mask": text["mask"] == "mask", "biases": text["biases"] == "bias"}
        return cls(**{**text, **numbers, **flags})

    def rounded(self) -> Cell:
        """The same call with its parameters rounded to the pair's dtype: whose kernels may serve it."""
        return replace(self, param_dtype=self.dtype)

    def on(self, sm: str) -> Cell:
        """The same call on another SM."""
        return replace(self, sm=sm)

    def distance(self, other: Cell) -> tuple[int, int]:
        """How far two cells are apart: fields that differ, then the difference in N. Names the nearest cell."""
        differing = sum(getattr(self, f.name) != getattr(other, f.name) for f in fields(self))
        return differing, abs(self.N - other.N)

    def __str__(self) -> str:
        return self.key
