"""Floats of 4, 6 and 8 bits, tf32 and ue8m0 against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import THREADS, apply

FORMATS = {
    "e4m3": (4, 3, 7, 8),
    "e5m2": (5, 2, 15, 8),
    "e2m3": (2, 3, 1, 6),
    "e3m2": (3, 2, 3, 6),
    "e2m1": (2, 1, 1, 4),
}


def value(code: int, kind: str) -> float:
    """A code's number, from exponent and mantissa."""
    e, m, bias, bits = FORMATS[kind]
    sign = -1.0 if code >> (bits - 1) & 1 else 1.0
    exponent, mantissa = code >> m & ((1 << e) - 1), code & ((1 << m) - 1)
    if kind == "e4m3" and code & 0x7F == 0x7F:
        return float("nan")
    if kind == "e5m2" and exponent == 31:
        return sign * (float("nan") if mantissa else float("inf"))
    if exponent == 0:
        return sign * mantissa / (1 << m) * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / (1 << m)) * 2.0 ** (exponent - bias)


def nearest(x: float, kind: str) -> int:
    """The code of the nearest finite number; ties go to the even code."""
    x, bits = float(x), FORMATS[kind][3]
    if np.isnan(x):
        return {"e4m3": 0x7F, "e5m2": 0x7F}.get(kind, (1 << (bits - 1)) - 1)
    codes = [c for c in range(1 << (bits - 1)) if np.isfinite(value(c, kind))]
    best = min(codes, key=lambda c: (abs(value(c, kind) - abs(x)), c & 1))
    return best | (int(np.signbit(x)) << (bits - 1))


def samples() -> np.ndarray:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(THREADS - 8) * np.exp2(rng.integers(-9, 9, THREADS - 8))
    edge = [0.0, -0.0, 1e9, -1e9, 0.25, 0.75, 2.5, np.nan]
    return np.concatenate([x, edge]).astype(np.float32)


@pytest.mark.parametrize("kind", list(FORMATS))
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_f32_pairs_become_small_floats(kind, relu):
    """cvt.rn.satfinite puts the first source in the upper half and saturates."""
    x = samples()
    out = "%o" if FORMATS[kind][3] > 4 else "%b"
    body = f".reg .b8 %b; cvt.rn.satfinite{relu}.{kind}x2.f32 {out}, %a, %z;"
    if out == "%b":
        body += "mov.b32 %w, {%b, %b, %b, %b}; cvt.u16.u32 %o, %w; and.b16 %o, %o, 255;"
        body = ".reg .b32 %w;" + body
    z = np.roll(x, 1)
    got = apply(body, {"a": x.view(np.uint32), "z": z.view(np.uint32)}, {"o": np.uint16})["o"]
    width = 4 if FORMATS[kind][3] == 4 else 8
    keep = (lambda v: max(v, np.float32(0)) if v < 0 else v) if relu else (lambda v: v)
    for i in range(THREADS):
        assert got[i] == nearest(keep(z[i]), kind) | nearest(keep(x[i]), kind) << width, (x[i], z[i])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m3", "e3m2"])
def test_small_floats_become_halves(kind):
    """cvt.rn.f16x2 of every code is exact."""
    bits = FORMATS[kind][3]
    for start in range(0, 1 << bits, THREADS):
        code = np.arange(start, start + THREADS, dtype=np.uint16) & ((1 << bits) - 1)
        got = apply(f"cvt.rn.f16x2.{kind}x2 %o, %a;", {"a": code | code << 8}, {"o": np.uint32})["o"]
        want = np.array([value(int(c), kind) for c in code], np.float16)
        halves = got.view(np.float16).reshape(-1, 2)
        assert np.array_equal(halves[:, 0], want, equal_nan=True) and np.array_equal(halves[:, 1], want, equal_nan=True)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32_keeps_ten_bits_of_mantissa(mode):
    """cvt to tf32 rounds to 10 bits: ties away from zero, to even, or not at all."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal(THREADS).astype(np.float32)
    x[:4] = [1 + 2**-11, 1 + 3 * 2**-11, -(1 + 2**-11), 2.0]
    got = apply(f"cvt.{mode}.tf32.f32 %o, %a;", {"a": x.view(np.uint32)}, {"o": np.uint32})["o"].view(np.float32)
    mantissa, exponent = np.frexp(x.astype(np.float64))
    scaled = mantissa * 2**11
    whole = {"rz": np.trunc(scaled), "rn": np.rint(scaled), "rna": np.trunc(np.abs(scaled) + 0.5) * np.sign(scaled)}[
        mode
    ]
    assert np.array_equal(got, np.ldexp(whole, exponent - 11).astype(np.float32))


@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_ue8m0_is_a_power_of_two(mode):
    """cvt to ue8m0x2 takes the power of two below or above."""
    x = np.abs(samples())
    x[-1] = 3.0
    got = apply(f"cvt.{mode}.satfinite.ue8m0x2.f32 %o, %a, %a;", {"a": x.view(np.uint32)}, {"o": np.uint16})["o"] & 255
    for v, code in zip(x.astype(np.float64), got.tolist(), strict=True):
        if v == 0:
            assert code == 0
        else:
            power = 2.0 ** (code - 127)
            assert power <= v < 2 * power if mode == "rz" else power / 2 < v <= power
