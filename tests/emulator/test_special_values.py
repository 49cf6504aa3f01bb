"""Corners of the ISA where a plain formula goes wrong: NaN to integers, .ftz of halves, clamps, far quotients."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ptx_lab import THREADS, apply

F32 = np.float32
NAN, INF = math.nan, math.inf


def filled(values: list, dtype: type) -> np.ndarray:
    return np.resize(np.array(values, dtype), THREADS)


@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_a_nan_becomes_zero_or_the_top_bit(source, target):
    """PTX ISA 9.7.9.22: NaN is 0, but 1 << (width - 1) from f64 and to 64 bits; infinities clamp."""
    kind = {"f16": np.float16, "f32": F32, "f64": np.float64}[source]
    x, bits, is_signed = filled([NAN, INF, -INF, 1.5], kind), int(target[1:]), target[0] == "s"
    top = 1 << (bits - 1)
    want = [top if source == "f64" or bits == 64 else 0, top - 1 if is_signed else 2 * top - 1, top * is_signed, 1]
    if is_signed:
        want = [v - 2 * top if v >= top else v for v in want]
    word = f"u{max(16, bits) // 8}"
    got = apply(f"cvt.rzi.{target}.{source} %o, %a;", {"a": x.view(f"u{x.itemsize}")}, {"o": word})["o"]
    assert got[:4].tolist() == [v % (1 << max(16, bits)) for v in want]


def test_64_bit_integers_round_once_to_bf16():
    """2**62 + 2**54 + 1 lies above the middle of two bf16, though no f64 says so."""
    x = filled([2**62 + 2**54 + 1, 2**62 + 2**54, -(2**62) - 2**54 - 1], np.int64)
    got = apply("cvt.rn.bf16.s64 %o, %a;", {"a": x.view(np.uint64)}, {"o": np.uint16})["o"]
    want = np.array([2.0**62 + 2.0**55, 2.0**62, -(2.0**62) - 2.0**55], F32).view(np.uint32) >> 16
    assert got[:3].tolist() == want.tolist()


def test_bmsk_clamps_a_position_past_the_word():
    """A position of 256 is past the word, not 0."""
    a, b = filled([0, 31, 32, 256, 2**31], np.uint32), filled([5, 40, 1], np.uint32)
    got = apply("bmsk.clamp.b32 %o, %a, %b;", {"a": a, "b": b}, {"o": np.uint32})["o"]
    assert got.tolist() == [((1 << min(int(y), 32)) - 1 << min(int(x), 32)) % 2**32 for x, y in zip(a, b, strict=True)]


def test_ftz_of_f16_reaches_comparisons_and_signs():
    """setp, set, neg and abs with .ftz take subnormal halves for zeros of their sign."""
    words = [0x0001, 0x8001, 0x0000, 0x03FF, 0x0400, 0x8400]
    a, b = filled(np.repeat(words, 6), np.uint16), filled(np.tile(words, 6), np.uint16)
    flushed = [np.where(x & 0x7C00, x, x & 0x8000).astype(np.uint16) for x in (a, b)]
    less = flushed[0].view(np.float16) < flushed[1].view(np.float16)
    body = """setp.lt.ftz.f16 %p, %a, %b; mov.b32 %r5, {%a, %b}; mov.b32 %r6, {%b, %b};
    setp.lt.ftz.f16x2 %q|%s, %r5, %r6;
    set.lt.ftz.u32.f16 %w, %a, %b; neg.ftz.f16 %n, %a; abs.ftz.f16 %m, %a;"""
    outputs = {"p": bool, "q": bool, "s": bool, "w": np.uint32, "n": np.uint16, "m": np.uint16}
    got = apply(body, {"a": a, "b": b}, outputs)
    assert np.array_equal(got["p"], less) and np.array_equal(got["q"], less) and not got["s"].any()
    assert np.array_equal(got["w"], np.where(less, 0xFFFFFFFF, 0))
    assert np.array_equal(got["n"], flushed[0] ^ 0x8000) and np.array_equal(got["m"], flushed[0] & 0x7FFF)


def test_slct_with_ftz_takes_a_negative_subnormal_for_zero():
    """slct.ftz selects the first source where the flushed third is not negative, -0 included."""
    c = filled([1e-40, -1e-40, -1.0, NAN, -0.0], F32).view(np.uint32)
    body = "mov.u32 %r5, 7; mov.u32 %r6, 9; slct.ftz.f32.f32 %o, %r5, %r6, %c; slct.f32.f32 %z, %r5, %r6, %c;"
    got = apply(body, {"c": c}, {"o": np.uint32, "z": np.uint32})
    assert got["o"][:5].tolist() == [7, 7, 9, 9, 7] and got["z"][:5].tolist() == [7, 9, 9, 9, 7]


def test_a_nan_has_no_sign_of_xorsign():
    """min.NaN.xorsign.abs gives the canonical NaN, whatever the signs."""
    a, b = filled([NAN, -1.0, -NAN, -2.0], F32), filled([-1.0, NAN, 3.0, 3.0], F32)
    body = "min.NaN.xorsign.abs.f32 %o, %a, %b;"
    got = apply(body, {"a": a.view(np.uint32), "b": b.view(np.uint32)}, {"o": np.uint32})["o"]
    assert got[:4].tolist() == [0x7FFFFFFF] * 3 + [0xC0000000]


def test_div_approx_past_two_to_the_126():
    """PTX ISA 9.7.3.8: a denominator above 2**126 gives 0, and NaN below an infinity; div.full divides."""
    a, b = filled([1.0, INF, -3.0, 2.0**127], F32), filled([2.0**127, 2.0**127, 2.0**126.5, 2.0**126], F32)
    body = "div.approx.f32 %o, %a, %b; div.full.f32 %z, %a, %b;"
    got = apply(body, {"a": a.view(np.uint32), "b": b.view(np.uint32)}, {"o": F32, "z": F32})
    assert np.array_equal(got["o"][:4], np.array([0, NAN, 0, 2], F32), equal_nan=True)
    assert np.array_equal(got["z"], a / b)
