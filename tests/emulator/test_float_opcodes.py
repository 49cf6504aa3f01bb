"""Float opcodes against exact rational arithmetic, or the true value within the instruction's error bound."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ptx_lab import THREADS, apply
from rounding import nearest, value

EXAMPLES = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
NAN32 = 0x7FC00000
_SPECIAL32 = (
    0,
    0x80000000,
    0x7F800000,
    0xFF800000,
    NAN32,
    1,
    0x80000001,
    0x007FFFFF,
    0x3F800000,
    0xBF800000,
    0x7F7FFFFF,
)
_SPECIAL = {
    "bf16": (0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 1, 0x3F80, 0x7F7F),
    "f16": (0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 1, 0x3C00, 0x7BFF),
}


def floats32(special: bool = True) -> st.SearchStrategy[np.ndarray]:
    """f32 bit patterns: ordinary magnitudes, any magnitude, and (optionally) special values."""
    ordinary = st.builds(
        lambda sign, e, m: sign << 31 | e << 23 | m, st.integers(0, 1), st.integers(110, 140), st.integers(0, 2**23 - 1)
    )
    kinds = [ordinary, st.sampled_from(_SPECIAL32), st.integers(0, 2**32 - 1)] if special else [ordinary]
    return hnp.arrays(np.uint32, THREADS, elements=st.one_of(*kinds), fill=st.nothing())


def halves(kind: str) -> st.SearchStrategy[np.ndarray]:
    elements = st.one_of(st.integers(0, 0xFFFF), st.sampled_from(_SPECIAL[kind]))
    return hnp.arrays(np.uint16, THREADS, elements=elements, fill=st.nothing())


def same(got: int, want: int | None, kind: str = "f32") -> bool:
    """Equal bits; any NaN for None; zeros of either sign are one."""
    number = value(got, kind)
    if want is None:
        return isinstance(number, float) and math.isnan(number)
    wanted = value(want, kind)
    return got == want or (number == 0 and wanted == 0)


def exact(f, kind: str, *bits: int, source: str | None = None) -> int | None:
    """f on the exact values, rounded once; None where a NaN must come out."""
    xs = [value(b, source or kind) for b in bits]
    if any(isinstance(x, float) for x in xs):
        with np.errstate(all="ignore"):
            y = f(*(np.float64(float(x)) for x in xs))
        if math.isnan(y):
            return None
        if math.isinf(y):
            return nearest(Fraction(2) ** 2000 * (1 if y > 0 else -1), kind)
        y = Fraction(float(y))
        return nearest(y, kind)
    return nearest(Fraction(f(*xs)), kind)


ARITHMETIC = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@pytest.mark.parametrize("opcode", ["add.f32", "sub.f32", "mul.f32", "add.rn.f32", "fma.rn.f32"])
@EXAMPLES
@given(data=st.data())
def test_f32_arithmetic_is_correctly_rounded(opcode, data):
    """add, sub, mul and fma of f32 round the exact result once, with IEEE infinities and NaN."""
    f = ARITHMETIC[opcode.split(".")[0]]
    names = "abc"[: f.__code__.co_argcount]
    inputs = {n: data.draw(floats32()) for n in names}
    got = apply(f"{opcode} %o, {', '.join('%' + n for n in names)};", inputs, {"o": np.uint32})["o"]
    for i in range(THREADS):
        bits = [int(inputs[n][i]) for n in names]
        assert same(int(got[i]), exact(f, "f32", *bits)), (opcode, [hex(b) for b in bits], hex(got[i]))


@EXAMPLES
@given(a=floats32(), b=floats32(), c=floats32())
def test_f32x2_works_on_both_halves(a, b, c):
    """Packed f32x2 opcodes give in each half what the scalar opcode gives."""
    scalar = apply(
        "fma.rn.f32 %f, %a, %b, %c; add.f32 %s, %a, %b; sub.f32 %d, %a, %b; mul.f32 %m, %a, %b;",
        {"a": a, "b": b, "c": c}, {"f": np.uint32, "s": np.uint32, "d": np.uint32, "m": np.uint32},
    )  # fmt: skip
    packed = apply(
        """mov.b64 %d10, {%a, %b}; mov.b64 %d11, {%b, %a}; mov.b64 %d12, {%c, %c};
        fma.rn.f32x2 %d13, %d10, %d11, %d12; add.rn.f32x2 %d14, %d10, %d11; sub.rn.f32x2 %d15, %d10, %d11;
        mul.rn.f32x2 %d16, %d10, %d11;
        mov.b64 {%f, %r10}, %d13; mov.b64 {%s, %r11}, %d14; mov.b64 {%d, %r12}, %d15; mov.b64 {%r13, %m}, %d16;""",
        {"a": a, "b": b, "c": c}, {"f": np.uint32, "s": np.uint32, "d": np.uint32, "m": np.uint32},
    )  # fmt: skip
    for name in scalar:
        x, y = scalar[name].view(np.float32), packed[name].view(np.float32)
        assert np.array_equal(x, y, equal_nan=True), name


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "fma.rn"])
@EXAMPLES
@given(data=st.data())
def test_half_arithmetic_rounds_once(kind, opcode, data):
    """bf16x2 and f16x2 arithmetic rounds the exact result once, in both halves, and the scalar form agrees."""
    f = ARITHMETIC[opcode.split(".")[0]]
    names = "abc"[: f.__code__.co_argcount]
    low = {n: data.draw(halves(kind)) for n in names}
    inputs = {n: low[n].astype(np.uint32) | low[n][::-1].astype(np.uint32) << 16 for n in names}
    args = ", ".join("%" + n for n in names)
    unpack = "".join(f"mov.b32 {{%h{i}, %h{i + 9}}}, %{n};" for i, n in enumerate(names))
    scalar = ", ".join(f"%h{i}" for i in range(len(names)))
    body = f"{opcode}.{kind}x2 %o, {args}; {unpack} {opcode}.{kind} %h, {scalar};"
    got = apply(body, inputs, {"o": np.uint32, "h": np.uint16})
    for i in range(THREADS):
        want = [exact(f, kind, *(int(low[n][j]) for n in names)) for j in (i, THREADS - 1 - i)]
        assert same(int(got["o"][i]) & 0xFFFF, want[0], kind) and same(int(got["o"][i]) >> 16, want[1], kind)
        assert same(int(got["h"][i]), want[0], kind)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@EXAMPLES
@given(data=st.data())
def test_mixed_precision_add_takes_a_half_and_an_f32(kind, data):
    """add, sub and fma with .f32.<half> widen the half exactly and round once to f32."""
    a, b, c = data.draw(halves(kind)), data.draw(halves(kind)), data.draw(floats32())
    body = f"add.rn.f32.{kind} %s, %a, %c; sub.rn.f32.{kind} %d, %a, %c; fma.rn.f32.{kind} %f, %a, %b, %c;"
    got = apply(body, {"a": a, "b": b, "c": c}, {"s": np.uint32, "d": np.uint32, "f": np.uint32})
    for i in range(THREADS):
        wide = [np.float32(float(value(int(x[i]), kind))).view(np.uint32) for x in (a, b)]
        x, y, z = int(wide[0]), int(wide[1]), int(c[i])
        assert same(int(got["s"][i]), exact(ARITHMETIC["add"], "f32", x, z))
        assert same(int(got["d"][i]), exact(ARITHMETIC["sub"], "f32", x, z))
        assert same(int(got["f"][i]), exact(ARITHMETIC["fma"], "f32", x, y, z))


@EXAMPLES
@given(a=floats32(), b=floats32())
def test_min_and_max_treat_nan_and_signed_zero_as_ptx_does(a, b):
    """min and max drop a NaN unless .NaN keeps it as 0x7fffffff, and hold -0 below +0."""
    body = "min.f32 %n, %a, %b; max.f32 %x, %a, %b; min.NaN.f32 %nn, %a, %b; max.NaN.f32 %xn, %a, %b;"
    got = apply(body, {"a": a, "b": b}, dict.fromkeys(("n", "x", "nn", "xn"), np.uint32))
    for i in range(THREADS):
        bits = (int(a[i]), int(b[i]))
        pair = [value(x, "f32") for x in bits]
        is_nan = [isinstance(x, float) and math.isnan(x) for x in pair]
        if any(is_nan):
            assert got["nn"][i] == got["xn"][i] == 0x7FFFFFFF
            if not all(is_nan):
                assert int(got["n"][i]) == int(got["x"][i]) == bits[is_nan.index(False)]
            continue
        order = sorted(bits, key=lambda x: (value(x, "f32"), x < 0x80000000))
        assert (int(got["n"][i]), int(got["x"][i])) == (order[0], order[1])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@EXAMPLES
@given(a=floats32(), b=floats32())
def test_packing_conversions_round_to_nearest_even(kind, a, b):
    """cvt.rn.<half>x2.f32 puts its first source in the high half; every rounding is exact; NaN is 0x7fff."""
    body = f"cvt.rn.{kind}x2.f32 %o, %a, %b; cvt.rn.{kind}.f32 %h, %a; cvt.rn.relu.{kind}x2.f32 %p, %a, %b;"
    got = apply(body, {"a": a, "b": b}, {"o": np.uint32, "h": np.uint16, "p": np.uint32})

    def rounded(bits: int) -> int:
        x = value(bits, "f32")
        if isinstance(x, float):
            return 0x7FFF if math.isnan(x) else nearest(Fraction(2) ** 500 * (1 if x > 0 else -1), kind)
        return nearest(x, kind) if x else bits >> 16

    for i in range(THREADS):
        high, low = rounded(int(a[i])), rounded(int(b[i]))
        assert same(int(got["o"][i]) >> 16, high, kind) and same(int(got["o"][i]) & 0xFFFF, low, kind)
        assert same(int(got["h"][i]), high, kind)
        if high != 0x7FFF:
            assert same(int(got["p"][i]) >> 16, 0 if high & 0x8000 else high, kind)


@EXAMPLES
@given(a=halves("bf16"), b=halves("f16"), c=floats32(special=False))
def test_widening_and_integer_conversions(a, b, c):
    """Halves widen exactly; float to integer rounds as named, clamps, and takes NaN to zero; integers round to f32."""
    body = """cvt.f32.bf16 %x, %a; cvt.f32.f16 %y, %b;
    cvt.rni.s32.f32 %n, %c; cvt.rzi.s32.f32 %z, %c; cvt.rmi.s32.f32 %m, %c; cvt.rpi.u32.f32 %p, %c;
    cvt.rn.f32.s32 %back, %c; cvt.rmi.f32.f32 %floor, %c; cvt.sat.f32.f32 %sat, %c;"""
    outputs = dict.fromkeys(("x", "y", "n", "z", "m", "p", "back", "floor", "sat"), np.uint32)
    got = apply(body, {"a": a, "b": b, "c": c}, outputs)
    for i in range(THREADS):
        for name, source, kind in (("x", a, "bf16"), ("y", b, "f16")):
            x = value(int(source[i]), kind)
            want = None if isinstance(x, float) and math.isnan(x) else int(np.float32(float(x)).view(np.uint32))
            assert same(int(got[name][i]), want)
        x = value(int(c[i]), "f32")
        assert got["n"][i].view(np.int32) == round(x)
        assert got["z"][i].view(np.int32) == math.trunc(x)
        assert got["m"][i].view(np.int32) == math.floor(x)
        assert got["p"][i] == max(0, math.ceil(x))
        word = int(c[i])
        assert same(int(got["back"][i]), nearest(Fraction(word - (word >> 31 << 32)), "f32"))
        assert value(int(got["floor"][i]), "f32") == math.floor(x)
        assert value(int(got["sat"][i]), "f32") == min(max(x, 0), 1)


APPROXIMATE = {
    "ex2.approx.ftz.f32": (lambda x: 2.0**x, 2e-7), "rcp.approx.ftz.f32": (lambda x: 1 / x, 2e-7),
    "rcp.rn.f32": (lambda x: 1 / x, 1e-7), "sqrt.approx.f32": (lambda x: math.sqrt(abs(x)), 2e-7),
    "rsqrt.approx.f32": (lambda x: 1 / math.sqrt(abs(x)), 2e-7), "lg2.approx.f32": (lambda x: math.log2(abs(x)), 1e-6),
    "tanh.approx.f32": (math.tanh, 1e-6), "sin.approx.f32": (math.sin, 1e-6), "cos.approx.f32": (math.cos, 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("opcode", APPROXIMATE)
@EXAMPLES
@given(a=hnp.arrays(np.float32, THREADS, elements=st.floats(-30, 30, width=32).filter(lambda x: abs(x) > 1e-3)))
def test_approximate_functions_are_close_to_the_true_value(opcode, a):
    """The approximations lie within the tolerance of the true function, closer than PTX promises."""
    f, tolerance = APPROXIMATE[opcode]
    positive = opcode.split(".")[0] in ("sqrt", "rsqrt", "lg2")
    source = np.abs(a) if positive else a
    got = apply(f"{opcode} %o, %a;", {"a": source}, {"o": np.float32})["o"]
    want = np.array([f(float(x)) for x in a])
    assert np.allclose(got, want, rtol=tolerance, atol=tolerance)


def test_special_cases_of_approximations_and_division():
    """ex2(-inf) is 0, rcp(±0) is ±inf, results below 2**-126 flush, and division follows IEEE."""
    a = np.resize(np.array([-np.inf, np.inf, 0.0, -0.0, np.nan, -140.0, 4.0, 1e-42], np.float32), THREADS)
    body = "ex2.approx.ftz.f32 %e, %a; rcp.approx.ftz.f32 %r, %a; div.rn.f32 %d, 0f40000000, %a;"
    body += "div.full.f32 %g, %a, 0f40000000;"
    got = apply(body, {"a": a}, dict.fromkeys(("e", "r", "d", "g"), np.float32))
    nan = np.nan
    assert np.array_equal(got["e"][:8], np.array([0, np.inf, 1, 1, nan, 0, 16, 1], np.float32), equal_nan=True)
    assert np.array_equal(
        got["r"][:8],
        np.array([0, 0, np.inf, -np.inf, nan, np.float32(1) / np.float32(-140), 0.25, np.inf], np.float32),
        equal_nan=True,
    )
    with np.errstate(all="ignore"):
        assert np.array_equal(got["d"], np.float32(2) / a, equal_nan=True)
        assert np.array_equal(got["g"], a / np.float32(2), equal_nan=True)


@pytest.mark.parametrize(
    "compare", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
@EXAMPLES
@given(a=floats32(), b=floats32())
def test_setp_of_floats_orders_nan_as_named(compare, a, b):
    """Ordered comparisons are false with a NaN, the …u forms true; num and nan ask for NaN itself."""
    a[::4] = b[::4]
    got = apply(f"setp.{compare}.f32 %o, %a, %b;", {"a": a, "b": b}, {"o": bool})["o"]
    base = {"eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
            "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y,
            "nu": lambda x, y: True, "na": lambda x, y: False}[compare[:2]]  # fmt: skip
    for i in range(THREADS):
        x, y = value(int(a[i]), "f32"), value(int(b[i]), "f32")
        has_nan = any(isinstance(v, float) and math.isnan(v) for v in (x, y))
        want = (len(compare) == 3 and compare != "num") if has_nan else base(x, y)
        assert bool(got[i]) == want


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@EXAMPLES
@given(data=st.data())
def test_half_extremes_signs_and_comparisons(kind, data):
    """min, max, neg, abs and setp of halves act on the values, keep NaN only with .NaN, and never round."""
    a, b = data.draw(halves(kind)), data.draw(halves(kind))
    body = f"""
    mov.b32 %r2, {{%a, %b}}; mov.b32 %r3, {{%b, %a}};
    min.{kind}x2 %low, %r2, %r3; max.NaN.{kind}x2 %high, %r2, %r3; neg.{kind}x2 %n, %r2; abs.{kind} %m, %a;
    setp.lt.{kind} %less, %a, %b;
    """
    got = apply(
        body,
        {"a": a, "b": b},
        {"low": np.uint32, "high": np.uint32, "n": np.uint32, "m": np.uint16, "less": bool},
    )
    for i in range(THREADS):
        bits = (int(a[i]), int(b[i]))
        x, y = (value(z, kind) for z in bits)
        is_nan = [isinstance(z, float) and math.isnan(z) for z in (x, y)]
        assert got["n"][i] == (bits[0] ^ 0x8000) | (bits[1] ^ 0x8000) << 16
        assert got["m"][i] == bits[0] & 0x7FFF
        assert bool(got["less"][i]) == (not any(is_nan) and x < y)
        if any(is_nan):
            assert same(int(got["high"][i]) & 0xFFFF, None, kind)
            want = None if all(is_nan) else bits[is_nan.index(False)]
            assert same(int(got["low"][i]) & 0xFFFF, want, kind) and same(int(got["low"][i]) >> 16, want, kind)
        else:
            order = sorted(bits, key=lambda z: (value(z, kind), z < 0x8000))
            assert int(got["low"][i]) == order[0] * 0x10001 and int(got["high"][i]) == order[1] * 0x10001


@EXAMPLES
@given(a=floats32(special=False), b=floats32(special=False))
def test_rounding_towards_zero_tf32_and_sign_selection(a, b):
    """cvt.rz cuts bits off, cvt.rna.tf32 rounds half away from zero, copysign and slct go by the sign bit."""
    body = """
    cvt.rz.bf16x2.f32 %z, %a, %b; cvt.rna.tf32.f32 %t, %a; copysign.f32 %c, %a, %b; slct.b32.f32 %s, %a, %b, %b;
    and.b32 %r2, %a, 31; shr.u32 %r3, %a, 20; and.b32 %r3, %r3, 15; bmsk.clamp.b32 %m, %r2, %r3;
    """
    got = apply(body, {"a": a, "b": b}, dict.fromkeys(("z", "t", "c", "s", "m"), np.uint32))
    for i in range(THREADS):
        x, y = int(a[i]), int(b[i])
        assert got["z"][i] == (x >> 16) << 16 | y >> 16
        assert got["t"][i] == (x + 0x1000) & 0xFFFFE000
        assert got["c"][i] == (x & 0x80000000) | (y & 0x7FFFFFFF)
        assert got["s"][i] == (x if y < 0x80000000 else y)
        position, length = x & 31, x >> 20 & 15
        assert got["m"][i] == sum(1 << k for k in range(position, min(position + length, 32)))
