"""Small Triton kernels for conformance: the language's own features, one or two a kernel."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def vector_add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def row_softmax(x, out, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * stride + i, e / tl.sum(e, 0), mask=i < n)


@triton.jit
def layer_norm(x, w, b, out, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < n
    v = tl.load(x + row * stride + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / n
    centred = tl.where(inside, v - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / n + eps)
    tl.store(
        out + row * stride + i, centred * scale * tl.load(w + i, mask=inside) + tl.load(b + i, mask=inside), inside
    )


@triton.jit
def matmul(
    a, b, c, M, N, K, sam, sak, sbk, sbn, scm, scn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for start in range(0, K, BK):
        x = tl.load(
            a + m[:, None] * sam + (start + k)[None, :] * sak,
            mask=(m[:, None] < M) & ((start + k)[None, :] < K),
            other=0.0,
        )
        y = tl.load(
            b + (start + k)[:, None] * sbk + n[None, :] * sbn,
            mask=((start + k)[:, None] < K) & (n[None, :] < N),
            other=0.0,
        )
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=ACC)
    tl.store(c + m[:, None] * scm + n[None, :] * scn, acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def reductions(x, total, biggest, where, all_bits, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=-2147483647)
    tl.store(total + row, tl.sum(tl.where(i < n, v, 0), 0))
    tl.store(biggest + row, tl.max(v, 0))
    tl.store(where + row, tl.argmax(v, 0))
    tl.store(all_bits + row, tl.xor_sum(tl.where(i < n, v, 0), 0))


@triton.jit
def atomics(index, value, sums, highest, lowest, bits, floats, swaps, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    at = tl.load(index + i, mask=inside, other=0.0)
    v = tl.load(value + i, mask=inside, other=0.0)
    tl.atomic_add(sums + at, v, mask=inside)
    tl.atomic_max(highest + at, v, mask=inside)
    tl.atomic_min(lowest + at, v, mask=inside)
    tl.atomic_or(bits + at, v, mask=inside)
    tl.atomic_add(floats + at, v.to(tl.float32), mask=inside)
    tl.atomic_xchg(swaps + i, v, mask=inside)


@triton.jit
def ticket(counter, order, n_programs):
    mine = tl.atomic_add(counter, 1)
    tl.store(order + tl.program_id(0), mine)
    tl.atomic_cas(counter + 1, 0, tl.program_id(0) + 1)


@triton.jit
def half_atomics(value, sums, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(sums + i % n, tl.load(value + i))


@triton.jit
def scans(x, sums, products, backwards, n: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, n)
    v = tl.load(x + row * n + i)
    tl.store(sums + row * n + i, tl.cumsum(v, 0))
    tl.store(products + row * n + i, tl.cumprod((v & 1) * 2 - 1, 0))
    tl.store(backwards + row * n + i, tl.cumsum(v, 0, reverse=True))


@triton.jit
def gather_rows(x, index, out, n: tl.constexpr, m: tl.constexpr):
    i = tl.arange(0, n)
    j = tl.arange(0, m)
    table = tl.load(x + i[:, None] * m + j[None, :])
    at = tl.load(index + i[:, None] * m + j[None, :])
    tl.store(out + i[:, None] * m + j[None, :], tl.gather(table, at, 1))


@triton.jit
def dropout(x, out, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    keep = tl.rand(seed, i) > p
    tl.store(out + i, tl.where(keep, v / (1 - p), 0.0), mask=i < n)


@triton.jit
def philox_bits(out, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.randint(seed, i))


@triton.jit
def sorted_rows(x, up, down, n: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, n)
    v = tl.load(x + row * n + i)
    tl.store(up + row * n + i, tl.sort(v))
    tl.store(down + row * n + i, tl.sort(v, descending=True))


@triton.jit
def transposed(x, out, n: tl.constexpr, m: tl.constexpr):
    i = tl.arange(0, n)
    j = tl.arange(0, m)
    v = tl.load(x + i[:, None] * m + j[None, :])
    tl.store(out + j[:, None] * n + i[None, :], tl.trans(v))


@triton.jit
def elementary(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    v = tl.load(x + i)
    tl.store(out + i, tl.exp(v))
    tl.store(out + n + i, tl.log(v))
    tl.store(out + 2 * n + i, tl.sqrt(v))
    tl.store(out + 3 * n + i, tl.sin(v))
    tl.store(out + 4 * n + i, tl.cos(v))
    tl.store(out + 5 * n + i, tl.erf(v))
    tl.store(out + 6 * n + i, tl.floor(v))
    tl.store(out + 7 * n + i, tl.sigmoid(v))
    tl.store(out + 8 * n + i, tl.sqrt_rn(v))
    tl.store(out + 9 * n + i, tl.div_rn(v, v + 1.0))
    tl.store(out + 10 * n + i, tl.exp2(v))
    tl.store(out + 11 * n + i, tl.fma(v, v, v))


@triton.jit
def doubles(x, y, out, n: tl.constexpr):
    i = tl.arange(0, n)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a * b + a)
    tl.store(out + n + i, a / b)
    tl.store(out + 2 * n + i, tl.sqrt(a))
    tl.store(out + 3 * n + i, tl.exp(b))
    tl.store(out + 4 * n + i, tl.maximum(a, b) - tl.minimum(a, b))


@triton.jit
def conversions(x, as_bf16, as_f16, as_e4m3, as_e5m2, as_i32, back, n: tl.constexpr):
    i = tl.arange(0, n)
    v = tl.load(x + i)
    tl.store(as_bf16 + i, v.to(tl.bfloat16))
    tl.store(as_f16 + i, v.to(tl.float16))
    tl.store(as_e4m3 + i, v.to(tl.float8e4nv))
    tl.store(as_e5m2 + i, v.to(tl.float8e5))
    tl.store(as_i32 + i, v.to(tl.int32))
    tl.store(back + i, v.to(tl.float8e5).to(tl.float32))


@triton.jit
def integer_ops(x, y, out, n: tl.constexpr):
    i = tl.arange(0, n)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a // b)
    tl.store(out + n + i, a % b)
    tl.store(out + 2 * n + i, tl.umulhi(a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)).to(tl.int32))
    tl.store(out + 3 * n + i, (a << (b & 7)) ^ (a >> 3))
    tl.store(out + 4 * n + i, (a.to(tl.int64) * b.to(tl.int64) >> 16).to(tl.int32))
    tl.store(out + 5 * n + i, tl.where(a > b, tl.abs(a), -b))


@triton.jit
def counted(x, out, n: tl.constexpr, bins: tl.constexpr):
    tl.store(out + tl.arange(0, bins), tl.histogram(tl.load(x + tl.arange(0, n)), bins))


@triton.jit
def attention(q, k, v, out, scale, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    head = tl.program_id(1) * n * D
    query = tl.load(q + head + m[:, None] * D + d[None, :])
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        j = start + tl.arange(0, BN)
        s = tl.dot(query, tl.trans(tl.load(k + head + j[:, None] * D + d[None, :]))) * scale
        high = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - high[:, None])
        old = tl.exp(top - high)
        total = total * old + tl.sum(p, 1)
        acc = acc * old[:, None]
        acc += tl.dot(p.to(query.dtype), tl.load(v + head + j[:, None] * D + d[None, :]))
        top = high
    tl.store(out + head + m[:, None] * D + d[None, :], acc / total[:, None])
