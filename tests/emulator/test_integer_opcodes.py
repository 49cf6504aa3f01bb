"""Integer, bit and conversion opcodes against Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ptx_lab import THREADS, apply

EXAMPLES = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
_EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def words(bits: int) -> st.SearchStrategy[np.ndarray]:
    """Arrays of unsigned words, one a thread, rich in edge values."""
    top = (1 << bits) - 1
    edges = [*(e & top for e in _EDGES), top, top >> 1, (top >> 1) + 1]
    elements = st.one_of(st.integers(0, top), st.sampled_from(edges))
    return hnp.arrays(f"u{bits // 8}", THREADS, elements=elements, fill=st.nothing())


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def trunc_div(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def s(f, bits=32):
    """Lift a function of signed integers to words."""
    return lambda *xs: f(*(signed(x, bits) for x in xs))


def bfe(a: int, pos: int, length: int, bits: int, is_signed: bool) -> int:
    """The pseudo code of the PTX manual, bit by bit."""
    pos, length, msb = pos & 0xFF, length & 0xFF, bits - 1
    sign = 0 if not is_signed or length == 0 else a >> min(pos + length - 1, msb) & 1
    out = 0
    for i in range(bits):
        out |= (a >> (pos + i) & 1 if i < length and pos + i <= msb else sign) << i
    return out


def bfi(a: int, b: int, pos: int, length: int, bits: int) -> int:
    pos, length = pos & 0xFF, length & 0xFF
    for i in range(length):
        if pos + i < bits:
            b = b & ~(1 << (pos + i)) | (a >> i & 1) << (pos + i)
    return b


def prmt(a: int, b: int, c: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        sel = c >> 4 * i & 15
        byte = source[sel & 7]
        out.append((0xFF if byte & 0x80 else 0) if sel & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def shf(a: int, b: int, c: int, left: bool, wrap: bool) -> int:
    n = c & 31 if wrap else min(c, 32)
    word = b << 32 | a
    return (word << n) >> 32 if left else word >> n


def bfind(a: int, bits: int, is_signed: bool) -> int:
    a = ~signed(a, bits) if is_signed and signed(a, bits) < 0 else a
    return a.bit_length() - 1 if a else -1


# instruction, bits of each source, bits of the result, formula on unsigned words (the result is truncated)
CASES = [
    ("add.s32", (32, 32), 32, lambda a, b: a + b),
    ("add.s64", (64, 64), 64, lambda a, b: a + b),
    ("add.u16", (16, 16), 16, lambda a, b: a + b),
    ("add.sat.s32", (32, 32), 32, s(lambda a, b: max(-(2**31), min(2**31 - 1, a + b)))),
    ("sub.s32", (32, 32), 32, lambda a, b: a - b),
    ("sub.s64", (64, 64), 64, lambda a, b: a - b),
    ("mul.lo.s32", (32, 32), 32, lambda a, b: a * b),
    ("mul.lo.s64", (64, 64), 64, lambda a, b: a * b),
    ("mul.lo.u16", (16, 16), 16, lambda a, b: a * b),
    ("mul.hi.u32", (32, 32), 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32", (32, 32), 32, s(lambda a, b: a * b >> 32)),
    ("mul.hi.u64", (64, 64), 64, lambda a, b: a * b >> 64),
    ("mul.hi.s64", (64, 64), 64, s(lambda a, b: a * b >> 64, 64)),
    ("mul.wide.u32", (32, 32), 64, lambda a, b: a * b),
    ("mul.wide.s32", (32, 32), 64, s(lambda a, b: a * b)),
    ("mul.wide.u16", (16, 16), 32, lambda a, b: a * b),
    ("mul.wide.s16", (16, 16), 32, s(lambda a, b: a * b, 16)),
    ("mad.lo.s32", (32, 32, 32), 32, lambda a, b, c: a * b + c),
    ("mad.lo.s64", (64, 64, 64), 64, lambda a, b, c: a * b + c),
    ("mad.hi.u32", (32, 32, 32), 32, lambda a, b, c: (a * b >> 32) + c),
    ("mad.wide.u32", (32, 32, 64), 64, lambda a, b, c: a * b + c),
    ("mad.wide.s32", (32, 32, 64), 64, lambda a, b, c: signed(a, 32) * signed(b, 32) + c),
    ("min.s32", (32, 32), 32, s(min)),
    ("max.s32", (32, 32), 32, s(max)),
    ("min.u32", (32, 32), 32, min),
    ("max.u64", (64, 64), 64, max),
    ("neg.s32", (32,), 32, lambda a: -a),
    ("neg.s64", (64,), 64, lambda a: -a),
    ("abs.s32", (32,), 32, s(abs)),
    ("and.b32", (32, 32), 32, lambda a, b: a & b),
    ("or.b64", (64, 64), 64, lambda a, b: a | b),
    ("xor.b16", (16, 16), 16, lambda a, b: a ^ b),
    ("not.b32", (32,), 32, lambda a: ~a),
    ("cnot.b32", (32,), 32, lambda a: a == 0),
    ("shl.b32", (32, 32), 32, lambda a, b: a << min(b, 32)),
    ("shl.b64", (64, 32), 64, lambda a, b: a << min(b, 64)),
    ("shl.b16", (16, 32), 16, lambda a, b: a << min(b, 16)),
    ("shr.u32", (32, 32), 32, lambda a, b: a >> min(b, 32)),
    ("shr.s32", (32, 32), 32, lambda a, b: signed(a, 32) >> min(b, 32)),
    ("shr.u64", (64, 32), 64, lambda a, b: a >> min(b, 64)),
    ("shr.s64", (64, 32), 64, lambda a, b: signed(a, 64) >> min(b, 64)),
    ("shr.u16", (16, 32), 16, lambda a, b: a >> min(b, 16)),
    ("shf.l.wrap.b32", (32, 32, 32), 32, lambda a, b, c: shf(a, b, c, True, True)),
    ("shf.r.wrap.b32", (32, 32, 32), 32, lambda a, b, c: shf(a, b, c, False, True)),
    ("shf.l.clamp.b32", (32, 32, 32), 32, lambda a, b, c: shf(a, b, c, True, False)),
    ("shf.r.clamp.b32", (32, 32, 32), 32, lambda a, b, c: shf(a, b, c, False, False)),
    ("div.u32", (32, 32), 32, lambda a, b: a // b if b else -1),
    ("div.s32", (32, 32), 32, s(lambda a, b: trunc_div(a, b) if b else -1)),
    ("div.s64", (64, 64), 64, s(lambda a, b: trunc_div(a, b) if b else -1, 64)),
    ("rem.u32", (32, 32), 32, lambda a, b: a % b if b else a),
    ("rem.s32", (32, 32), 32, s(lambda a, b: a - b * trunc_div(a, b) if b else a)),
    ("prmt.b32", (32, 32, 32), 32, prmt),
    ("bfe.u32", (32, 32, 32), 32, lambda a, b, c: bfe(a, b, c, 32, False)),
    ("bfe.s32", (32, 32, 32), 32, lambda a, b, c: bfe(a, b, c, 32, True)),
    ("bfe.u64", (64, 32, 32), 64, lambda a, b, c: bfe(a, b, c, 64, False)),
    ("bfe.s64", (64, 32, 32), 64, lambda a, b, c: bfe(a, b, c, 64, True)),
    ("bfi.b32", (32, 32, 32, 32), 32, lambda a, b, c, d: bfi(a, b, c, d, 32)),
    ("bfi.b64", (64, 64, 32, 32), 64, lambda a, b, c, d: bfi(a, b, c, d, 64)),
    ("popc.b32", (32,), 32, lambda a: a.bit_count()),
    ("popc.b64", (64,), 32, lambda a: a.bit_count()),
    ("clz.b32", (32,), 32, lambda a: 32 - a.bit_length()),
    ("clz.b64", (64,), 32, lambda a: 64 - a.bit_length()),
    ("brev.b32", (32,), 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("brev.b64", (64,), 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind.u32", (32,), 32, lambda a: bfind(a, 32, False)),
    ("bfind.s32", (32,), 32, lambda a: bfind(a, 32, True)),
    ("cvt.u16.u32", (32,), 16, lambda a: a),
    ("cvt.u32.u16", (16,), 32, lambda a: a),
    ("cvt.s32.s16", (16,), 32, lambda a: signed(a, 16)),
    ("cvt.s64.s32", (32,), 64, lambda a: signed(a, 32)),
    ("cvt.u64.u32", (32,), 64, lambda a: a),
    ("cvt.u32.u64", (64,), 32, lambda a: a),
    ("cvt.s32.s8", (32,), 32, lambda a: signed(a, 8)),
    ("cvt.u32.u8", (32,), 32, lambda a: a & 0xFF),
    ("cvt.sat.u8.s32", (32,), 32, lambda a: max(0, min(255, signed(a, 32)))),
    ("cvt.sat.s16.s32", (32,), 32, lambda a: max(-(2**15), min(2**15 - 1, signed(a, 32)))),
]


@pytest.mark.parametrize(("opcode", "sources", "bits", "formula"), CASES, ids=[c[0] for c in CASES])
@EXAMPLES
@given(data=st.data())
def test_opcode_equals_the_python_integer_formula(opcode, sources, bits, formula, data):
    """Every integer opcode gives, thread by thread, what Python's unbounded integers give, truncated."""
    names = "abcd"[: len(sources)]
    inputs = {name: data.draw(words(width)) for name, width in zip(names, sources, strict=True)}
    body = f"{opcode} %o, {', '.join('%' + n for n in names)};"
    got = apply(body, inputs, {"o": np.dtype(f"u{bits // 8}").type})["o"]
    want = [formula(*(int(inputs[n][i]) for n in names)) & ((1 << bits) - 1) for i in range(THREADS)]
    assert got.tolist() == want


@pytest.mark.parametrize("table", [0x00, 0x80, 0xE8, 0x96, 0xCA, 0xFF, 0x1B])
@EXAMPLES
@given(a=words(32), b=words(32), c=words(32))
def test_lop3_follows_its_truth_table(table, a, b, c):
    """lop3 answers bit (a<<2 | b<<1 | c) of its table for every bit position."""
    got = apply(f"lop3.b32 %o, %a, %b, %c, {table};", {"a": a, "b": b, "c": c}, {"o": np.uint32})["o"]
    assert got.tolist() == [lop3(int(x), int(y), int(z), table) for x, y, z in zip(a, b, c, strict=True)]


_COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("compare", _COMPARE)
@pytest.mark.parametrize("kind", ["u32", "s32", "u16", "s64"])
@EXAMPLES
@given(data=st.data())
def test_setp_compares_integers_and_combines_with_a_predicate(compare, kind, data):
    """setp gives the comparison and, in its second target, the complement; .and and .xor combine with a third."""
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    if is_signed and compare in ("lo", "ls", "hi", "hs"):
        return
    a, b, c = data.draw(words(bits)), data.draw(words(bits)), data.draw(words(32))
    b[::3] = a[::3]
    body = (
        f"setp.{compare}.{kind} %x|%y, %a, %b;\nsetp.ne.b32 %p1, %c, 0;\n"
        f"setp.{compare}.and.{kind} %z, %a, %b, %p1;\nsetp.{compare}.xor.{kind} %w, %a, %b, !%p1;"
    )
    got = apply(body, {"a": a, "b": b, "c": c}, {"x": bool, "y": bool, "z": bool, "w": bool})
    to = (lambda x: signed(int(x), bits)) if is_signed else int
    want = [_COMPARE[compare](to(x), to(y)) for x, y in zip(a, b, strict=True)]
    third = [x != 0 for x in c.tolist()]
    assert got["x"].tolist() == want
    assert got["y"].tolist() == [not x for x in want]
    assert got["z"].tolist() == [x and t for x, t in zip(want, third, strict=True)]
    assert got["w"].tolist() == [x != (not t) for x, t in zip(want, third, strict=True)]


@EXAMPLES
@given(a=words(32), b=words(32), d=words(64), c=words(32))
def test_moves_pack_unpack_and_select(a, b, d, c):
    """mov packs words low part first and unpacks them again; selp and predicate logic choose."""
    body = """
    mov.b64 %packed, {%a, %b};
    mov.b64 {%low, %high}, %d;
    mov.b32 {%h0, %h1}, %a;
    mov.b32 %swapped, {%h1, %h0};
    mov.b128 %q0, {%d, %packed};
    mov.b128 {%back, %d5}, %q0;
    setp.lt.u32 %p0, %a, %b; setp.gt.u32 %p1, %c, 1000;
    and.pred %p2, %p0, %p1; or.pred %p3, %p0, %p1; xor.pred %p4, %p0, %p1; not.pred %p5, %p0;
    selp.b32 %chosen, %a, %b, %p2;
    selp.b64 %wide, %d, %packed, !%p3;
    mov.pred %t, %p4;
    mov.pred %f, %p5;
    """
    got = apply(
        body, {"a": a, "b": b, "c": c, "d": d},
        {"packed": np.uint64, "low": np.uint32, "high": np.uint32, "swapped": np.uint32, "back": np.uint64,
         "chosen": np.uint32, "wide": np.uint64, "t": bool, "f": bool},
    )  # fmt: skip
    for i in range(THREADS):
        x, y, z, w = (int(v[i]) for v in (a, b, c, d))
        less, big = x < y, z > 1000
        assert got["packed"][i] == y << 32 | x
        assert (got["low"][i], got["high"][i]) == (w & 0xFFFFFFFF, w >> 32)
        assert got["swapped"][i] == x >> 16 | (x & 0xFFFF) << 16
        assert got["back"][i] == w
        assert got["chosen"][i] == (x if less and big else y)
        assert got["wide"][i] == (w if not (less or big) else y << 32 | x)
        assert (got["t"][i], got["f"][i]) == (less != big, not less)


def test_a_copied_register_does_not_follow_its_source():
    """After mov, changing the source in some threads leaves the copy alone (masked writes happen in place)."""
    a = np.arange(THREADS, dtype=np.uint32)
    body = """
    mov.b32 %o, %a;
    setp.lt.u32 %p1, %a, 10;
    @!%p1 bra DONE;
    add.s32 %a, %a, 100;
    DONE:
    mov.b32 %changed, %a;
    """
    got = apply(body, {"a": a}, {"o": np.uint32, "changed": np.uint32})
    assert got["o"].tolist() == a.tolist()
    assert got["changed"].tolist() == [x + 100 if x < 10 else x for x in a.tolist()]
