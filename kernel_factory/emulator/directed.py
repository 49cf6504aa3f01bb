"""Directed rounding and fused f64 arithmetic by error-free transformations (PTX ISA 9.7.3: .rn, .rz, .rm, .rp).

A result rounded to nearest and the sign of what was rounded away decide every other rounding. Knuth's two-sum and
Dekker's two-product give that sign; ``fma64`` adds the parts with one rounding (Boldo and Melquiond, round to odd).
"""

from __future__ import annotations

import numpy as np

from .numerics import to_f32_odd
from .registry import runtime

_F32, _F64 = np.float32, np.float64
_SPLIT = _F64(134217729.0)  # 2**27 + 1


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum and its exact error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded f64 product and its exact error."""
    p = a * b
    ah = a * _SPLIT
    ah = ah - (ah - a)
    bh = b * _SPLIT
    bh = bh - (bh - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def step(s: np.ndarray, error: np.ndarray, rounding: str) -> np.ndarray:
    """``s`` rounded to nearest, moved to the neighbour that ``rounding`` wants; ``error`` is exact minus ``s``."""
    if rounding == "rn":
        return s
    down = np.nextafter(s, s.dtype.type(-np.inf))
    up = np.nextafter(s, s.dtype.type(np.inf))
    lower, higher = error < 0, error > 0
    if rounding == "rm":
        return np.where(lower, down, s)
    if rounding == "rp":
        return np.where(higher, up, s)
    return np.where((s > 0) & lower, down, np.where((s < 0) & higher, up, s))


def _overflow(s: np.ndarray, finite: np.ndarray, rounding: str) -> np.ndarray:
    """Finite operands whose sum or product overflows stay at the largest number where rounding leads away."""
    top = np.finfo(s.dtype).max
    if rounding in ("rz", "rm"):
        s = np.where(finite & (s == np.inf), top, s)
    if rounding in ("rz", "rp"):
        s = np.where(finite & (s == -np.inf), -top, s)
    return s


def _nothing_left(s: np.ndarray, error: np.ndarray, positive: np.ndarray, rounding: str) -> np.ndarray:
    """x - x is -0 when rounding down."""
    return np.where((s == 0) & (error == 0) & ~positive, s.dtype.type(-0.0), s) if rounding == "rm" else s


@runtime
def add_rounded(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a + b of f32 or f64."""
    s, error = two_sum(a, b)
    error = np.where(np.isfinite(s), error, 0)
    out = _overflow(step(s, error, rounding), np.isfinite(a) & np.isfinite(b), rounding)
    return _nothing_left(out, error, (a == 0) & (b == 0) & ~(np.signbit(a) | np.signbit(b)), rounding)


@runtime
def multiply_rounded(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a * b of f32 (exact in f64) or f64."""
    if a.dtype == _F32:
        exact = a.astype(_F64) * b.astype(_F64)
        return narrow(exact, np.zeros(1), rounding, np.isfinite(a) & np.isfinite(b))
    p, error = two_product(a, b)
    safe = np.isfinite(error) & np.isfinite(p)
    return _overflow(step(p, np.where(safe, error, 0), rounding), np.isfinite(a) & np.isfinite(b), rounding)


@runtime
def narrow(high: np.ndarray, low: np.ndarray, rounding: str, finite: np.ndarray) -> np.ndarray:
    """The f64 sum high + low (|low| below half a unit of high) to f32 with one rounding."""
    odd = round_to_odd(high, low)
    s = odd.astype(_F32)
    error = np.where(np.isfinite(s), odd - s.astype(_F64), 0)
    return _overflow(step(s, error, rounding), finite, rounding)


def round_to_odd(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """high + low as an f64 whose last bit is set whenever something is lost."""
    bits = np.ascontiguousarray(high).view(np.int64)
    inexact = (low != 0) & np.isfinite(high) & np.isfinite(low)
    towards_zero = inexact & ((low < 0) ^ (high < 0)) & (high != 0)
    return np.where(inexact, (bits - towards_zero) | 1, bits).view(_F64)


@runtime
def fma_rounded(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str) -> np.ndarray:
    """a * b + c with one rounding."""
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    positive = ~(np.signbit(a) ^ np.signbit(b)) & ~np.signbit(c) & (c == 0)
    if a.dtype == _F32:
        high, low = two_sum(a.astype(_F64) * b.astype(_F64), c.astype(_F64))
        low = np.where(np.isfinite(high), low, 0)
        out = narrow(high, low, rounding, finite)
        return _nothing_left(out, high, positive, rounding)
    high, low = _fma_parts(a, b, c)
    exact = np.isfinite(high) & np.isfinite(low)
    plain = a * b + c
    out = np.where(exact, step(high, low, rounding), plain)
    return _nothing_left(_overflow(out, finite, rounding), np.where(exact, low + high, 0), positive, rounding)


@runtime
def fma_half(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of f32 values that hold halves, as an f32 that a later rounding to a half rounds only once."""
    high, low = two_sum(a.astype(_F64) * b, c.astype(_F64))
    return to_f32_odd(round_to_odd(high, np.where(np.isfinite(high), low, 0)))


def _fma_parts(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """fma rounded to nearest, and what was lost (its sign is exact); NaN where the parts overflow."""
    uh, ul = two_product(a, b)
    th, tl = two_sum(c, ul)
    vh, vl = two_sum(uh, th)
    rest, lost = two_sum(tl, vl)
    z = round_to_odd(rest, lost)
    out, error = two_sum(vh, z)
    return out, error


@runtime
def divide_rounded(a: np.ndarray, b: np.ndarray, rounding: str) -> np.ndarray:
    """a / b of f32 or f64."""
    kind = a.dtype
    if kind == _F32:
        wide_a, wide_b = np.broadcast_arrays(a.astype(_F64), b.astype(_F64))
        s = (wide_a / wide_b).astype(_F32)
        left = wide_a - s.astype(_F64) * wide_b
    else:
        wide_a, wide_b = np.broadcast_arrays(a, b)
        s = wide_a / wide_b
        left = fma_rounded(-s, wide_b, wide_a, "rn")
    error = np.where(np.isfinite(s) & np.isfinite(left), np.where(wide_b < 0, -left, left), 0)
    finite = np.isfinite(wide_a) & np.isfinite(wide_b) & (wide_b != 0)
    return _overflow(step(s, error.astype(_F64), rounding).astype(kind), finite, rounding)


@runtime
def root_rounded(a: np.ndarray, rounding: str) -> np.ndarray:
    """Square root of f32 or f64."""
    if a.dtype == _F32:
        wide = a.astype(_F64)
        s = np.sqrt(wide).astype(_F32)
        left = wide - s.astype(_F64) * s.astype(_F64)
    else:
        s = np.sqrt(a)
        left = fma_rounded(-s, s, a, "rn")
    return step(s, np.where(np.isfinite(left), left, 0), rounding)
