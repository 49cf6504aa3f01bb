"""Exact rounding of fractions to binary formats: the tests' own reference, independent of NumPy's casts."""

from __future__ import annotations

import struct
from fractions import Fraction

FORMATS = {"bf16": (8, -126, 127), "f16": (11, -14, 15), "f32": (24, -126, 127)}


def value(bits: int, kind: str) -> Fraction | float:
    """The number that a bit pattern stands for; float for infinities and NaN."""
    precision, low, _ = FORMATS[kind]
    mantissa_bits = precision - 1
    exponent_bits = {"bf16": 8, "f16": 5, "f32": 8}[kind]
    sign = -1 if bits >> (mantissa_bits + exponent_bits) & 1 else 1
    exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    if exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * Fraction(mantissa) * Fraction(2) ** (low - mantissa_bits)
    return sign * (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent + low - 1)


def nearest(x: Fraction, kind: str) -> int:
    """Bits of ``x`` rounded to nearest even, overflow to infinity. Zero results are +0."""
    precision, low, high = FORMATS[kind]
    mantissa_bits = precision - 1
    exponent_bits = {"bf16": 8, "f16": 5, "f32": 8}[kind]
    sign = (1 << (mantissa_bits + exponent_bits)) if x < 0 else 0
    magnitude = abs(x)
    if magnitude == 0:
        return 0
    exponent = max(low, magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    scaled = magnitude / Fraction(2) ** (exponent - mantissa_bits)
    rounded = round(scaled)  # Fraction rounds halves to even
    if rounded >= 1 << precision:
        rounded, exponent = rounded // 2, exponent + 1
    if exponent > high:
        return sign | ((1 << exponent_bits) - 1) << mantissa_bits
    if rounded < 1 << mantissa_bits:
        return sign | rounded
    return sign | (exponent - low + 1) << mantissa_bits | (rounded - (1 << mantissa_bits))


def f32(bits: int) -> float:
    """The Python float of f32 bits."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]
