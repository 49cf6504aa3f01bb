"""Cases of small Triton kernels (triton_kernels.py) for sm_80, sm_90 and sm_120, with NumPy answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from . import triton_kernels as K
from .cases import Case, Expected, Launch, bf16, from_bf16
from .triton_compile import compile_kernel

SMS = (80, 90, 120)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _launch(function, values: dict, sm: int, grid: tuple, expected: dict[str, Expected], **options) -> Launch:
    modes = options.pop("modes", None)
    c = compile_kernel(function, values, sm, **options)
    names = [p.name for p in function.params if not p.is_constexpr and values.get(p.name) is not None]
    extra = {"modes": modes} if modes else {}
    return Launch(
        ptx=c.ptx, kernel=c.kernel, grid=(*grid, 1, 1)[:3], block=c.block, shared=c.shared, cluster=c.cluster,
        args=c.args, expected={names.index(n): e for n, e in expected.items()}, **extra,
    )  # fmt: skip


def vector_add(sm: int) -> Launch:
    x, y = _rng(0).standard_normal((2, 2500)).astype(np.float32)
    values = {"x": x, "y": y, "out": np.zeros_like(x), "n": 2500, "BLOCK": 1024}
    return _launch(K.vector_add, values, sm, (3,), {"out": Expected(values=x + y)})


def softmax(sm: int) -> Launch:
    x = _rng(1).standard_normal((5, 300)).astype(np.float32)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    want = (e / e.sum(1, keepdims=True)).astype(np.float32)
    values = {"x": x, "out": np.zeros_like(x), "stride": 300, "n": 300, "BLOCK": 512}
    return _launch(K.row_softmax, values, sm, (5,), {"out": Expected(values=want, rtol=1e-5, atol=1e-7)})


def layer_norm(sm: int) -> Launch:
    r = _rng(2)
    x, w, b = (bf16(r.standard_normal(s)) for s in ((4, 700), 700, 700))
    v, wf, bf = (from_bf16(t).astype(np.float64) for t in (x, w, b))
    centred = v - v.mean(1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * wf + bf
    out = np.zeros((4, 700), np.float32)
    values = {"x": x, "w": w, "b": b, "out": out, "stride": 700, "n": 700, "eps": 1e-5, "BLOCK": 1024}
    expected = Expected(values=want.astype(np.float32), rtol=1e-5, atol=1e-5)
    return _launch(K.layer_norm, values, sm, (4,), {"out": expected}, warps=8)


def _operand(kind: str, shape: tuple, seed: int) -> tuple[np.ndarray, np.ndarray, str]:
    """Bits, float64 values, Triton type. Small integers, so that every sum is exact."""
    v = _rng(seed).integers(-4, 5, shape)
    f = v.astype(np.float32)
    if kind == "bf16":
        return bf16(f), v.astype(np.float64), "*bf16"
    if kind == "fp16":
        return f.astype(np.float16), v.astype(np.float64), "*fp16"
    if kind in ("tf32", "ieee"):
        return f, v.astype(np.float64), "*fp32"
    if kind == "int8":
        return v.astype(np.int8), v.astype(np.float64), "*i8"
    if kind == "fp64":
        return v.astype(np.float64), v.astype(np.float64), "*fp64"
    codes = np.abs(v)  # e4m3 and e5m2 codes of 0 to 4
    table = {"fp8e4nv": [0, 0x38, 0x40, 0x44, 0x48], "fp8e5": [0, 0x3C, 0x40, 0x42, 0x44]}[kind]
    bits = np.array(table, np.uint8)[codes] | np.where(v < 0, 0x80, 0).astype(np.uint8)
    return bits, v.astype(np.float64), f"*{kind}"


def matmul(
    kind: str, sm: int, shape: tuple[int, int, int] = (100, 72, 96), tile=(64, 32, 32), warps: int = 4
) -> Launch:
    m, n, k = shape
    a, fa, ta = _operand(kind, (m, k), 3)
    b, fb, tb = _operand(kind, (k, n), 4)
    import triton.language as tl

    acc = {"int8": tl.int32, "fp64": tl.float64}.get(kind, tl.float32)
    dtype = {"int8": np.int32, "fp64": np.float64}.get(kind, np.float32)
    c = np.zeros((m, n), dtype)
    values = {
        "a": a, "b": b, "c": c, "M": m, "N": n, "K": k, "sam": k, "sak": 1, "sbk": n, "sbn": 1, "scm": n, "scn": 1,
        "BM": tile[0], "BN": tile[1], "BK": tile[2], "PRECISION": "ieee" if kind == "ieee" else "tf32", "ACC": acc,
    }  # fmt: skip
    grid = (-(-m // tile[0]), -(-n // tile[1]))
    want = Expected(values=(fa @ fb).astype(dtype))
    return _launch(K.matmul, values, sm, grid, {"c": want}, types={"a": ta, "b": tb}, warps=warps)


def reductions(sm: int) -> Launch:
    x = _rng(5).integers(-1000, 1000, (3, 500)).astype(np.int32)
    zeros = [np.zeros(3, np.int32) for _ in range(4)]
    names = ("total", "biggest", "where", "all_bits")
    values = {"x": x, **dict(zip(names, zeros, strict=True)), "n": 500, "BLOCK": 512}
    want = (x.sum(1), x.max(1), x.argmax(1), np.bitwise_xor.reduce(x, axis=1))
    expected = {n: Expected(values=w.astype(np.int32)) for n, w in zip(names, want, strict=True)}
    return _launch(K.reductions, values, sm, (3,), expected)


def atomics(sm: int) -> Launch:
    r, n = _rng(6), 1000
    at, v = r.integers(0, 16, n).astype(np.int32), r.integers(-50, 50, n).astype(np.int32)
    zero = lambda: np.zeros(16, np.int32)  # noqa: E731
    values = {
        "index": at, "value": v, "sums": zero(), "highest": zero(), "lowest": zero(), "bits": zero(),
        "floats": np.zeros(16, np.float32), "swaps": np.zeros(n, np.int32), "n": n, "BLOCK": 256,
    }  # fmt: skip
    want = {k: np.zeros(16, np.int32) for k in ("sums", "highest", "lowest", "bits")}
    for ufunc, key in ((np.add, "sums"), (np.maximum, "highest"), (np.minimum, "lowest"), (np.bitwise_or, "bits")):
        ufunc.at(want[key], at, v)
    expected = {k: Expected(values=x) for k, x in want.items()}
    expected["floats"] = Expected(values=want["sums"].astype(np.float32))
    expected["swaps"] = Expected(values=v)
    return _launch(K.atomics, values, sm, (4,), expected)


def ticket(sm: int) -> Launch:
    values = {"counter": np.zeros(4, np.int32), "order": np.full(40, -1, np.int32), "n_programs": 40}
    want = np.array([40, 1, 0, 0], np.int32)
    expected = {"counter": Expected(values=want), "order": Expected(values=np.arange(40, dtype=np.int32))}
    return _launch(K.ticket, values, sm, (40,), expected, modes=("lockstep", "race"))


def half_atomics(sm: int) -> Launch:
    v = _rng(7).integers(-3, 4, 256).astype(np.float16)
    want = v.reshape(-1, 32).astype(np.float32).sum(0).astype(np.float16)
    values = {"value": v, "sums": np.zeros(32, np.float16), "n": 32, "BLOCK": 256}
    return _launch(K.half_atomics, values, sm, (1,), {"sums": Expected(values=want)})


def scans(sm: int) -> Launch:
    x = _rng(8).integers(-9, 10, (2, 512)).astype(np.int32)
    out = {k: np.zeros_like(x) for k in ("sums", "products", "backwards")}
    expected = {
        "sums": Expected(values=x.cumsum(1, dtype=np.int32)),
        "products": Expected(values=((x & 1) * 2 - 1).cumprod(1, dtype=np.int32)),
        "backwards": Expected(values=np.ascontiguousarray(x[:, ::-1].cumsum(1, dtype=np.int32)[:, ::-1])),
    }
    return _launch(K.scans, {"x": x, **out, "n": 512}, sm, (2,), expected)


def gather(sm: int) -> Launch:
    r = _rng(9)
    x, at = r.standard_normal((16, 64)).astype(np.float32), r.integers(0, 64, (16, 64)).astype(np.int32)
    values = {"x": x, "index": at, "out": np.zeros_like(x), "n": 16, "m": 64}
    return _launch(K.gather_rows, values, sm, (1,), {"out": Expected(values=np.take_along_axis(x, at, 1))})


def philox(seed: int, counter: np.ndarray) -> np.ndarray:
    """Philox 4x32-10, first word (Salmon et al. 2011)."""
    c = [counter.astype(np.uint64), *(np.zeros_like(counter, np.uint64) for _ in range(3))]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low,
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0].astype(np.uint32)


def philox_bits(sm: int) -> Launch:
    values = {"out": np.zeros(1024, np.uint32), "seed": 1234, "BLOCK": 256}
    want = philox(1234, np.arange(1024))
    return _launch(K.philox_bits, values, sm, (4,), {"out": Expected(values=want)})


def dropout(sm: int) -> Launch:
    x = _rng(10).standard_normal(900).astype(np.float32)
    bits = philox(77, np.arange(900)).view(np.int32).astype(np.int64)
    uniform = np.where(bits < 0, -bits - 1, bits) * 4.6566127342e-10
    want = np.where(uniform > 0.25, x.astype(np.float64) / 0.75, 0).astype(np.float32)
    values = {"x": x, "out": np.zeros_like(x), "n": 900, "p": 0.25, "seed": 77, "BLOCK": 512}
    return _launch(K.dropout, values, sm, (2,), {"out": Expected(values=want, rtol=1e-6, atol=1e-7)})


def sorted_rows(sm: int) -> Launch:
    x = _rng(11).integers(-1000, 1000, (2, 128)).astype(np.int32)
    values = {"x": x, "up": np.zeros_like(x), "down": np.zeros_like(x), "n": 128}
    up = np.sort(x, 1)
    expected = {"up": Expected(values=up), "down": Expected(values=np.ascontiguousarray(up[:, ::-1]))}
    return _launch(K.sorted_rows, values, sm, (2,), expected)


def transposed(sm: int) -> Launch:
    x = bf16(_rng(12).standard_normal((64, 32)))
    values = {"x": x, "out": np.zeros((32, 64), np.uint16), "n": 64, "m": 32}
    return _launch(K.transposed, values, sm, (1,), {"out": Expected(values=np.ascontiguousarray(x.T))})


def elementary(sm: int) -> Launch:
    x = _rng(13).uniform(0.1, 4.0, 256).astype(np.float32)
    v = x.astype(np.float64)
    erf = np.array([math.erf(t) for t in v])
    rows = [np.exp(v), np.log(v), np.sqrt(v), np.sin(v), np.cos(v), erf, np.floor(v), 1 / (1 + np.exp(-v)), np.sqrt(v),
            v / (v + 1), np.exp2(v), v * v + v]  # fmt: skip
    want = Expected(values=np.stack(rows).astype(np.float32), rtol=2e-6, atol=1e-6)
    return _launch(K.elementary, {"x": x, "out": np.zeros((12, 256), np.float32), "n": 256}, sm, (1,), {"out": want})


def doubles(sm: int) -> Launch:
    r = _rng(14)
    x, y = r.uniform(0.5, 3, 128), r.uniform(0.5, 3, 128)
    rows = [x * y + x, x / y, np.sqrt(x), np.exp(y), np.maximum(x, y) - np.minimum(x, y)]
    want = Expected(values=np.stack(rows), rtol=1e-14, atol=1e-15)
    values = {"x": x, "y": y, "out": np.zeros((5, 128)), "n": 128}
    return _launch(K.doubles, values, sm, (1,), {"out": want})


def integer_ops(sm: int) -> Launch:
    r = _rng(15)
    x, y = (r.integers(1, 1 << 20, 128).astype(np.int32) for _ in range(2))
    a, b = x.astype(np.int64), y.astype(np.int64)
    rows = [a // b, a % b, a * b >> 32, (a << (b & 7)) ^ (a >> 3), a * b >> 16, np.where(a > b, a, -b)]
    want = Expected(values=np.stack([t.astype(np.int32) for t in rows]))
    values = {"x": x, "y": y, "out": np.zeros((6, 128), np.int32), "n": 128}
    return _launch(K.integer_ops, values, sm, (1,), {"out": want})


def conversions(sm: int) -> Launch:
    x = (_rng(16).standard_normal(256) * 8).astype(np.float32)
    from kernel_factory.emulator.small_floats import table

    def nearest(kind: str) -> np.ndarray:
        values = table(kind)[: 0x7C if kind == "e5m2" else 0x7F].astype(np.float64)
        gap = np.abs(np.abs(x.astype(np.float64))[:, None] - values)
        code = gap.argmin(1)
        tied = np.take_along_axis(gap, np.minimum(code + 1, len(values) - 1)[:, None], 1)[:, 0] == gap.min(1)
        code = np.where(tied & (code & 1 == 1), code + 1, code)
        return (code | np.where(x < 0, 0x80, 0)).astype(np.uint8)

    e5 = nearest("e5m2")
    out = {
        "as_bf16": bf16(x), "as_f16": x.astype(np.float16), "as_e4m3": nearest("e4m3"), "as_e5m2": e5,
        "as_i32": x.astype(np.int32), "back": table("e5m2")[e5],
    }  # fmt: skip
    values = {"x": x, **{k: np.zeros_like(v) for k, v in out.items()}, "n": 256}
    types = {"as_e4m3": "*fp8e4nv", "as_e5m2": "*fp8e5"}
    return _launch(K.conversions, values, sm, (1,), {k: Expected(values=v) for k, v in out.items()}, types=types)


def histogram(sm: int) -> Launch:
    x = _rng(17).integers(0, 64, 512).astype(np.int32)
    want = np.bincount(x, minlength=64).astype(np.int32)
    values = {"x": x, "out": np.zeros(64, np.int32), "n": 512, "bins": 64}
    return _launch(K.counted, values, sm, (1,), {"out": Expected(values=want)})


def attention(sm: int) -> Launch:
    heads, n, d = 2, 128, 64
    q, k, v = (bf16(_rng(s).standard_normal((heads, n, d))) for s in (18, 19, 20))
    fq, fk, fv = (from_bf16(t).astype(np.float64) for t in (q, k, v))
    s = fq @ fk.transpose(0, 2, 1) / 8
    p = np.exp(s - s.max(2, keepdims=True))
    want = (p / p.sum(2, keepdims=True)) @ fv
    values = {
        "q": q, "k": k, "v": v, "out": np.zeros((heads, n, d), np.float32), "scale": 0.125, "n": n,
        "D": d, "BM": 64, "BN": 32,
    }  # fmt: skip
    expected = Expected(values=want.astype(np.float32), rtol=2e-2, atol=1e-2)
    return _launch(K.attention, values, sm, (n // 64, heads), {"out": expected})


BUILDERS: dict[str, Callable[[int], Launch]] = {
    f.__name__: f
    for f in (
        vector_add, softmax, layer_norm, reductions, atomics, ticket, half_atomics, scans, gather, philox_bits,
        dropout, sorted_rows, transposed, elementary, doubles, integer_ops, histogram, attention,
    )
}  # fmt: skip
_DOTS = ("bf16", "fp16", "tf32", "ieee", "int8", "fp64")


def cases() -> list[Case]:
    out = []
    for sm in SMS:
        out += [Case(name=f"{n}-sm_{sm}", package="triton", build=partial(f, sm)) for n, f in BUILDERS.items()]
        dots = (*_DOTS, "fp8e4nv", "fp8e5") if sm > 80 else _DOTS
        out += [Case(name=f"matmul-{k}-sm_{sm}", package="triton", build=partial(matmul, k, sm)) for k in dots]
        if sm > 80:
            out.append(Case(name=f"conversions-sm_{sm}", package="triton", build=partial(conversions, sm)))
    return out
