"""Carry chains, 24-bit and dot products, byte selections, packed 16-bit words, halves, f64 and comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_lab import THREADS, apply

EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**32)
MASK = 0xFFFFFFFF


def words(seed: int, bits: int = 32) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = (
        rng.integers(0, 2**bits, THREADS, dtype=f"u{bits // 8}", endpoint=False)
        if bits < 64
        else rng.bytes(8 * THREADS)
    )
    x = np.frombuffer(x, np.uint64).copy() if bits == 64 else x
    x[:6] = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 2]
    return rng.permutation(x)


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (x >> (bits - 1) << bits)


@EXAMPLES
@given(seed=SEEDS)
def test_carry_chains_are_wide_arithmetic(seed):
    """add.cc and addc, sub.cc and subc, mad.lo.cc and madc.hi are 96-bit and 64-bit arithmetic."""
    a = [words(seed + i) for i in range(3)]
    b = [words(seed + 10 + i) for i in range(3)]
    body = "add.cc.u32 %s0, %a0, %b0; addc.cc.u32 %s1, %a1, %b1; addc.u32 %s2, %a2, %b2;"
    body += "sub.cc.u32 %d0, %a0, %b0; subc.cc.u32 %d1, %a1, %b1; subc.u32 %d2, %a2, %b2;".replace("%d", "%e")
    body += "mad.lo.cc.u32 %m0, %a0, %b0, %a1; madc.hi.u32 %m1, %a0, %b0, %b1;"
    names = [f"{n}{i}" for n in "se" for i in range(3)] + ["m0", "m1"]
    inputs = {f"{n}{i}": v for n, x in (("a", a), ("b", b)) for i, v in enumerate(x)}
    got = apply(body, inputs, dict.fromkeys(names, np.uint32))
    for i in range(THREADS):
        x, y = (sum(int(v[i]) << 32 * k for k, v in enumerate(t)) for t in (a, b))
        value = lambda n, c, i=i: sum(int(got[f"{n}{k}"][i]) << 32 * k for k in range(c))  # noqa: E731
        assert value("s", 3) == (x + y) % 2**96 and value("e", 3) == (x - y) % 2**96
        assert value("m", 2) == (int(a[0][i]) * int(b[0][i]) + int(a[1][i]) + (int(b[1][i]) << 32)) % 2**64


def split(x: int, size: int, is_signed: bool, count: int) -> list[int]:
    parts = [x >> size * i & ((1 << size) - 1) for i in range(count)]
    return [signed(p, size) for p in parts] if is_signed else parts


def extend(a: int, b: int, is_signed: bool, wrap: bool) -> int:
    n = b & 31 if wrap else min(b, 32)
    low = a & ((1 << n) - 1)
    return signed(low, n) if is_signed and n else low


def nth(mask: int, base: int, n: int) -> int:
    base, n = base & 31, signed(n)
    if n == 0:
        return base if mask >> base & 1 else MASK
    spots = [p for p in (range(base, 32) if n > 0 else range(base, -1, -1)) if mask >> p & 1]
    return spots[abs(n) - 1] if abs(n) <= len(spots) else MASK


def pattern(a: int, b: int, c: int, mode: str) -> int:
    data, c = split(b << 32 | a, 8, False, 8), c & 3
    picks = {
        "f4e": [c, c + 1, c + 2, c + 3], "b4e": [c, c - 1, c - 2, c - 3], "rc8": [c] * 4,
        "ecl": [max(c, i) for i in range(4)], "ecr": [min(c, i) for i in range(4)],
        "rc16": [2 * (c & 1), 2 * (c & 1) + 1] * 2,
    }[mode]  # fmt: skip
    return sum(data[p % 8] << 8 * i for i, p in enumerate(picks))


def dot4(a: int, b: int, c: int, sa: bool, sb: bool) -> int:
    return c + sum(x * y for x, y in zip(split(a, 8, sa, 4), split(b, 8, sb, 4), strict=True))


def dot2(a: int, b: int, c: int, high: bool) -> int:
    return c + sum(x * y for x, y in zip(split(a, 16, True, 2), split(b, 8, True, 4)[2 * high :][:2], strict=True))


def pairs(f, a: int, b: int, is_signed: bool) -> int:
    out = [f(x, y) & 0xFFFF for x, y in zip(split(a, 16, is_signed, 2), split(b, 16, is_signed, 2), strict=True)]
    return out[0] | out[1] << 16


LOW = 0xFFFFFF
CASES = [
    ("mul24.lo.u32", lambda a, b: (a & LOW) * (b & LOW)), ("mul24.hi.u32", lambda a, b: (a & LOW) * (b & LOW) >> 16),
    ("mul24.lo.s32", lambda a, b: signed(a, 24) * signed(b, 24)),
    ("mul24.hi.s32", lambda a, b: signed(a, 24) * signed(b, 24) >> 16),
    ("mad24.lo.s32", lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    ("sad.u32", lambda a, b, c: abs(a - b) + c), ("sad.s32", lambda a, b, c: abs(signed(a) - signed(b)) + c),
    ("dp4a.u32.u32", lambda a, b, c: dot4(a, b, c, False, False)),
    ("dp4a.s32.s32", lambda a, b, c: dot4(a, b, c, True, True)),
    ("dp4a.s32.u32", lambda a, b, c: dot4(a, b, c, True, False)),
    ("dp2a.lo.s32.s32", lambda a, b, c: dot2(a, b, c, False)), ("dp2a.hi.s32.s32", lambda a, b, c: dot2(a, b, c, True)),
    ("szext.clamp.s32", lambda a, b: extend(a, b & 63, True, False)),
    ("szext.wrap.s32", lambda a, b: extend(a, b & 63, True, True)),
    ("szext.clamp.u32", lambda a, b: extend(a, b & 63, False, False)),
    ("bmsk.wrap.b32", lambda a, b: (1 << (b & 31)) - 1 << (a & 31)),
    ("fns.b32", lambda a, b, c: nth(a, b & 31, signed(c & 7, 3))),
    *((f"prmt.b32.{m}", lambda a, b, c, m=m: pattern(a, b, c, m)) for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")),
    ("add.u16x2", lambda a, b: pairs(lambda x, y: x + y, a, b, False)),
    ("min.s16x2", lambda a, b: pairs(min, a, b, True)), ("max.u16x2", lambda a, b: pairs(max, a, b, False)),
    ("max.relu.s16x2", lambda a, b: pairs(lambda x, y: max(x, y, 0), a, b, True)),
    ("min.relu.s32", lambda a, b: max(min(signed(a), signed(b)), 0)),
]  # fmt: skip


@pytest.mark.parametrize(("opcode", "formula"), CASES, ids=[c[0] for c in CASES])
@EXAMPLES
@given(seed=SEEDS)
def test_integer_opcodes_follow_their_formula(opcode, formula, seed):
    """Words in, the formula's word out."""
    count = formula.__code__.co_argcount - (1 if formula.__defaults__ else 0)
    x = {n: words(seed + i) for i, n in enumerate("abc"[:count])}
    sources = ", ".join("%" + n for n in x)
    body = f"{opcode} %o, {sources};"
    if opcode.startswith("szext"):
        body = f"and.b32 %b, %b, 63; {opcode} %o, {sources};"
    if opcode == "fns.b32":
        body = f"and.b32 %b, %b, 31; shl.b32 %c, %c, 29; shr.s32 %c, %c, 29; {opcode} %o, {sources};"
    got = apply(body, x, {"o": np.uint32})["o"]
    for i in range(THREADS):
        assert got[i] == formula(*(int(v[i]) for v in x.values())) & MASK


def test_lop3_with_a_predicate():
    """The truth of the word is combined with the predicate."""
    a, b = words(1), words(2)
    body = (
        "setp.lt.u32 %p1, %r0, 32; lop3.or.b32 %o|%p, %a, %b, %a, 0xc0, %p1; lop3.and.b32 %o2|%q, %a, %b, 0, 0xc0, %p1;"
    )
    got = apply(".reg .b32 %o2;" + body, {"a": a, "b": b}, {"o": np.uint32, "p": bool, "q": bool})
    early = np.arange(THREADS) < 32
    assert np.array_equal(got["o"], a & b)
    assert np.array_equal(got["p"], (a & b != 0) | early) and np.array_equal(got["q"], (a & b != 0) & early)


@pytest.mark.parametrize(("kind", "number"), [("f32", np.float32), ("f64", np.float64)])
def test_classes_signs_and_extremes_of_floats(kind, number):
    """testp, copysign, min, max and min.xorsign.abs at special values."""
    word, info = (np.uint32 if kind == "f32" else np.uint64), np.finfo(number)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, info.tiny / 2, -info.tiny, 1.5]
    a = np.repeat(np.array(special, number), 8)
    b = np.tile(np.array(special, number), 8)
    classes = ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]
    body = "".join(f"testp.{c}.{kind} %{c}, %a;" for c in classes)
    body += f"copysign.{kind} %copy, %a, %b; min.{kind} %min, %a, %b; max.{kind} %max, %a, %b;"
    names = dict.fromkeys(("copy", "min", "max"), word)
    if kind == "f32":
        body += "min.xorsign.abs.f32 %xor, %a, %b;"
        names["xor"] = word
    got = apply(body, {"a": a.view(word), "b": b.view(word)}, {**dict.fromkeys(classes, bool), **names})
    value = {n: got[n].view(number) for n in names}
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        normal = math.isfinite(x) and abs(x) >= info.tiny
        want = [math.isfinite(x), math.isinf(x), not math.isnan(x), math.isnan(x), normal, x != 0 and not normal
                and math.isfinite(x)]  # fmt: skip
        assert [bool(got[c][i]) for c in classes] == want
        assert math.copysign(1, value["copy"][i]) == math.copysign(1, x)
        assert abs(value["copy"][i]) == abs(y) or math.isnan(y)
        for name, pick in (("min", min), ("max", max)):
            left = [v for v in (x, y) if not math.isnan(v)]
            if left:
                best = pick(left, key=lambda v: (v, math.copysign(1, v)))
                assert value[name][i] == best and math.copysign(1, value[name][i]) == math.copysign(1, best)
        if kind == "f32" and not math.isnan(x) and not math.isnan(y):
            sign = math.copysign(1, x) * math.copysign(1, y)
            assert abs(value["xor"][i]) == min(abs(x), abs(y)) and math.copysign(1, value["xor"][i]) == sign


@pytest.mark.parametrize("compare", ["lt", "ge", "equ", "num", "ne"])
def test_set_and_setp_of_halves(compare):
    """set writes ones or 1.0; setp of two halves writes two predicates."""
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-3, 4, 2 * THREADS).astype(np.float16) for _ in range(2))
    a[::7] = np.nan
    unordered = np.isnan(a) | np.isnan(b)
    want = {"lt": a < b, "ge": a >= b, "equ": (a == b) | unordered, "num": ~unordered, "ne": (a != b) & ~unordered}[
        compare
    ]
    body = f"set.{compare}.u32.f16x2 %mask, %a, %b; set.{compare}.f16x2.f16x2 %one, %a, %b; mov.b32 {{%h1, %h2}}, %a;"
    body += f"mov.b32 {{%h3, %h4}}, %b; set.{compare}.u32.f16 %low, %h1, %h3; setp.{compare}.f16x2 %p|%q, %a, %b;"
    words_of = lambda x: x.view(np.uint32)  # noqa: E731
    outputs = {"mask": np.uint32, "one": np.uint32, "low": np.uint32, "p": bool, "q": bool}
    got = apply(body, {"a": words_of(a), "b": words_of(b)}, outputs)
    rows = want.reshape(-1, 2)
    assert np.array_equal(got["mask"], np.where(rows[:, 0], 0xFFFF, 0) | np.where(rows[:, 1], 0xFFFF0000, 0))
    assert np.array_equal(got["one"].view(np.float16), want.astype(np.float16))
    assert np.array_equal(got["low"], np.where(rows[:, 0], MASK, 0))
    assert np.array_equal(got["p"], rows[:, 0]) and np.array_equal(got["q"], rows[:, 1])


def test_halves_saturate_flush_and_combine_signs():
    """.sat, .ftz and .xorsign.abs of f16x2."""
    rng = np.random.default_rng(4)
    a, b = (rng.uniform(-2, 2, 2 * THREADS).astype(np.float16) for _ in range(2))
    a[:8] = 1e-6
    body = "add.sat.f16x2 %s, %a, %b; mul.ftz.f16x2 %f, %a, %b; max.xorsign.abs.f16x2 %x, %a, %b;"
    got = apply(body, {"a": a.view(np.uint32), "b": b.view(np.uint32)}, dict.fromkeys("sfx", np.uint32))
    got = {n: v.view(np.float16) for n, v in got.items()}
    assert np.array_equal(got["s"], np.clip(a + b, 0, 1))
    product = np.where(np.abs(a) < 2.0**-14, 0, a).astype(np.float32) * b.astype(np.float32)
    assert np.array_equal(got["f"], np.where(np.abs(product) < 2.0**-14, 0, product).astype(np.float16))
    assert np.array_equal(got["x"], np.copysign(np.maximum(np.abs(a), np.abs(b)), np.sign(a) * np.sign(b)))


def test_approximate_f64_keeps_the_upper_word():
    """rcp.approx.ftz.f64 and rsqrt.approx.f64."""
    x = np.random.default_rng(5).uniform(0.1, 9, THREADS)
    body = "rcp.approx.ftz.f64 %o, %a; rsqrt.approx.f64 %s, %a;"
    got = apply(body, {"a": x.view(np.uint64)}, {"o": np.uint64, "s": np.uint64})
    assert not (got["o"] & MASK).any() and np.allclose(got["o"].view(np.float64), 1 / x, rtol=1e-6)
    assert np.allclose(got["s"].view(np.float64), x**-0.5, rtol=1e-12)


def test_cvt_pack_clamps_and_shifts():
    """cvt.pack.sat to 8 bits pushes the third word up; to 16 bits it packs two."""
    a, b, c = words(6), words(7), words(8)
    body = "cvt.pack.sat.u8.s32.b32 %o, %a, %b, %c; cvt.pack.sat.s16.s32 %h2x, %a, %b;"
    got = apply(body.replace("%h2x", "%w"), {"a": a, "b": b, "c": c}, {"o": np.uint32, "w": np.uint32})
    for i in range(THREADS):
        x, y = signed(int(a[i])), signed(int(b[i]))
        byte = lambda v: min(max(v, 0), 255)  # noqa: E731
        short = lambda v: min(max(v, -32768), 32767) & 0xFFFF  # noqa: E731
        assert got["o"][i] == (int(c[i]) << 16 & MASK) | byte(x) << 8 | byte(y)
        assert got["w"][i] == short(x) << 16 | short(y)
