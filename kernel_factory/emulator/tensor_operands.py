"""Operands of tcgen05 instructions in shared memory: descriptors bound to a batch's memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import Fault
from .tensor_descriptors import DescriptorError, matrix, units
from .tensor_numbers import decode

_WINDOW = 1 << 18  # a descriptor holds addresses modulo this


@dataclass(frozen=True, kw_only=True)
class SharedOperand:
    """16-byte units of one matrix, relative to the start of a CTA's shared memory. The same units in every CTA."""

    units: np.ndarray
    mn_major: bool
    rows: int

    def flat(self, M: object, cta: int) -> np.ndarray:
        """Byte positions in the batch's shared memory."""
        return self.units + cta * M.shared_stride

    def raw(self, M: object, cta: int) -> np.ndarray:
        """The bytes, (…units, 16)."""
        taken = M.shared_views[16].take(self.flat(M, cta) >> 4)
        return taken.view(np.uint8).reshape(*self.units.shape, 16)

    def read(self, M: object, cta: int, kind: str) -> np.ndarray:
        """The matrix as (rows, k) numbers."""
        raw = self.raw(M, cta)
        if not self.mn_major:
            return decode(raw.reshape(self.rows, -1), kind)
        return decode(raw, kind).transpose(0, 2, 1).reshape(self.rows, -1)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A descriptor, and what the instruction says of its matrix: rows of ``width`` units of 16 bytes, element size."""

    word: int
    rows: int
    mn_major: bool = False
    size: int = 1
    width: int = 2


@lru_cache(maxsize=4096)
def _relative(wanted: Matrix, origin: int) -> tuple[np.ndarray, int]:
    there = units(matrix(wanted.word), wanted.rows, wanted.mn_major, wanted.size, wanted.width)
    places = (there - origin) & (_WINDOW - 1)
    return places, int(places.max()) + 16


def shared_operand(M: object, wanted: Matrix, line: int, thread: int) -> SharedOperand:
    """Decode and check a matrix descriptor: DescriptorError for a bad one, Fault where it leaves shared memory."""
    rows, size = wanted.rows, wanted.size
    if wanted.mn_major and rows * size % 16:
        raise DescriptorError(f"an MN-major operand of {rows} elements of {size} bytes is no whole number of 16 bytes")
    places, end = _relative(wanted, M.shared_origin)
    if end > M.shared_end - M.shared_origin:
        raise Fault(
            "out-of-bounds", line,
            f"the matrix of descriptor {wanted.word:#018x} reaches offset {end} of "
            f"{M.shared_end - M.shared_origin} bytes of shared memory",
            "correct start, offsets and swizzle of the descriptor, or ask for more shared memory", thread,
        )  # fmt: skip
    return SharedOperand(units=places, mn_major=wanted.mn_major, rows=rows)
