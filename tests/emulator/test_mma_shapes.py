"""mma.sync of TF32, FP8, INT8, F64 and f16 sums, wmma and movmatrix against matrix products."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import launch

FP8 = {"e4m3": [0, 0x38, 0x40, 0x44, 0x48], "e5m2": [0, 0x3C, 0x40, 0x42, 0x44]}  # the numbers 0 to 4
ELEMENT = {"f64": 8, "tf32": 4, "f16": 2, "s8": 1, "u8": 1, "e4m3": 1, "e5m2": 1}


def encode(v: np.ndarray, kind: str) -> np.ndarray:
    if kind in FP8:
        codes = np.array(FP8[kind], np.uint8)[np.abs(v)]
        return codes | np.where(v < 0, 0x80, 0).astype(np.uint8)
    return v.astype({"f64": np.float64, "tf32": np.float32, "f16": np.float16, "s8": np.int8, "u8": np.uint8}[kind])


def place_a(lane: int, register: int, i: int, each: int, rows: int) -> tuple[int, int]:
    """Row and column of an element of A, from the manual's figures."""
    g, t = lane // 4, lane % 4
    half, step = (register % 2, register // 2) if rows == 16 else (0, register)
    return g + 8 * half, t * each + i + 4 * each * step


def place_c(lane: int, element: int) -> tuple[int, int]:
    return lane // 4 + 8 * (element // 2), lane % 4 * 2 + element % 2


CASES = [
    *(("m16n8k4", "f32", "tf32", "tf32"), ("m16n8k8", "f32", "tf32", "tf32")),
    *(("m16n8k8", "f16", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16")),
    *((s, "s32", a, b) for s in ("m8n8k16", "m16n8k16", "m16n8k32") for a in ("s8", "u8") for b in ("s8", "u8")),
    *(("m16n8k32", d, a, b) for d in ("f32", "f16") for a in FP8 for b in FP8),
    *((s, "f64", "f64", "f64") for s in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
]


@pytest.mark.parametrize(("shape", "d", "a", "b"), CASES)
def test_fragments_multiply_in_their_documented_places(shape, d, a, b):
    """d = a b + c on small integers, exactly, with every element where the manual's figures put it."""
    rows, depth = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(depth)
    A = rng.integers(0 if a == "u8" else -4, 5, (rows, depth))
    B = rng.integers(0 if b == "u8" else -4, 5, (depth, 8))
    C = rng.integers(-9, 10, (rows, 8))
    width = 8 if d == "f64" else 4
    each = width // ELEMENT[a]
    na, nb = rows * depth // 32 // each, depth * 8 // 32 // each
    number = {"f32": np.float32, "f16": np.float16, "s32": np.int32, "f64": np.float64}[d]
    ea, eb = encode(A, a), encode(B, b)
    fa, fb = np.zeros((32, na, each), ea.dtype), np.zeros((32, nb, each), eb.dtype)
    fc = np.zeros((32, rows // 4), number)
    for lane in range(32):
        for r in range(na):
            for i in range(each):
                fa[lane, r, i] = ea[place_a(lane, r, i, each, rows)]
        for r in range(nb):
            for i in range(each):
                fb[lane, r, i] = eb[lane % 4 * each + i + 4 * each * r, lane // 4]
        for k in range(rows // 4):
            fc[lane, k] = C[place_c(lane, k)]
    word = np.uint64 if d == "f64" else np.uint32
    regs = np.concatenate([x.reshape(32, -1).view(word) for x in (fa, fb, fc)], 1)
    nc = regs.shape[1] - na - nb
    name, bits = ("%d", 64) if d == "f64" else ("%r", 32)
    lists = []
    at = 10
    for count in (na, nb, nc):
        lists.append("{" + ", ".join(f"{name}{at + i}" for i in range(count)) + "}")
        at += count
    total = regs.shape[1]
    body = (
        f"mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; mul.wide.u32 %d1, %r0, {total * width}; add.s64 %d0, %d0, %d1;"
    )
    body += "".join(f"ld.global.b{bits} {name}{10 + i}, [%d0+{width * i}];" for i in range(total))
    body += f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};"
    body += f"ld.param.u64 %d2, [dst]; mul.wide.u32 %d1, %r0, {nc * width}; add.s64 %d2, %d2, %d1;"
    body += "".join(f"st.global.b{bits} [%d2+{width * i}], {name}{10 + na + nb + i};" for i in range(nc))
    result, memory = launch(body, {"src": regs, "dst": 32 * nc * width}, threads=32)
    assert result.ok, result.findings
    got = memory.read("dst", number, (32, rows // 4))
    want = A @ B + C
    for lane in range(32):
        for k in range(rows // 4):
            assert got[lane, k] == want[place_c(lane, k)]


def test_integer_sums_wrap_or_clamp():
    """INT8 sums wrap in 32 bits, and clamp with .satfinite."""
    body = "mov.b32 %r1, 0x7f7f7f7f; mov.b32 %r2, 0x7fffffff; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 8;"
    body += "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r3, %r4}, {%r1}, {%r1}, {%r2, %r2};"
    body += "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32 {%r5, %r6}, {%r1}, {%r1}, {%r2, %r2};"
    body += "ld.param.u64 %d0, [dst]; add.s64 %d0, %d0, %d1; st.global.v2.b32 [%d0], {%r3, %r5};"
    result, memory = launch(body, {"dst": 256}, threads=32)
    assert result.ok
    got = memory.read("dst", np.int32, (32, 2))
    assert (got[:, 0] == (2**31 - 1 + 16 * 127 * 127) - 2**32).all() and (got[:, 1] == 2**31 - 1).all()


def test_movmatrix_transposes():
    """movmatrix gives lane 4r+c the elements of column r."""
    m = np.arange(64, dtype=np.uint16).reshape(8, 8)
    body = "mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; ld.param.u64 %d0, [src]; add.s64 %d0, %d0, %d1;"
    body += "ld.global.b32 %r1, [%d0]; movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1; st.global.b32 [%d0], %r2;"
    result, memory = launch(body, {"src": m}, threads=32)
    assert result.ok and np.array_equal(memory.read("src", np.uint16, (8, 8)), m.T)


@pytest.mark.parametrize("layouts", [("row", "col"), ("col", "row")])
@pytest.mark.parametrize("kind", ["f16", "s8", "tf32"])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_wmma_multiplies_tiles(kind, layouts, space):
    """wmma.load, mma and store through their own layout equal the product, from either memory and either order."""
    if space == "shared" and kind != "f16":
        pytest.skip("one type is enough for shared memory")
    k = 8 if kind == "tf32" else 16
    rng = np.random.default_rng(k)
    A, B = rng.integers(-4, 5, (16, k)), rng.integers(-4, 5, (k, 16))
    C = rng.integers(-9, 10, (16, 16))
    d = "s32" if kind == "s8" else "f32"
    number = np.int32 if d == "s32" else np.float32
    stored = [encode(x if layout == "row" else x.T, kind) for x, layout in zip((A, B), layouts, strict=True)]
    leads = [x.shape[1] for x in stored]
    na = {"f16": 8, "s8": 2, "tf32": 4}[kind]
    lists = ["{" + ", ".join(f"%r{s + i}" for i in range(c)) + "}" for s, c in ((10, na), (20, na), (30, 8))]
    shape = f"m16n16k{k}"
    size = stored[0].nbytes
    body = "ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b]; ld.param.u64 %d2, [c];"
    where = ["[%d0]", "[%d1]"]
    if space == "shared":
        body += "mov.u32 %r0, %tid.x; mov.u32 %r1, smem; mul.wide.u32 %d4, %r0, 16; add.s64 %d5, %d0, %d4;"
        body += "add.s64 %d6, %d1, %d4; cvt.u32.u64 %r2, %d4; add.u32 %r3, %r1, %r2;"
        body += "ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d5]; st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};"
        body += (
            f"ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d6]; st.shared.v4.b32 [%r3+{size}], {{%r4, %r5, %r6, %r7}};"
        )
        body += f"bar.sync 0; add.u32 %r2, %r1, {size};"
        where = ["[%r1]", "[%r2]"]
    memory_space = "shared" if space == "shared" else "global"
    body += f"wmma.load.a.sync.aligned.{layouts[0]}.{shape}.{memory_space}.{kind} {lists[0]}, {where[0]}, {leads[0]};"
    body += f"wmma.load.b.sync.aligned.{layouts[1]}.{shape}.{memory_space}.{kind} {lists[1]}, {where[1]}, {leads[1]};"
    body += f"wmma.load.c.sync.aligned.row.{shape}.global.{d} {lists[2]}, [%d2], 16;"
    types = f"{d}.{d}" if kind == "f16" else f"{d}.{kind}.{kind}.{d}"
    body += f"wmma.mma.sync.aligned.{layouts[0]}.{layouts[1]}.{shape}.{types} "
    body += f"{lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};"
    body += f"wmma.store.d.sync.aligned.row.{shape}.global.{d} [%d2], {lists[2]}, 16;"
    buffers = {"a": stored[0], "b": stored[1], "c": C.astype(number)}
    shared = ".shared .align 16 .b8 smem[1024];"
    for mode in ("lockstep", "race"):
        result, memory = launch(body, buffers, threads=32, shared=shared, mode=mode)
        assert result.ok, result.findings
        assert np.array_equal(memory.read("c", number, (16, 16)), (A @ B + C).astype(number))
