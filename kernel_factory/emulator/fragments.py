"""wgmma operands: where matrices lie in shared memory, which lane holds which element, and what the bits mean.

PTX ISA 9.7.15.5.1 (register fragments, shared-memory layouts, matrix descriptor). Units are 16-byte chunks, which no
swizzle splits. The canonical layouts, in chunks, with strides LBO and SBO from the descriptor:

    K-major   none ((8,n),2):((1,SBO),LBO)   32B ((8,n),2):((2,SBO),1)   64B …(4,SBO)…   128B …(8,SBO)…
    MN-major  none (n,(8,k)):(SBO,(1,LBO))   32B ((2,n),(8,k)):((1,LBO),(2,SBO))   64B 4   128B 8
"""

from __future__ import annotations

import numpy as np

from .errors import Fault
from .small_floats import table

SIZE = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_SPAN = {0: 0, 1: 8, 2: 4, 3: 2}  # chunks in a row of the swizzle atom, by bits 62-63 of the descriptor
WINDOW = 1 << 18


def chunks(descriptor: int, rows: int, mn_major: bool, line: int, thread: int) -> np.ndarray:
    """Shared-memory addresses of the 16-byte chunks of a rows x 32-byte matrix (or, MN-major, 16 x rows of 2 bytes).

    K-major: (rows, 2). MN-major: (rows / 8, 16). Addresses are relative to the shared window.
    """
    start, lbo, sbo = ((descriptor >> s & 0x3FFF) << 4 for s in (0, 16, 32))
    if descriptor >> 49 & 7:
        raise Fault(
            "bad-descriptor",
            line,
            f"matrix descriptor {descriptor:#018x} has a base offset",
            "align the tile to the repeat of its swizzle; other base offsets are not emulated",
            thread,
        )
    span = _SPAN[descriptor >> 62]
    at = _mn_major(rows // 8, span, lbo, sbo) if mn_major else _k_major(rows, span, lbo, sbo)
    address = start + at
    return address ^ ((address >> 7 & (span - 1)) << 4) if span else address


def _k_major(rows: int, span: int, lbo: int, sbo: int) -> np.ndarray:
    r, c = np.arange(rows)[:, None], np.arange(2)
    return r % 8 * (span or 1) * 16 + r // 8 * sbo + c * (16 if span else lbo)


def _mn_major(units: int, span: int, lbo: int, sbo: int) -> np.ndarray:
    m, k = np.arange(units)[:, None], np.arange(16)
    if not span:
        return m * sbo + k % 8 * 16 + k // 8 * lbo
    return m % span * 16 + m // span * lbo + k % 8 * span * 16 + k // 8 * sbo


def in_k_order(raw: np.ndarray, size: int, mn_major: bool) -> np.ndarray:
    """Chunks of ``chunks`` (…, complex128) as (matrices, rows, elements along k) of unsigned words."""
    words = np.ascontiguousarray(raw).view(f"u{size}")
    if not mn_major:
        return words.reshape(raw.shape[0], raw.shape[1], -1)
    parts = words.reshape(*raw.shape, 8)  # matrix, chunk of rows, k, row in the chunk
    return parts.transpose(0, 1, 3, 2).reshape(raw.shape[0], raw.shape[1] * 8, -1)


def decode(words: np.ndarray, kind: str) -> np.ndarray:
    """Operand bits as float32 (integers too: products of 8-bit integers over one instruction stay exact)."""
    if kind == "bf16":
        out = np.empty(words.shape, np.uint32)
        np.left_shift(words, 16, out=out, dtype=np.uint32, casting="unsafe")
        return out.view(np.float32)
    if kind == "f16":
        return words.view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("s8", "u8"):
        return words.view(np.int8 if kind == "s8" else np.uint8).astype(np.float32)
    return table(kind)[words]


def fragment_a(registers: np.ndarray, size: int) -> np.ndarray:
    """(4, groups, 128) registers of A as (groups, 64, 32 / size) unsigned words."""
    groups = registers.shape[1]
    words = np.ascontiguousarray(registers).view(f"u{size}").reshape(2, 2, groups, 4, 8, 4, 4 // size)
    # (column half, row half, group, warp, row, lane in row, element) -> (group, warp, row half, row, column)
    return words.transpose(2, 3, 1, 4, 0, 5, 6).reshape(groups, 64, -1)


def accumulator(registers: np.ndarray) -> np.ndarray:
    """(N/2, groups, 128) f32 or s32 registers of D as (groups, 64, N)."""
    n, groups = registers.shape[0] * 2, registers.shape[1]
    parts = registers.reshape(n // 8, 2, 2, groups, 4, 8, 4)
    return parts.transpose(3, 4, 1, 5, 0, 6, 2).reshape(groups, 64, n)


def accumulator_registers(matrix: np.ndarray) -> np.ndarray:
    """The reverse of accumulator."""
    groups, _, n = matrix.shape
    parts = matrix.reshape(groups, 4, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(4, 2, 6, 0, 1, 3, 5)).reshape(n // 2, groups, 128)


def half_accumulator(registers: np.ndarray) -> np.ndarray:
    """(N/4, groups, 128) f16x2 registers of D as (groups, 64, N) float32."""
    n, groups = registers.shape[0] * 4, registers.shape[1]
    parts = np.ascontiguousarray(registers).view(np.float16).reshape(n // 8, 2, groups, 4, 8, 4, 2)
    return parts.transpose(2, 3, 1, 4, 0, 5, 6).reshape(groups, 64, n).astype(np.float32)


def half_accumulator_registers(matrix: np.ndarray) -> np.ndarray:
    """The reverse of half_accumulator."""
    groups, _, n = matrix.shape
    parts = matrix.astype(np.float16).reshape(groups, 4, 2, 8, n // 8, 4, 2)
    return np.ascontiguousarray(parts.transpose(4, 2, 0, 1, 3, 5, 6)).view(np.uint32).reshape(n // 4, groups, 128)
