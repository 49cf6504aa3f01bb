"""Rounding modes of f32 and f64, halves and integers, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_lab import THREADS, apply

EXAMPLES = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
WORDS = {"f32": np.uint32, "f64": np.uint64}
FLOATS = {"f32": np.float32, "f64": np.float64}


def rounded(x: Fraction, mode: str, kind: str) -> float:
    """The float next to an exact value, below it or above it or nearest to it."""
    number = FLOATS[kind]
    try:
        s = number(float(x))
    except OverflowError:
        s = number(math.copysign(np.finfo(number).max, x))
    if np.isinf(s):
        s = number(math.copysign(np.finfo(number).max, x))
    while Fraction(float(s)) > x:
        s = np.nextafter(s, number(-np.inf))
    up = np.nextafter(s, number(np.inf))
    while np.isfinite(up) and Fraction(float(up)) <= x:
        s, up = up, np.nextafter(up, number(np.inf))
    if Fraction(float(s)) == x or mode == "rm":
        return float(s)
    if mode == "rz":
        return float(s) if x > 0 else float(up)
    if mode == "rp":
        return float(up)
    low, high = x - Fraction(float(s)), Fraction(float(up)) - x
    even = not int(np.array(s).view(WORDS[kind])) & 1
    return float(s) if low < high or (low == high and even) else float(up)


def values(kind: str, seed: int, span: int = 12) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(THREADS) * np.exp2(rng.integers(-span, span, THREADS))
    return x.astype(FLOATS[kind])


EXACT = {
    "add": lambda a, b, c: a + b, "sub": lambda a, b, c: a - b, "mul": lambda a, b, c: a * b,
    "fma": lambda a, b, c: a * b + c, "div": lambda a, b, c: a / b, "rcp": lambda a, b, c: 1 / a,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp", "rn"])
@pytest.mark.parametrize("op", list(EXACT))
@EXAMPLES
@given(seed=st.integers(0, 2**32), close=st.booleans())
def test_arithmetic_rounds_once_in_every_mode(op, mode, kind, seed, close):
    """The result is the exact value rounded once; also where a sum cancels."""
    a, b, c = (values(kind, seed + i) for i in range(3))
    if close:
        c = (-a * b).astype(FLOATS[kind])
        b = np.where(np.arange(THREADS) % 2, b, -a).astype(FLOATS[kind]) if op in ("add", "sub") else b
    names = {"rcp": "a", "fma": "abc"}.get(op, "ab")
    word = WORDS[kind]
    inputs = {n: v.view(word) for n, v in zip("abc", (a, b, c), strict=True) if n in names}
    got = apply(f"{op}.{mode}.{kind} %o, {', '.join('%' + n for n in names)};", inputs, {"o": word})["o"]
    for i in range(THREADS):
        x = EXACT[op](*(Fraction(float(v[i])) for v in (a, b, c)))
        if kind == "f64" and op == "fma" and close and abs(x) < Fraction(2) ** -900:
            continue
        assert float(got.view(FLOATS[kind])[i]) == rounded(x, mode, kind), (a[i], b[i], c[i])


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp", "rn"])
def test_square_roots_round_once_in_every_mode(kind, mode):
    """The neighbours of the exact root bracket it."""
    x = np.abs(values(kind, 5))
    got = apply(f"sqrt.{mode}.{kind} %o, %a;", {"a": x.view(WORDS[kind])}, {"o": WORDS[kind]})["o"].view(FLOATS[kind])
    for v, s in zip(x, got, strict=True):
        exact, up, down = Fraction(float(v)), np.nextafter(s, FLOATS[kind](np.inf)), np.nextafter(s, FLOATS[kind](0))
        square = Fraction(float(s)) ** 2
        if mode in ("rz", "rm"):
            assert square <= exact < Fraction(float(up)) ** 2
        elif mode == "rp":
            assert Fraction(float(down)) ** 2 < exact <= square
        else:
            half_up, half_down = (Fraction(float(s)) + Fraction(float(t)) for t in (up, down))
            assert half_down**2 <= 4 * exact <= half_up**2


def test_directed_sums_at_the_edges():
    """Overflow stops at the largest number where rounding leads away from it; x - x is -0 only when rounding down."""
    top = np.full(THREADS, np.finfo(np.float32).max, np.float32).view(np.uint32)
    body = "".join(f"add.{m}.f32 %{m}, %a, %a; sub.{m}.f32 %z{m}, %a, %a;" for m in ("rz", "rm", "rp", "rn"))
    outputs = {n: np.uint32 for m in ("rz", "rm", "rp", "rn") for n in (m, f"z{m}")}
    got = {n: int(v[0]) for n, v in apply(body, {"a": top}, outputs).items()}
    assert got["rz"] == got["rm"] == top[0] and got["rp"] == got["rn"] == 0x7F800000
    assert got["zrm"] == 0x80000000 and got["zrz"] == got["zrp"] == got["zrn"] == 0


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("target", ["f32", "f64"])
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@EXAMPLES
@given(seed=st.integers(0, 2**32))
def test_integers_become_floats_in_every_mode(source, target, mode, seed):
    """cvt of integers rounds the exact value once."""
    number = {"s32": np.int32, "u32": np.uint32, "s64": np.int64, "u64": np.uint64}[source]
    info = np.iinfo(number)
    x = np.random.default_rng(seed).integers(info.min, info.max, THREADS, dtype=number, endpoint=True)
    word = WORDS[target]
    got = apply(f"cvt.{mode}.{target}.{source} %o, %a;", {"a": x.view(f"u{x.itemsize}")}, {"o": word})["o"]
    for v, s in zip(x.tolist(), got.view(FLOATS[target]), strict=True):
        assert float(s) == rounded(Fraction(v), mode, target)


HALVES = {"f16": (10, -24, 0x7BFF), "bf16": (7, -133, 0x7F7F)}


def half_value(bits: int, kind: str) -> Fraction:
    if kind == "f16":
        return Fraction(float(np.uint16(bits).view(np.float16)))
    return Fraction(float((np.array([bits], np.uint32) << 16).view(np.float32)[0]))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rz", "rn"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_become_halves_in_every_mode(kind, mode, source):
    """cvt to a half gives the neighbour of the exact value that the mode names."""
    x = np.concatenate([values(source, 9, 6)[:60], [0, -0.0, 1, -1]]).astype(FLOATS[source])
    got = apply(f"cvt.{mode}.{kind}.{source} %o, %a;", {"a": x.view(WORDS[source])}, {"o": np.uint16})["o"]
    for v, bits in zip(x, got.tolist(), strict=True):
        assert bits >> 15 == int(np.signbit(v))
        exact, low = abs(Fraction(float(v))), half_value(bits & 0x7FFF, kind)
        up, down = half_value((bits & 0x7FFF) + 1, kind), half_value(max(0, (bits & 0x7FFF) - 1), kind)
        if mode == "rz":
            assert low <= exact < up
        else:
            assert abs(exact - low) <= min(abs(exact - up), abs(exact - down) if bits & 0x7FFF else exact + 1)


def test_f64_narrows_to_f32_in_every_mode():
    """cvt.rX.f32.f64 rounds once."""
    x = values("f64", 3)
    for mode in ("rn", "rz", "rm", "rp"):
        got = apply(f"cvt.{mode}.f32.f64 %o, %a;", {"a": x.view(np.uint64)}, {"o": np.uint32})["o"].view(np.float32)
        assert [float(g) for g in got] == [rounded(Fraction(float(v)), mode, "f32") for v in x]
