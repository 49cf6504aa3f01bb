"""Floats of 4, 6 and 8 bits and tf32: tables both ways (PTX ISA 5.2.3, alternate floating-point formats)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .registry import runtime

# exponent bits, mantissa bits, bias, bits a value; e4m3 has no infinity, the 4- and 6-bit types neither NaN
FORMATS = {
    "e4m3": (4, 3, 7, 8),
    "e5m2": (5, 2, 15, 8),
    "e2m3": (2, 3, 1, 6),
    "e3m2": (3, 2, 3, 6),
    "e2m1": (2, 1, 1, 4),
}


@lru_cache
def table(kind: str) -> np.ndarray:
    """The f32 value of every code."""
    if kind == "ue8m0":
        out = np.exp2(np.arange(256, dtype=np.float64) - 127).astype(np.float32)
        out[255] = np.nan
        return out
    exponent_bits, mantissa_bits, bias, bits = FORMATS[kind]
    code = np.arange(1 << bits)
    sign = np.where(code >> (bits - 1), -1.0, 1.0)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent > 0, (1 + mantissa) * np.exp2(exponent - bias), mantissa * np.exp2(1.0 - bias))
    if kind == "e4m3":
        value[(code & 0x7F) == 0x7F] = np.nan
    elif kind == "e5m2":
        value[(code & 0x7C) == 0x7C] = np.where(code[(code & 0x7C) == 0x7C] & 3, np.nan, np.inf)
    return (sign * value).astype(np.float32)


@lru_cache
def _positive(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite values of the codes 0, 1, 2, … and the midpoints between neighbours."""
    values = table(kind)[: 1 << (FORMATS[kind][3] - 1)].astype(np.float64)
    values = values[np.isfinite(values)]
    return values, (values[1:] + values[:-1]) / 2


@runtime
def small_value(code: np.ndarray, kind: str) -> np.ndarray:
    """Codes to f32."""
    return table(kind)[code & (table(kind).shape[0] - 1)]


@runtime
def small_bits(x: np.ndarray, kind: str, finite: bool = True, relu: bool = False) -> np.ndarray:
    """f32 to codes (u32), nearest even; with ``finite`` large values become the largest number (.satfinite)."""
    if relu:
        x = np.where(x < 0, np.float32(0), x)
    values, middles = _positive(kind)
    magnitude = np.abs(x).astype(np.float64)
    below = np.searchsorted(middles, magnitude, "left")
    tie = (below < middles.shape[0]) & (middles[np.minimum(below, middles.shape[0] - 1)] == magnitude)
    code = np.where(tie & (below & 1 == 1), below + 1, below)
    top = values.shape[0] - 1
    if not finite and kind == "e5m2":
        code = np.where(magnitude >= values[top] + (values[top] - values[top - 1]) / 2, 0x7C, code)
    nan = {"e4m3": 0x7F, "e5m2": 0x7F}.get(kind, top)
    bits = FORMATS[kind][3]
    sign = (np.signbit(x) & ~np.isnan(x)).astype(np.int64) << (bits - 1)
    return np.where(np.isnan(x), nan, code | sign).astype(np.uint32)


@runtime
def scale_bits(x: np.ndarray, up: bool) -> np.ndarray:
    """f32 to ue8m0 (u32): the power of two at or below (.rz), or at or above (.rp); saturating."""
    a = np.abs(x).astype(np.float64)
    mantissa, exponent = np.frexp(a)
    power = np.where(mantissa == 0.5, exponent - 1, exponent if up else exponent - 1)
    code = np.clip(power + 127, 0, 254)
    return np.where(np.isnan(x), 255, np.where(a == 0, 0, np.where(np.isinf(a), 254, code))).astype(np.uint32)


@runtime
def tf32_bits(x: np.ndarray, rounding: str, finite: bool = False, relu: bool = False) -> np.ndarray:
    """f32 to tf32 (f32 bits with 13 zeros): .rna (ties away), .rn (ties to even), .rz."""
    if relu:
        x = np.where(x < 0, np.float32(0), x)
    bits = np.ascontiguousarray(x).view(np.uint32)
    if rounding == "rna":
        out = bits + np.uint32(0x1000)
    elif rounding == "rn":
        out = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    else:
        out = bits
    out = out & np.uint32(0xFFFFE000)
    if finite:
        over = (out & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000)
        out = np.where(over, (bits & np.uint32(0x80000000)) | np.uint32(0x7F7FE000), out)
    special = (bits & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000)
    kept = np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)
    return np.where(special & (np.isnan(x) | np.bool_(not finite)), kept, out)
