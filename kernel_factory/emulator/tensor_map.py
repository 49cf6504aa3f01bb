"""Tensor maps: what the 128 opaque bytes of a TMA descriptor say, and the tile geometry that follows.

Only the first 64 bytes carry meaning. Fields as the host code of nvidia-cutlass-dsl 4.7 writes them (found by
compiling descriptors of every type and swizzle); the position of the NaN-fill bit is an assumption, since that host
code never sets it. Words are 64 bits, little endian:

    word 0   global address
    word 1   bits 4-6 rank-1, 7-10 element type, 11-12 interleave, 13-14 swizzle, 15 NaN fill, 16 round to tf32,
             17-18 L2 promotion, 19-20 swizzle atom (16 B, 32 B, 32 B with 8 B flip, 64 B), 21 elements of 8 bytes,
             32-63 stride 1 / 16
    word 2   strides 2 and 3 / 16;  word 3  stride 4 / 16
    word 4   extents 0 and 1, minus 1;  word 5  extents 2 and 3;  word 6  low half extent 4
    word 6   top byte box 0 - 1;  word 7  low bytes box 1 to 4, minus 1

PTX ISA 5.5 (tensors, swizzling modes) and 9.7.9.27 (tensor copies).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

MAP_BYTES = 128
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16")
_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2)
SWIZZLES = ("none", "32B", "64B", "128B")
_SPAN = (None, 32, 64, 128)
# (bits, lowest bit of the chunk index, distance to the row bits) of the address XOR, by swizzle and atom.
_PATTERNS = {(1, 0): (1, 4, 3), (2, 0): (2, 4, 3), (3, 0): (3, 4, 3), (3, 1): (2, 5, 2), (3, 3): (1, 6, 1)}


class TensorMapError(ValueError):
    """A descriptor that no hardware takes: which field, what was expected, what it holds."""


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A decoded descriptor; dimension 0 is the fastest, strides are in bytes and start at dimension 1."""

    address: int
    element: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    atom: int = 0
    interleave: int = 0
    nan_fill: bool = False
    tf32: bool = False
    promotion: int = field(default=0, compare=False)

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def element_bytes(self) -> int:
        return _BYTES[self.element]

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element_bytes

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """Read a descriptor; TensorMapError for fields that no valid one has."""
        w = struct.unpack("<8Q", bytes(raw[:64]))
        rank, element = ((w[1] >> 4) & 7) + 1, (w[1] >> 7) & 15
        if rank > 5 or element >= len(ELEMENTS):
            raise TensorMapError(f"rank {rank} and element type {element}: these bytes are no tensor map")
        halves = [(w[i] >> s) & 0xFFFFFFFF for i in (4, 5) for s in (0, 32)] + [w[6] & 0xFFFFFFFF]
        strides = [w[1] >> 32, w[2] & 0xFFFFFFFF, w[2] >> 32, w[3] & 0xFFFFFFFF]
        box = [w[6] >> 56, *((w[7] >> s) & 255 for s in (0, 8, 16, 24))]
        if w[7] >> 32 or (w[6] >> 32) & 0xFFFFFF or w[3] >> 32 or (w[1] >> 22) & 1023:
            raise TensorMapError("fields beyond those that are understood are set (element strides, im2col)")
        return cls(
            address=w[0],
            element=element,
            extents=tuple(x + 1 for x in halves[:rank]),
            strides=tuple(x << 4 for x in strides[: rank - 1]),
            box=tuple(x + 1 for x in box[:rank]),
            swizzle=(w[1] >> 13) & 3,
            atom=(w[1] >> 19) & 3,
            interleave=(w[1] >> 11) & 3,
            nan_fill=bool((w[1] >> 15) & 1),
            tf32=bool((w[1] >> 16) & 1),
            promotion=(w[1] >> 17) & 3,
        )

    def encode(self) -> bytes:
        """The 128 bytes of this descriptor."""
        pad = lambda xs, n: [*xs, *([0] * (n - len(xs)))]  # noqa: E731
        e, s, b = pad([x - 1 for x in self.extents], 5), pad([x >> 4 for x in self.strides], 4), self.box
        flags = 2 | (self.rank - 1) << 4 | self.element << 7 | self.interleave << 11 | self.swizzle << 13
        flags |= self.nan_fill << 15 | self.tf32 << 16 | self.promotion << 17 | self.atom << 19
        flags |= (self.element_bytes == 8) << 21
        words = [self.address, flags | s[0] << 32, s[1] | s[2] << 32, s[3], e[0] | e[1] << 32, e[2] | e[3] << 32]
        words += [e[4] | (b[0] - 1) << 56, sum((x - 1) << 8 * i for i, x in enumerate(b[1:]))]
        return struct.pack("<8Q", *words) + bytes(64)

    def check(self) -> None:
        """Raise TensorMapError for what cuTensorMapEncodeTiled refuses."""
        inner = self.box[0] * self.element_bytes
        if self.interleave:
            raise TensorMapError("interleaved layouts are not emulated; use interleave none")
        if self.address % 16:
            raise TensorMapError(f"global address {self.address:#x} is not a multiple of 16")
        for i, stride in enumerate(self.strides, 1):
            if stride == 0 and self.extents[i] > 1 and self.box[i] > 1:
                continue  # a broadcast dimension
            if stride >= 1 << 40:
                raise TensorMapError(f"stride {i} of {stride} bytes is not below 2^40")
        if max(self.box) > 256:
            raise TensorMapError(f"box {self.box}: no dimension may exceed 256")
        if inner % 16:
            raise TensorMapError(f"box rows of {inner} bytes; they must be a multiple of 16")
        if self.swizzle and inner > _SPAN[self.swizzle]:
            raise TensorMapError(
                f"box rows of {inner} bytes exceed the {SWIZZLES[self.swizzle]} swizzle; make the box narrower"
            )
        if (self.swizzle, self.atom) not in _PATTERNS and (self.swizzle or self.atom):
            raise TensorMapError(f"swizzle {SWIZZLES[self.swizzle]} with atom {self.atom} is not emulated")

    @cached_property
    def alignment(self) -> int:
        """Bytes to which the shared-memory tile must be aligned for its swizzle pattern to start (PTX ISA 5.5.7)."""
        if not self.swizzle:
            return 128
        bits, base, shift = _PATTERNS[self.swizzle, self.atom]
        return 1 << (bits + base + shift)

    def swizzled(self, address: np.ndarray) -> np.ndarray:
        """Where the byte of a linear tile address lies: chunk bits XOR row bits of the shared-memory address."""
        if not self.swizzle:
            return address
        bits, base, shift = _PATTERNS[self.swizzle, self.atom]
        mask = ((1 << bits) - 1) << base
        return address ^ ((address >> shift) & mask)

    @lru_cache(maxsize=8)  # noqa: B019 - a handful of maps a kernel
    def offsets(self, unit: int) -> tuple[np.ndarray, np.ndarray]:
        """For each unit of a box, in tile order: its coordinates (rank, units) and its global byte offset."""
        each = unit // self.element_bytes
        shape = (*reversed(self.box[1:]), self.box[0] // each)
        index = np.indices(shape).reshape(self.rank, -1)[::-1].copy()
        index[0] *= each
        steps = np.array([self.element_bytes, *self.strides])
        return index, (index * steps[:, None]).sum(axis=0)


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    """Decode and check the meaningful 64 bytes of a descriptor."""
    found = TensorMap.decode(raw)
    found.check()
    return found
