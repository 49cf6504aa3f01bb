"""Cases of the CUDA C++ kernels in cuda/kernels.cu, with NumPy or Python answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np

from . import cuda_sync_cases
from .cases import Case, Expected, Launch, bf16, from_bf16
from .cuda_compile import ptx, toolkit
from .cuda_specs import Spec, exact, rng

SMS = (80, 90, 120)
toolkit()  # ImportError here if the package is not installed


def integer_atomics() -> Spec:
    r, n = rng(0), 500
    at, v = r.integers(0, 8, n).astype(np.int32), r.integers(-99, 99, n).astype(np.int32)
    want = [np.zeros(8, np.int32) for _ in range(3)]
    bits, wide = np.zeros(8, np.uint32), np.zeros(8, np.uint64)
    for ufunc, x in ((np.add, want[0]), (np.minimum, want[1]), (np.maximum, want[2])):
        ufunc.at(x, at, v)
    np.bitwise_xor.at(bits, at, v.view(np.uint32))
    np.add.at(wide, at, v.astype(np.int64).view(np.uint64) * np.uint64(1000000007))
    outs = [*want, bits, wide]
    args = (at, v, *(np.zeros_like(x) for x in outs), n)
    return (4,), (128,), args, {2 + i: exact(x) for i, x in enumerate(outs)}


def shared_histogram() -> Spec:
    x = rng(1).integers(0, 256, 3000).astype(np.uint8)
    args = (x, np.zeros(256, np.uint32), 3000)
    return (3,), (256,), args, {1: exact(np.bincount(x, minlength=256).astype(np.uint32))}


def float_max_by_cas() -> Spec:
    x = rng(2).uniform(0, 100, 200).astype(np.float32)
    return (2,), (128,), (x, np.zeros(1, np.float32), 200), {1: exact(x.max(keepdims=True))}


def wrap_counters() -> Spec:
    n, down = 100, 0
    for _ in range(n):
        down = 6 if down == 0 or down > 6 else down - 1
    counters = np.array([0, 0, 5, 0xFFFFFFFF, 0], np.uint32)
    want = np.array([n % 10, down, 77, 0, 0xFF], np.uint32)
    return (1,), (128,), (counters, np.zeros(n, np.uint32), n), {0: exact(want)}


def double_atomics() -> Spec:
    x = rng(3).integers(-50, 50, 64).astype(np.float64)
    halves = np.tile(np.array([32, 64], np.float16), 2)
    args = (x, np.zeros(4), np.zeros(4, np.float16), np.zeros(2, np.uint16), 64)
    sums = exact(x.reshape(16, 4).sum(0))
    return (1,), (64,), args, {1: sums, 2: exact(halves), 3: exact(bf16(np.array([64.0, 0.0])))}


def warp_votes() -> Spec:
    n = 100
    x = rng(4).integers(-100, 100, n).astype(np.int32)
    rows = np.zeros(128, np.int32)
    rows[:n] = x
    rows = rows.reshape(4, 32)
    ballots = ((rows > 0) * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(1).astype(np.uint32)
    flags = (rows > 90).any(1) | ((rows > -95).all(1).astype(np.int32) << 1)
    args = (x, np.zeros(128, np.uint32), np.zeros(128, np.int32), n)
    return (1,), (128,), args, {1: exact(np.repeat(ballots, 32)), 2: exact(np.repeat(flags.astype(np.int32), 32))}


def matches() -> Spec:
    x = rng(5).integers(0, 5, 64).astype(np.int32)
    bit = np.uint64(1) << np.arange(32, dtype=np.uint64)
    rows = x.reshape(2, 32)
    some = ((rows[:, :, None] == rows[:, None, :]) * bit).sum(2).astype(np.uint32).reshape(-1)
    same = np.array([1, int((rows[1] == rows[1, 0]).all())])
    every = np.where(same == 1, 0xFFFFFFFF, 0).astype(np.uint32)
    args = (x, np.zeros(64, np.uint32), np.zeros(64, np.uint32), np.zeros(64, np.int32))
    expected = {1: exact(some), 2: exact(np.repeat(every, 32)), 3: exact(np.repeat(same, 32).astype(np.int32))}
    return (1,), (64,), args, expected


def warp_reductions() -> Spec:
    x = rng(6).integers(-1000, 1000, 96).astype(np.int32)
    rows = x.reshape(3, 32)
    outs = [rows.sum(1), rows.min(1), np.bitwise_or.reduce(rows, axis=1).view(np.uint32)]
    outs = [np.repeat(o.astype(t), 32) for o, t in zip(outs, (np.int32, np.int32, np.uint32), strict=True)]
    return (1,), (96,), (x, *(np.zeros_like(o) for o in outs)), {1 + i: exact(o) for i, o in enumerate(outs)}


def dot_products() -> Spec:
    r, n = rng(10), 64
    a, b = (r.integers(-(2**31), 2**31, n).astype(np.int32) for _ in range(2))
    ab, bb = (t.view(np.int8).reshape(n, 4).astype(np.int64) for t in (a, b))
    au, bu = (t.view(np.uint8).reshape(n, 4).astype(np.int64) for t in (a, b))
    ah = a.view(np.int16).reshape(n, 2).astype(np.int64)
    out = np.stack([(ab * bb).sum(1) + 5, (ah * bb[:, :2]).sum(1) + 1, (ah * bb[:, 2:]).sum(1) + 2])
    args = (a, b, np.zeros((3, n), np.int32), np.zeros(n, np.uint32), n)
    return (1,), (64,), args, {2: exact(out.astype(np.int32)), 3: exact(((au * bu).sum(1) + 7).astype(np.uint32))}


def _bits(x: int, y: int) -> list[int]:
    m = 0xFFFFFFFF
    both = x | y << 32
    perm = [both >> 8 * s & 0xFF for s in (0, 4, 1, 5)]  # selector 0x5140, low digit first
    s = y & 31
    sx, sy = (t - (t >> 31 << 32) for t in (x, y))
    x24, y24 = ((t & 0xFFFFFF) for t in (x, y))
    sx24, sy24 = (t - (t >> 23 << 24) for t in (x24, y24))
    nth = [p for p in range(y & 31, 32) if x >> p & 1]
    halves = [((x >> 16 * i) + (y >> 16 * i)) & 0xFFFF for i in range(2)]
    return [
        int(f"{x:032b}"[::-1], 2), x.bit_count(), 32 - x.bit_length(), (x & -x).bit_length(),
        sum(p << 8 * i for i, p in enumerate(perm)), ((y << 32 | x) << s >> 32) & m, ((y << 32 | x) >> s) & m,
        x * y >> 32, abs(x - y) + 3, x24 * y24 & m, sx24 * sy24 & m, (x + y) >> 1, abs(sx - sy) + 9 & m,
        halves[0] | halves[1] << 16, sum(max(x >> 8 * i & 255, y >> 8 * i & 255) << 8 * i for i in range(4)),
        nth[0] if nth else m,
    ]  # fmt: skip


def bit_tricks() -> Spec:
    r, n = rng(11), 64
    a, b = (r.integers(0, 2**32, n).astype(np.uint32) for _ in range(2))
    want = np.array([_bits(int(x), int(y)) for x, y in zip(a, b, strict=True)], np.int64).T & 0xFFFFFFFF
    return (1,), (64,), (a, b, np.zeros((16, n), np.uint32), n), {2: exact(want.astype(np.uint32))}


def local_array() -> Spec:
    index, want = rng(12).integers(0, 1000, 64).astype(np.int32), []
    for i, x in enumerate(index.tolist()):
        stack = [k * k + i for k in range(24)]
        at = x % 24
        stack[at] = -1
        want.append(sum(stack[(at + k * 7) % 24] for k in range(x % 20 + 1)))
    return (1,), (64,), (index, np.zeros(64, np.int32), 64), {1: exact(np.array(want, np.int32))}


def function_calls() -> Spec:
    n = 50
    x = rng(13).uniform(-2, 2, n).astype(np.float32)
    c = np.array([1, -0.5, 0.25, 2, -1])
    v = x.astype(np.float64)
    want = np.polyval(2 * c[::-1], v) + np.polyval(c[:3][::-1], v)

    def steps(k: int) -> int:
        return 0 if k == 1 else 1 + steps(3 * k + 1 if k & 1 else k // 2)

    counts = np.array([steps(i + 1) for i in range(n)], np.int32)
    args = (x, np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros(1, np.int32), n)
    expected = {1: Expected(values=want.astype(np.float32), rtol=1e-5, atol=1e-5), 2: exact(counts)}
    return (1,), (64,), args, {**expected, 3: exact(np.ones(1, np.int32))}


def jump_table() -> Spec:
    r, n = rng(14), 120
    op = r.integers(0, 10, n).astype(np.int32)
    a, b = (r.integers(-1000, 1000, n).astype(np.int32) for _ in range(2))
    want = []
    for o, x, y in zip(op.tolist(), a.tolist(), b.tolist(), strict=True):
        odd = y | 1
        table = [x + y, x - y, x * y, int(Fraction(x, y)) if y else 0, x ^ y, x << (y & 7), int(math.fmod(x, odd)), -x]
        want.append(table[o] if o < 8 else 12345)
    return (1,), (128,), (op, a, b, np.zeros(n, np.int32), n), {3: exact(np.array(want, np.int64).astype(np.int32))}


def double_math() -> Spec:
    r, n = rng(15), 64
    a, b = r.uniform(0.1, 5, n), r.uniform(0.1, 5, n)
    error = [float(Fraction(x) * Fraction(y) - Fraction(x * y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    want = np.stack(
        [a * b + 1, error, a / b, np.sqrt(a), np.exp(-b), np.log(a), np.sin(a), a**b, a**-0.5, np.arctan2(a, b)]
    )
    expected = Expected(values=want, rtol=2e-15, atol=1e-300)
    return (1,), (64,), (a, b, np.zeros((10, n)), n), {2: expected}


def _round(x: Fraction, mode: str, kind: type) -> float:
    """A fraction rounded to a float in a mode."""
    s = kind(float(x)) if kind is np.float64 else np.float32(float(x))
    while Fraction(float(s)) > x:
        s = np.nextafter(s, kind(-np.inf))
    up = np.nextafter(s, kind(np.inf))
    while Fraction(float(up)) <= x:
        s, up = up, np.nextafter(up, kind(np.inf))
    if Fraction(float(s)) == x:
        return float(s)
    if mode == "rd" or (mode == "rz" and x > 0):
        return float(s)
    if mode == "rn":
        lower, upper = x - Fraction(float(s)), Fraction(float(up)) - x
        even = int(np.array(s).view(np.uint32 if kind is np.float32 else np.uint64)) & 1 == 0
        return float(s) if lower < upper or (lower == upper and even) else float(up)
    return float(up)


def _root(x: Fraction, mode: str, kind: type) -> float:
    s = kind(math.sqrt(x))
    while Fraction(float(s)) ** 2 > x:
        s = np.nextafter(s, kind(0))
    up = np.nextafter(s, kind(np.inf))
    while Fraction(float(up)) ** 2 <= x:
        s, up = up, np.nextafter(up, kind(np.inf))
    return float(s) if mode in ("rz", "rd") or Fraction(float(s)) ** 2 == x else float(up)


def rounding_modes() -> Spec:
    r, n = rng(16), 40
    x, y = (r.uniform(0.1, 9, n).astype(np.float32) for _ in range(2))
    f32, f64, f, d, whole = np.float32, np.float64, [], [], []
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        p, q = Fraction(float(a)), Fraction(float(b))
        f.append(
            [_round(p + q, m, f32) for m in ("rz", "ru", "rd")] + [_round(p * q, m, f32) for m in ("rz", "ru", "rd")]
            + [_round(p / q, m, f32) for m in ("rz", "ru", "rd")] + [_root(p, m, f32) for m in ("rz", "ru", "rd")]
            + [_round(p * q + p, m, f32) for m in ("rz", "ru", "rd")] + [_round(1 / p, "rd", f32)]
        )  # fmt: skip
        small = Fraction(float(b) * 1e-9)
        d.append([
            _round(p + q, "rz", f64), _round(p * q, "ru", f64), _round(p / q, "rd", f64), _root(p, "ru", f64),
            _round(p * q + p, "rz", f64), _round(p * q - p, "rn", f64), _round(p + small, "ru", f64),
            _round(1 / q, "rn", f64),
        ])  # fmt: skip
        a100, b100 = np.float32(a * np.float32(100)), np.float32(b * np.float32(100))
        k = Fraction(0x7FFFFF81 - i)
        pair = [np.float32(_round(k, m, f32)).view(np.int32) for m in ("rz", "ru")]
        up = np.float32(_round(Fraction(float(a) * float(b)), "ru", f32)).view(np.int32)
        whole.append([math.floor(a100) + math.ceil(b100) * 7 + round(float(a)) * 3, pair[0] ^ pair[1], up])
    args = (x, y, np.zeros((16, n), f32), np.zeros((8, n)), np.zeros((3, n), np.int32), n)
    expected = {2: exact(np.array(f, f32).T), 3: exact(np.array(d).T), 4: exact(np.array(whole).T.astype(np.int32))}
    return (1,), (64,), args, expected


def _half_rows(x: np.ndarray, y: np.ndarray, to: Callable) -> list[np.ndarray]:
    return [to(x + y), to(x * y), to(x * y + x), to(x - y), np.maximum(x, y), np.minimum(x, y), np.abs(x), -y,
            to(np.maximum(x * y + y, 0)), to(np.clip(x + y, 0, 1)), (x > y).astype(float), to(x / y)]  # fmt: skip


def half_math() -> Spec:
    r, n = rng(17), 32
    a, b = (r.uniform(-3, 3, 2 * n).astype(np.float16) for _ in range(2))
    rows = _half_rows(a.astype(np.float64), b.astype(np.float64), lambda v: v.astype(np.float16))
    want = np.stack([np.asarray(t).astype(np.float16) for t in rows])
    expected = Expected(values=want, rtol=1e-3, atol=1e-7)
    return (1,), (32,), (a, b, np.zeros((12, 2 * n), np.float16), n), {2: expected}


def bfloat_math() -> Spec:
    r, n = rng(18), 32
    a, b = (bf16(r.uniform(-3, 3, 2 * n)) for _ in range(2))
    x, y = (from_bf16(t).astype(np.float64) for t in (a, b))
    rows = [x + y, x * y, x * y + x, np.maximum(x, y), -x, np.maximum(x * y + y, 0)]
    want = np.stack([bf16(np.asarray(t, np.float32)) for t in rows])
    return (1,), (32,), (a, b, np.zeros((6, 2 * n), np.uint16), n), {2: exact(want)}


def wmma_half() -> Spec:
    r = rng(19)
    a, b = (r.integers(-4, 5, (16, 32)).astype(np.float16) for _ in range(2))
    want = 2 * (a.astype(np.float32) @ b.astype(np.float32).T + 1)
    return (1,), (32,), (a, b, np.zeros((16, 16), np.float32)), {2: exact(want)}


def inline_asm() -> Spec:
    r, n = rng(20), 32
    a, b = (r.integers(0, 2**32, (n, 4)).astype(np.uint32) for _ in range(2))
    rows, sums = [], []
    for i in range(n):
        x, y = (sum(int(t) << 32 * k for k, t in enumerate(v[i])) for v in (a, b))
        total = x + y
        sums += [total >> 32 * k & 0xFFFFFFFF for k in range(4)]
        p, lo, hi = int(a[i, 0]) * int(b[i, 0]), int(a[i, 0]), int(a[i, 0]) >> 16
        rows.append([(p & 0xFFFFFFFF) ^ p >> 32, i * 31 + i, lo ^ int(b[i, 0]) ^ i, hi | hi << 16])
    want = np.concatenate([np.array(sums, np.uint64), np.array(rows, np.uint64).T.reshape(-1)]).astype(np.uint32)
    return (1,), (32,), (a, b, np.zeros(8 * n, np.uint32), n), {2: exact(want)}


def generic_pointers() -> Spec:
    x = rng(24).integers(-50, 50, 64).astype(np.int32)
    i = np.arange(64)
    want = np.where(i & 32, 3 * x[i ^ 1] + 1000, x[i ^ 1] + 2000)
    return (1,), (64,), (x, np.zeros(64, np.int32), 64), {1: exact(want.astype(np.int32))}


def bytes_and_shorts() -> Spec:
    r, n = rng(25), 100
    c, s = r.integers(-128, 128, n).astype(np.int8), r.integers(-300, 300, n).astype(np.int16)
    w = c.astype(np.int64)
    out = (w * s - (w >> 2)).astype(np.int16)
    u = np.where(w > 0, 2 * w, -w).astype(np.uint8)
    return (1,), (128,), (c, s, np.zeros(n, np.int16), np.zeros(n, np.uint8), n), {2: exact(out), 3: exact(u)}


def structures() -> Spec:
    kind = np.dtype([("p", np.float32, 3), ("id", np.int32), ("w", np.float64)])
    r, n = rng(26), 20
    x = np.zeros(n, kind)
    x["p"], x["id"], x["w"] = r.integers(-9, 9, (n, 3)), r.integers(0, 99, n), r.integers(0, 9, n)
    shift = np.zeros(1, kind)
    shift["p"], shift["id"], shift["w"] = (1, 2, 3), 21, 0.5
    want = x.copy()
    want["p"] = np.stack([x["p"][:, 0] + 1, x["p"][:, 1] * 2, x["p"][:, 2] - 3], 1)
    want["id"], want["w"] = x["id"] ^ 21, x["w"] + 0.5
    as_bytes = lambda t: t.view(np.uint8).reshape(-1)  # noqa: E731
    args = (as_bytes(x), np.zeros(n * 24, np.uint8), shift.tobytes(), n)
    return (1,), (32,), args, {1: exact(as_bytes(want[::-1].copy()))}


BUILDERS = (
    integer_atomics, shared_histogram, float_max_by_cas, wrap_counters, double_atomics, warp_votes, matches,
    warp_reductions, dot_products, bit_tricks, local_array, function_calls, jump_table, double_math, rounding_modes,
    half_math, bfloat_math, wmma_half, inline_asm, generic_pointers, bytes_and_shorts, structures,
    *cuda_sync_cases.BUILDERS,
)  # fmt: skip


def _build(function: Callable[[], Spec], sm: int) -> Launch:
    grid, block, args, expected = function()
    return Launch(
        ptx=ptx(sm), kernel=function.__name__, grid=(*grid, 1, 1)[:3], block=(*block, 1, 1)[:3], args=args,
        expected=expected,
    )  # fmt: skip


def cases() -> list[Case]:
    return [
        Case(name=f"{f.__name__}-sm_{sm}", package="cuda", build=partial(_build, f, sm)) for sm in SMS for f in BUILDERS
    ]
