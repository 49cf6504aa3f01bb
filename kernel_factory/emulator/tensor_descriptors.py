"""The two descriptors of tcgen05.mma, decoded: of the instruction, and of a matrix in shared memory.

PTX ISA 9.7.16.4.1 (matrix descriptor), 9.7.16.4.2 (instruction descriptor), 9.7.16.5 (canonical layouts).
Every dense kind multiplies 32 bytes of K, so that an operand is rows of two 16-byte units (K-major), or columns of
16-byte units along M or N (MN-major). ``units`` gives the byte address of every unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

SWIZZLES = {0: "none", 1: "128B base 32B", 2: "128B", 4: "64B", 6: "32B"}
_WIDTH = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}  # bytes of an atom's row
TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
TYPES["mxf8f6f4"] = TYPES["f8f6f4"]
# Bytes of an element in shared memory; 4 and 6 bits sit 16 to a 16-byte unit, but for mxf4 with 32 to a unit.
SIZES = {"f16": 2, "bf16": 2, "tf32": 4, **dict.fromkeys(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "u8", "s8"), 1)}
SCALES = {0: "ue4m3", 1: "ue8m0"}
_RESULTS = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}


class DescriptorError(ValueError):
    """A descriptor that no instruction takes: what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Block scaling: type of a factor, factors of a row, and the byte of the first in its TMEM word, of A and of B."""

    type: str
    count: int
    a_byte: int
    b_byte: int


@dataclass(frozen=True, kw_only=True)
class InstructionDescriptor:
    """Shapes, types and majorness of one tcgen05.mma."""

    kind: str
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    saturate: bool
    scale: Scale | None = None

    @property
    def packed(self) -> bool:
        """Two 4-bit elements a byte."""
        return self.kind in ("mxf4", "mxf4nvf4")

    @property
    def k(self) -> int:
        return 64 if self.packed else 32 // SIZES[self.a_type]

    @property
    def key(self) -> str:
        """For example ``tcgen05.m128n64k16.bf16``."""
        kinds = self.a_type if self.a_type == self.b_type else f"{self.a_type}.{self.b_type}"
        return f"tcgen05.m{self.m}n{self.n}k{self.k}.{kinds}"


def instruction(word: int, kind: str, group: int) -> InstructionDescriptor:
    """Decode the 32-bit instruction descriptor of a dense ``kind``; DescriptorError for a combination that is none."""
    if word & 7:
        raise DescriptorError("the descriptor asks for a sparse product, the instruction is dense")
    if word >> 29 or word >> 23 & 1 or word >> 6 & 1:
        raise DescriptorError(f"reserved bits are set in instruction descriptor {word:#010x}")
    names = [TYPES[kind].get(word >> shift & 7) for shift in (7, 10)]
    result = _RESULTS[kind].get(word >> 4 & 3)
    if None in names or result is None:
        raise DescriptorError(
            f"types {word >> 7 & 7}, {word >> 10 & 7} with result {word >> 4 & 3} are no types of kind::{kind}"
        )
    m, n = (word >> 24 & 31) * 16, (word >> 17 & 63) * 8
    _check_shape(kind, group, m, n)
    out = InstructionDescriptor(
        kind=kind, m=m, n=n, a_type=names[0], b_type=names[1], d_type=result,
        negate_a=bool(word >> 13 & 1), negate_b=bool(word >> 14 & 1),
        a_mn_major=bool(word >> 15 & 1), b_mn_major=bool(word >> 16 & 1), saturate=bool(word >> 3 & 1),
    )  # fmt: skip
    if kind == "i8" and (out.negate_a or out.negate_b):
        raise DescriptorError("integers cannot be negated by the descriptor")
    if kind != "i8" and out.saturate:
        raise DescriptorError("only integer results saturate")
    return out


def scaled_instruction(word: int, kind: str, group: int, count: int) -> InstructionDescriptor:
    """Decode the descriptor of a block-scaled ``kind`` with ``count`` factors a row (9.7.16.4.2, second table)."""
    if word & 7:
        raise DescriptorError("the descriptor asks for a sparse product, the instruction is dense")
    if word >> 31 or word >> 6 & 1:
        raise DescriptorError(f"K of 96, or a reserved bit, in instruction descriptor {word:#010x}; not emulated")
    names = [TYPES[kind].get(word >> shift & 7) for shift in (7, 10)]
    if None in names:
        raise DescriptorError(f"types {word >> 7 & 7}, {word >> 10 & 7} are no types of kind::{kind}")
    scale = Scale(type=SCALES[word >> 23 & 1], count=count, a_byte=word >> 29 & 3, b_byte=word >> 4 & 3)
    if scale.type == "ue4m3" and kind != "mxf4nvf4":
        raise DescriptorError(f"scale factors of type ue4m3 with kind::{kind}")
    if max(scale.a_byte, scale.b_byte) + count > 4 or (count > 1 and (scale.a_byte | scale.b_byte) & (count - 1)):
        raise DescriptorError(f"scale-factor ids {scale.a_byte}, {scale.b_byte} with {count} factors a row")
    m, n = (word >> 24 & 31) * 16, (word >> 17 & 63) * 8
    if m != 128 * group or n % 8 or not 8 <= n <= 256:
        raise DescriptorError(f"M = {m}, N = {n} with kind::{kind} and cta_group::{group}")
    return InstructionDescriptor(
        kind=kind, m=m, n=n, a_type=names[0], b_type=names[1], d_type="f32",
        negate_a=bool(word >> 13 & 1), negate_b=bool(word >> 14 & 1),
        a_mn_major=bool(word >> 15 & 1), b_mn_major=bool(word >> 16 & 1), saturate=False, scale=scale,
    )  # fmt: skip


def _check_shape(kind: str, group: int, m: int, n: int) -> None:
    """Shapes of 9.7.16.2.1: M is 64 or 128, of a pair 128 or 256; N goes in steps of 8 or 16."""
    if m not in ((64, 128) if group == 1 else (128, 256)):
        raise DescriptorError(f"M = {m} with cta_group::{group}")
    step = 8 if m == 64 and kind != "i8" else 16
    if not (8 <= n <= 256) or (n % step and not (kind == "i8" and n == 8 and m == 64)):
        raise DescriptorError(f"N = {n} with M = {m}, kind::{kind}, cta_group::{group}; N goes in steps of {step}")


@dataclass(frozen=True, kw_only=True)
class MatrixDescriptor:
    """Where a matrix lies in shared memory; offsets in bytes, the start modulo 2**18."""

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int


def matrix(word: int) -> MatrixDescriptor:
    """Decode a 64-bit shared-memory descriptor of sm_100; DescriptorError for what is none."""
    swizzle = word >> 61
    if word >> 46 & 7 != 1:
        raise DescriptorError(f"version {word >> 46 & 7} in bits 46 to 48 of {word:#018x}; sm_100 wants 1")
    if swizzle not in SWIZZLES:
        raise DescriptorError(f"swizzle mode {swizzle} in bits 61 to 63 of {word:#018x}")
    if word >> 53 & 0xFF:
        raise DescriptorError(f"reserved bits 53 to 60 are set in {word:#018x}")
    if word >> 52 & 1:
        raise DescriptorError("the absolute leading-dimension mode (bit 52) is not emulated")
    return MatrixDescriptor(
        start=(word & 0x3FFF) << 4, leading=(word >> 16 & 0x3FFF) << 4, stride=(word >> 32 & 0x3FFF) << 4,
        base_offset=word >> 49 & 7, swizzle=swizzle,
    )  # fmt: skip


def swizzled(address: np.ndarray, mode: int, base_offset: int = 0) -> np.ndarray:
    """16-byte units of rows change places: address bits 4 to 6 are xored with bits 7 to 9 (as many as the mode has)."""
    if mode == 0:
        return address
    if mode == 1:
        return address ^ ((address >> 2) & 0x60)
    row = (address >> 7) - base_offset
    return address ^ ((row & {2: 7, 4: 3, 6: 1}[mode]) << 4)


@lru_cache(maxsize=4096)
def units(descriptor: MatrixDescriptor, rows: int, mn_major: bool, size: int, width: int = 2) -> np.ndarray:
    """Byte addresses of the 16-byte units of an operand with elements of ``size`` bytes.

    K-major: (rows, width), a unit holds elements along K. MN-major: (rows * size / 16, 32 / size), a unit holds
    elements along M or N.
    """
    mode, atom = descriptor.swizzle, _WIDTH[descriptor.swizzle]
    if mn_major:
        unit, k = np.arange(rows * size // 16)[:, None], np.arange(32 // size)[None, :]
        if mode == 0:
            offset = unit * descriptor.stride + (k % 8) * 16 + (k // 8) * descriptor.leading
        else:
            per, deep = atom // 16, 4 if mode == 1 else 8
            offset = (unit % per) * 16 + (unit // per) * descriptor.leading
            offset = offset + (k % deep) * atom + (k // deep) * descriptor.stride
    else:
        if mode == 1:
            raise DescriptorError("128-byte swizzle with a base of 32 bytes needs an MN-major operand")
        row, unit = np.arange(rows)[:, None], np.arange(width)[None, :]
        step = descriptor.leading if mode == 0 else 16
        offset = (row % 8) * atom + (row // 8) * descriptor.stride + unit * step
    return swizzled(descriptor.start + offset, mode, descriptor.base_offset)
