"""Element types of tensor cores as float32 or float64 arrays, and back."""

from __future__ import annotations

import numpy as np

from .small_floats import table

_BLAS_ALONE = 1 << 17  # multiplications that OpenBLAS does on one thread (measured limit: 2^18)


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bytes (…, n) as values (…, n / size): float32, or float64 for integers (products stay exact)."""
    raw = np.ascontiguousarray(raw)
    if kind == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    if kind == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("e4m3", "e5m2"):
        return table(kind)[raw]
    if kind in ("e2m1", "e2m3", "e3m2"):
        return _small(raw, kind)
    if kind == "e2m1 packed":
        return table("e2m1")[np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], -1)]
    return raw.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)


def _small(raw: np.ndarray, kind: str) -> np.ndarray:
    """Sixteen elements of 4 or 6 bits at the front of every 16 bytes."""
    width = 4 if kind == "e2m1" else 6
    units = raw.reshape(*raw.shape[:-1], -1, 16)[..., : 2 * width]
    bits = np.unpackbits(units, axis=-1, bitorder="little").reshape(*units.shape[:-1], 16, width)
    code = (bits << np.arange(width, dtype=np.uint8)).sum(-1)
    return table(kind)[code].reshape(*raw.shape[:-1], -1)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B^T, in pieces so small that BLAS starts no threads: those cost far more than they save here."""
    out = np.empty((a.shape[0], b.shape[0]), np.result_type(a, b))
    step = max(8, _BLAS_ALONE // (b.shape[0] * b.shape[1]))
    for row in range(0, a.shape[0], step):
        np.matmul(a[row : row + step], b.T, out=out[row : row + step])
    return out


def scale_factors(words: np.ndarray, kind: str, first: int, count: int) -> np.ndarray:
    """(rows, count) factors from a row's TMEM word: bytes ``first`` on."""
    codes = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], 4)[:, first : first + count]
    return np.abs(table("e4m3" if kind == "ue4m3" else kind)[codes])


def read_result(words: np.ndarray, kind: str) -> np.ndarray:
    """32-bit cells of an accumulator as numbers; an f16 result sits in the low half of its cell."""
    if kind == "f32":
        return words.view(np.float32)
    if kind == "s32":
        return words.view(np.int32).astype(np.float64)
    return words.astype(np.uint16).view(np.float16).astype(np.float32)


def write_result(values: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """The reverse; integers wrap unless they saturate."""
    if kind == "f32":
        return np.ascontiguousarray(values, np.float32).view(np.uint32)
    if kind == "s32":
        wide = values.astype(np.int64)
        if saturate:
            wide = np.clip(wide, -(1 << 31), (1 << 31) - 1)
        return (wide & 0xFFFFFFFF).astype(np.uint32)
    return values.astype(np.float16).view(np.uint16).astype(np.uint32)
