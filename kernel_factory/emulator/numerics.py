"""Arithmetic of PTX on NumPy arrays: bf16, flush to zero, fused multiply-add, integer helpers.

Arrays hold one value a thread (or one for all). Nothing here knows of machines or memory.
"""

from __future__ import annotations

import numpy as np

_TINY = np.float32(1.1754944e-38)
_U16, _U32, _U64, _I64, _F32, _F64 = np.uint16, np.uint32, np.uint64, np.int64, np.float32, np.float64


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """f32 to bf16 bits in the low half of a u32, round to nearest even; NaN becomes 0x7fff as on the GPU."""
    b = np.ascontiguousarray(x).view(_U32)
    r = (b + (((b >> 16) & 1) + _U32(0x7FFF))) >> 16
    nan = (b & _U32(0x7FFFFFFF)) > _U32(0x7F800000)
    if nan.any():
        r[nan] = 0x7FFF
    return r


def bf16_bits_rz(x: np.ndarray) -> np.ndarray:
    """As bf16_bits, rounding towards zero."""
    b = np.ascontiguousarray(x).view(_U32)
    return np.where((b & _U32(0x7FFFFFFF)) > _U32(0x7F800000), _U32(0x7FFF), b >> 16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (any unsigned type) to f32."""
    return (bits.astype(_U32) << 16).view(_F32)


def f16_bits(x: np.ndarray) -> np.ndarray:
    """f32 or f64 to f16 bits in a u32; NaN becomes 0x7fff."""
    bits = x.astype(np.float16).view(_U16).astype(_U32)
    return np.where(np.isnan(x), _U32(0x7FFF), bits)


def low_bf16(x: np.ndarray) -> np.ndarray:
    return (x << 16).view(_F32)


def high_bf16(x: np.ndarray) -> np.ndarray:
    return (x & _U32(0xFFFF0000)).view(_F32)


def ftz(x: np.ndarray) -> np.ndarray:
    """Flush f32 subnormals to zero of the same sign."""
    return x * (np.abs(x) >= _TINY)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """f32 fused multiply-add through f64: the product is exact, the sum rounds twice in about 1 case of 2**29."""
    return (a.astype(_F64) * b + c).astype(_F32)


def to_f32_odd(x: np.ndarray) -> np.ndarray:
    """f64 to f32 rounding to odd, so that a later rounding to bf16 is the only one that shows."""
    y = x.astype(_F32)
    away = np.abs(y.astype(_F64)) > np.abs(x)
    inexact = (y.astype(_F64) != x) & np.isfinite(x) & np.isfinite(y)
    bits = y.view(_U32) - (away & inexact).astype(_U32)
    return (bits | inexact.astype(_U32)).view(_F32)


def float_min(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.f32: a NaN loses, -0 is less than +0."""
    r = np.fmin(a, b).view(_U32)
    same = a == b
    return np.where(same, a.view(_U32) | b.view(_U32), r).view(_F32)


def float_max(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.f32: a NaN loses, +0 is greater than -0."""
    r = np.fmax(a, b).view(_U32)
    same = a == b
    return np.where(same, a.view(_U32) & b.view(_U32), r).view(_F32)


def canonical_nan(x: np.ndarray) -> np.ndarray:
    """min.NaN and max.NaN return 0x7fffffff."""
    nan = np.isnan(x)
    return np.where(nan, _U32(0x7FFFFFFF), x.view(_U32)).view(_F32) if nan.any() else x


def pair_map(f, *xs: np.ndarray) -> np.ndarray:
    """Apply ``f`` to the two f32 halves of 64-bit words."""
    shape = np.broadcast_shapes(*(x.shape for x in xs))
    halves = [np.ascontiguousarray(x).view(_F32).reshape(-1, 2) for x in xs]
    return np.ascontiguousarray(np.broadcast_to(f(*halves), (*shape, 2)), _F32).reshape(-1).view(_U64)


def pack64(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    out = np.empty((max(lo.shape[0], hi.shape[0]), 2), _U32)
    out[:, 0], out[:, 1] = lo, hi
    return out.reshape(-1).view(_U64)


def pack128(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    out = np.empty((max(lo.shape[0], hi.shape[0]), 2), _U64)
    out[:, 0], out[:, 1] = lo, hi
    return out.reshape(-1).view(np.complex128)


def divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Integer division, truncating; by zero gives all ones, as NVIDIA hardware does for unsigned words."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "i":
        q = np.floor_divide(a, safe)
        q = q + ((q * safe != a) & ((a < 0) != (safe < 0)))
    else:
        q = a // safe
    return np.where(zero, np.array(-1).astype(a.dtype), q).astype(a.dtype) if zero.any() else q.astype(a.dtype)


def remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    zero = b == 0
    r = np.fmod(a, np.where(zero, b.dtype.type(1), b))
    return np.where(zero, a, r).astype(a.dtype)


def multiply_high_64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """High 64 bits of a 64x64 product, unsigned or signed by dtype."""
    x, y = a.astype(_U64), b.astype(_U64)
    mask = _U64(0xFFFFFFFF)
    xl, xh, yl, yh = x & mask, x >> _U64(32), y & mask, y >> _U64(32)
    mid = xh * yl + ((xl * yl) >> _U64(32))
    mid2 = xl * yh + (mid & mask)
    high = xh * yh + (mid >> _U64(32)) + (mid2 >> _U64(32))
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, _U64(0)) - np.where(b < 0, x, _U64(0))
    return high.astype(a.dtype)


def saturate(x: np.ndarray, dtype: type) -> np.ndarray:
    """Float to integer as cvt does: clamp to the range; NaN is zero, but the top bit alone from f64 and to 64 bits."""
    info = np.iinfo(dtype)
    nan = dtype((info.min or info.max // 2 + 1) if x.dtype == _F64 or info.bits == 64 else 0)
    wide = np.where(np.isnan(x), 0, x).astype(_F64)
    top = wide >= float(info.max)
    inner = np.where(top | (wide <= float(info.min)), 0.0, wide)
    out = inner.astype(dtype)
    out = np.where(top, dtype(info.max), np.where(wide <= float(info.min), dtype(info.min), out))
    return np.where(np.isnan(x), nan, out)


def clamp_integer(x: np.ndarray, dtype: type) -> np.ndarray:
    """Integer to integer with .sat."""
    info = np.iinfo(dtype)
    low = max(info.min, np.iinfo(x.dtype).min)
    return np.clip(x, x.dtype.type(low), x.dtype.type(min(info.max, np.iinfo(x.dtype).max))).astype(dtype)


def permute_bytes(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """prmt.b32 in its default mode."""
    both = (b.astype(_U64) << _U64(32)) | a.astype(_U64)
    out = np.zeros(1, _U32)
    for i in range(4):
        sel = (c >> _U32(4 * i)) & _U32(15)
        byte = ((both >> ((sel & _U32(7)).astype(_U64) << _U64(3))) & _U64(0xFF)).astype(_U32)
        sign = np.where(byte & _U32(0x80), _U32(0xFF), _U32(0))
        out = out | (np.where(sel & _U32(8), sign, byte) << _U32(8 * i))
    return out


def logic3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3.b32: bit i of the table answers a=i>>2, b=i>>1&1, c=i&1."""
    out = np.zeros(1, _U32)
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return np.broadcast_to(out, np.broadcast_shapes(a.shape, b.shape, c.shape)).copy()


def funnel_shift(a: np.ndarray, b: np.ndarray, c: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """shf: shift the 64-bit word b:a; left returns the high half, right the low half."""
    c = ((c & _U32(31)) if wrap else np.minimum(c, _U32(32))).astype(_U64)
    word = (b.astype(_U64) << _U64(32)) | a.astype(_U64)
    return ((word << c) >> _U64(32)).astype(_U32) if left else (word >> c).astype(_U32)


def extract_bits(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfe, signed or unsigned by dtype of ``a``."""
    bits = a.dtype.itemsize * 8
    pos, n = (position & _U32(0xFF)).astype(_I64), (length & _U32(0xFF)).astype(_I64)
    fill = a.dtype.kind == "i"
    unsigned = a.view(f"u{a.dtype.itemsize}").astype(_U64)
    n_eff = np.minimum(n, np.maximum(bits - pos, 0))
    mask = np.where(n_eff >= 64, ~_U64(0), (_U64(1) << np.minimum(n_eff, 63).astype(_U64)) - _U64(1))
    out = np.where(pos < bits, unsigned >> np.minimum(pos, 63).astype(_U64), _U64(0)) & mask
    if fill:
        last = np.minimum(pos + n - 1, bits - 1)
        sign = (unsigned >> np.clip(last, 0, 63).astype(_U64)) & _U64(1)
        out = np.where((n > 0) & (sign != 0), out | ~mask, out)
    return out.astype(f"u{a.dtype.itemsize}").view(a.dtype)


def insert_bits(a: np.ndarray, b: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
    """bfi: insert the low bits of ``a`` into ``b``."""
    bits = a.dtype.itemsize * 8
    pos, n = (position & _U32(0xFF)).astype(_U64), np.minimum((length & _U32(0xFF)).astype(_U64), _U64(64))
    mask = np.where(n >= 64, ~_U64(0), (_U64(1) << np.minimum(n, _U64(63))) - _U64(1))
    mask = np.where(pos < bits, mask << np.minimum(pos, _U64(63)), _U64(0))
    value = np.where(pos < bits, a.astype(_U64) << np.minimum(pos, _U64(63)), _U64(0))
    return ((b.astype(_U64) & ~mask) | (value & mask)).astype(a.dtype)


def count_bits(a: np.ndarray) -> np.ndarray:
    return np.bitwise_count(a).astype(_U32)


def leading_zeros(a: np.ndarray) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    for shift in (1, 2, 4, 8, 16, *((32,) if bits == 64 else ())):
        a = a | (a >> a.dtype.type(shift))
    return (bits - np.bitwise_count(a)).astype(_U32)


def find_leading(a: np.ndarray, shift_amount: bool) -> np.ndarray:
    """bfind: position of the most significant non-sign bit, or 0xffffffff."""
    bits = a.dtype.itemsize * 8
    word = np.where(a < 0, ~a, a).view(f"u{a.dtype.itemsize}") if a.dtype.kind == "i" else a
    position = _U32(bits - 1) - leading_zeros(word)
    if shift_amount:
        position = np.where(word == 0, position, _U32(bits - 1) - position)
    return np.where(word == 0, _U32(0xFFFFFFFF), position)


def reverse_bits(a: np.ndarray) -> np.ndarray:
    kind = a.dtype.type
    for shift, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        m = kind(mask & int(np.iinfo(kind).max))
        a = ((a >> kind(shift)) & m) | ((a & m) << kind(shift))
    return a.byteswap()


def nan_either(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def nan_if(condition: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.where(condition, _U32(0x7FFFFFFF), x.view(_U32)).view(_F32)
