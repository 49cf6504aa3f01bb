"""Block-scaled tcgen05.mma, and elements of 4 and 6 bits, against formulas written here."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import kinds
from tcgen05_lab import finish, from_global, go, kernel, multiply, registers, start, to_global
from test_tcgen05_mma import layout, place

N, FACTORS = 64, 64  # columns of the result; the factors follow it in TMEM
BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}
FORMAT = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
SCALES = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4, "block32": 2}


def value(code: np.ndarray, kind: str) -> np.ndarray:
    """A small float by its definition."""
    exponent_bits, mantissa_bits, bias = BITS[kind]
    mantissa = code % (1 << mantissa_bits)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.where(code >> (exponent_bits + mantissa_bits) & 1, -size, size)


def codes(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """Random finite codes; those of eight bits near one, so that sums are exact."""
    width = sum(BITS[kind][:2]) + 1
    if width < 8:
        return rng.integers(0, 1 << width, shape)
    mantissa, bias = BITS[kind][1:]
    return (rng.integers(bias - 1, bias + 3, shape) << mantissa) | rng.integers(0, 2, shape) << 7


def stored(code: np.ndarray, kind: str, packed: bool) -> np.ndarray:
    """(rows, 32) bytes: a byte an element; 4 and 6 bits at the front of each 16 bytes; or two of 4 bits a byte."""
    rows = code.shape[0]
    if packed:
        return code[:, ::2] | code[:, 1::2] << 4
    width = sum(BITS[kind][:2]) + 1
    if width == 8:
        return code
    out = np.zeros((rows, 32), np.int64)
    for row in range(rows):
        for unit in (0, 1):
            number = sum(int(code[row, 16 * unit + i]) << width * i for i in range(16))
            out[row, 16 * unit : 16 * unit + 2 * width] = list(number.to_bytes(2 * width, "little"))
    return out


def words(factors: np.ndarray, first: int) -> np.ndarray:
    """Factor codes (rows, count) as TMEM (128 lanes, columns): row r in lane r % 32 of every quarter."""
    rows, count = factors.shape
    out = np.zeros((128, -(-rows // 32)), np.uint32)
    for row in range(rows):
        word = sum(int(factors[row, j]) << 8 * (first + j) for j in range(count))
        out[row % 32 :: 32, row // 32] = word & 0xFFFFFFFF
    return out


def run_scaled(kind, vector, a_kind, b_kind, scale, first, mode, seed=0):
    rng = np.random.default_rng(seed)
    count = 1 if kind == "mxf8f6f4" else SCALES[vector]
    packed = kind != "mxf8f6f4"
    depth = 64 if packed else 32
    a, b = codes(rng, (128, depth), a_kind), codes(rng, (N, depth), b_kind)
    how = [layout(False, 32, rows, 1, 0) for rows in (128, N)]
    parts = [place(stored(x, k, packed), "u8", h) for x, k, h in zip((a, b), (a_kind, b_kind), how, strict=True)]
    fa = rng.integers(126, 130, (128, count)) if scale == "ue8m0" else rng.integers(0x34, 0x40, (128, count))
    fb = rng.integers(126, 130, (N, count)) if scale == "ue8m0" else rng.integers(0x34, 0x40, (N, count))
    factor = (lambda c: 2.0 ** (c - 127)) if scale == "ue8m0" else (lambda c: value(c, "e4m3"))
    want = (value(a, a_kind) * np.repeat(factor(fa), depth // count, 1)) @ (
        value(b, b_kind) * np.repeat(factor(fb), depth // count, 1)
    ).T
    image = np.concatenate(parts)
    form = FORMAT if kind == "mxf8f6f4" else {"e2m1": 1}
    text = (
        first[1] << 4 | form[a_kind] << 7 | form[b_kind] << 10 | N >> 3 << 17
        | (scale == "ue8m0") << 23 | 128 >> 4 << 24 | first[0] << 29
    )  # fmt: skip
    tmem = np.concatenate([words(fa, first[0]), words(fb, first[1])], axis=1)
    steps = [*start(128, image.size), ("fill", from_global("factors", tmem.shape[1]))]
    steps += [("put", "".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r7+{FACTORS + i}], %x{i};" for i in range(6)))]
    steps += [("putw", "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;"),
              ("afterp", "tcgen05.fence::after_thread_sync;")]  # fmt: skip
    pair = (how[0].descriptor(0), how[1].descriptor(parts[0].size))
    mma = dict(multiply(kind, [pair], text))
    mma["mma"] = mma["mma"].replace(f"kind::{kind}", f"kind::{kind}.block_scale.{vector}")
    mma["mma"] = mma["mma"].replace("%r41, %p5", "%r41, [%r42], [%r43], %p5")
    mma["who1"] += f"add.s32 %r42, %r6, {FACTORS}; add.s32 %r43, %r6, {FACTORS + 4};"
    steps += [*mma.items(), ("ld", f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {registers(N)}, [%r7];"),
              ("ldw", "tcgen05.wait::ld.sync.aligned;"), ("out", to_global("dst", N)), *finish(128)]  # fmt: skip
    buffers = {"image": image, "factors": tmem, "dst": 128 * N * 4}
    result, memory = go(kernel(steps, tuple(buffers)), buffers, mode=mode, dynamic=image.size + 64)
    return memory.read("dst", np.float32, (128, N)), want, result


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial", "race"])
@pytest.mark.parametrize(
    ("kind", "vector", "types", "scale", "first"),
    [
        ("mxf8f6f4", "scale_vec::1X", ("e4m3", "e4m3"), "ue8m0", (0, 0)),
        ("mxf8f6f4", "block32", ("e5m2", "e4m3"), "ue8m0", (3, 1)),
        ("mxf8f6f4", "scale_vec::1X", ("e2m1", "e4m3"), "ue8m0", (2, 0)),
        ("mxf8f6f4", "scale_vec::1X", ("e2m3", "e3m2"), "ue8m0", (1, 2)),
        ("mxf4", "scale_vec::2X", ("e2m1", "e2m1"), "ue8m0", (2, 0)),
        ("mxf4nvf4", "block16", ("e2m1", "e2m1"), "ue4m3", (0, 0)),
        ("mxf4nvf4", "scale_vec::2X", ("e2m1", "e2m1"), "ue8m0", (0, 2)),
    ],
)
def test_block_scaled_products(kind, vector, types, scale, first, mode):
    """Every element counts times the factor of its block, in all types and all places of the factor's byte."""
    got, want, result = run_scaled(kind, vector, *types, scale, first, mode)
    assert result.ok, [str(f) for f in result.findings]
    assert np.allclose(got, want, rtol=1e-6, atol=1e-5)
    assert np.array_equal(np.round(got * 64), np.round(want * 64))


@pytest.mark.parametrize(
    ("kind", "vector", "scale", "first", "what"),
    [
        ("mxf4", "scale_vec::2X", "ue4m3", (0, 0), "ue4m3"),
        ("mxf4nvf4", "block16", "ue4m3", (1, 0), "ids 1, 0"),
        ("mxf4", "scale_vec::2X", "ue8m0", (1, 0), "ids 1, 0"),
    ],
)
def test_bad_scales_are_findings(kind, vector, scale, first, what):
    """A factor type that the kind does not take, and factors that would leave their word."""
    result = run_scaled(kind, vector, "e2m1", "e2m1", scale, first, "lockstep")[2]
    assert kinds(result) == {"tcgen05-descriptor"} and what in result.findings[0].message
