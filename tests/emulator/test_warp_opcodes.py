"""Warp collectives and matrix opcodes against lane-by-lane formulas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_lab import THREADS, apply, launch

EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))


def shfl(mode: str, values: list[int], lane: int, b: int, c: int) -> tuple[int, bool]:
    """The manual's formula for one lane."""
    bval, cval, mask = b & 31, c & 31, c >> 8 & 31
    maximum, minimum = lane & mask | cval & ~mask, lane & mask
    j, good = {
        "up": (lane - bval, lane - bval >= maximum), "down": (lane + bval, lane + bval <= maximum),
        "bfly": (lane ^ bval, (lane ^ bval) <= maximum),
        "idx": (minimum | (bval & ~mask), (minimum | (bval & ~mask)) <= maximum),
    }[mode]  # fmt: skip
    return values[j] if good else values[lane], good


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@EXAMPLES
@given(data=st.data())
def test_shfl_moves_values_between_lanes(mode, data):
    """shfl.sync reads the lane that the manual's formula names and tells whether it was in range."""
    c = data.draw(st.sampled_from([0x1F, 0x0, 0x181F, 0x1C1F, 0x1C00, 0x1E01]))
    b = np.array(data.draw(st.lists(st.integers(0, 40), min_size=THREADS, max_size=THREADS)), np.uint32)
    a = np.arange(THREADS, dtype=np.uint32) * 7919 + 5
    got = apply(f"shfl.sync.{mode}.b32 %o|%p, %a, %b, {c}, -1;", {"a": a, "b": b}, {"o": np.uint32, "p": bool})
    for i in range(THREADS):
        warp = a[i // 32 * 32 : i // 32 * 32 + 32].tolist()
        assert (int(got["o"][i]), bool(got["p"][i])) == shfl(mode, warp, i % 32, int(b[i]), c)


@EXAMPLES
@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=THREADS, max_size=THREADS), cut=st.integers(0, 2**32 - 1))
def test_vote_redux_and_elect(values, cut):
    """vote, redux and elect give every lane the warp's answer; lane 0 is elected."""
    a = np.array(values, np.uint32)
    body = f"""
    setp.ge.u32 %p1, %a, {cut};
    vote.sync.ballot.b32 %ballot, %p1, -1; vote.sync.any.pred %any, %p1, -1; vote.sync.all.pred %all, %p1, 0xffffffff;
    redux.sync.add.u32 %sum, %a, -1; redux.sync.max.s32 %max, %a, -1; redux.sync.xor.b32 %xor, %a, -1;
    elect.sync %r9|%leader, -1; activemask.b32 %active;
    """
    words = dict.fromkeys(("ballot", "sum", "max", "xor", "active"), np.uint32)
    got = apply(body, {"a": a}, {**words, "any": bool, "all": bool, "leader": bool})
    for i in range(THREADS):
        warp = values[i // 32 * 32 : i // 32 * 32 + 32]
        assert got["ballot"][i] == sum((x >= cut) << lane for lane, x in enumerate(warp))
        assert got["any"][i] == any(x >= cut for x in warp) and got["all"][i] == all(x >= cut for x in warp)
        assert got["sum"][i] == sum(warp) % 2**32
        assert got["max"][i].view(np.int32) == max(x - (x >> 31 << 32) for x in warp)
        assert got["xor"][i] == np.bitwise_xor.reduce(np.array(warp, np.uint32))
        assert got["leader"][i] == (i % 32 == 0) and got["active"][i] == 0xFFFFFFFF


STAGE = """
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; mul.wide.u32 %d1, %r0, 16; add.s64 %d0, %d0, %d1;
ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%d0];
mov.u32 %r5, smem; shl.b32 %r6, %r0, 4; add.s32 %r6, %r5, %r6;
st.shared.v4.b32 [%r6], {{%r1, %r2, %r3, %r4}};
bar.sync 0;
{body}
mul.wide.u32 %d1, %r0, {out}; ld.param.u64 %d0, [dst]; add.s64 %d0, %d0, %d1;
"""
SMEM = ".extern .shared .align 1024 .b8 smem[];"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_hands_out_rows_or_columns(count, trans):
    """Lane l receives elements 2(l%4) and 2(l%4)+1 of row l/4 of each 8x8 matrix, or of column l/4 with .trans."""
    matrices = np.arange(32 * 8, dtype=np.uint16).reshape(4, 8, 8)
    regs = ", ".join(f"%r{10 + i}" for i in range(count))
    suffix = ".trans" if trans else ""
    body = STAGE.format(out=16, body=f"ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{regs}}}, [%r6];")
    body += "".join(f"st.global.b32 [%d0+{4 * i}], %r{10 + i};" for i in range(count))
    result, memory = launch(body, {"src": matrices, "dst": 32 * 16}, threads=32, shared=SMEM, dynamic=512)
    assert result.ok, result.findings
    got = memory.read("dst", np.uint32, (32, 4))
    for lane in range(32):
        for i in range(count):
            m = matrices[i].T if trans else matrices[i]
            first = m[lane // 4, 2 * (lane % 4)], m[lane // 4, 2 * (lane % 4) + 1]
            assert got[lane, i] == int(first[0]) | int(first[1]) << 16


@pytest.mark.parametrize("trans", [False, True])
def test_stmatrix_is_the_reverse_of_ldmatrix(trans):
    """What ldmatrix read, stmatrix of the same form puts back in place."""
    matrices = np.random.default_rng(0).integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    suffix = ".trans" if trans else ""
    regs = "{%r10, %r11, %r12, %r13}"
    body = STAGE.format(
        out=16,
        body=f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {regs}, [%r6];"
        f"stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r6+512], {regs};"
        "bar.warp.sync -1; ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r6+512];",
    )
    body += "st.global.v4.b32 [%d0], {%r1, %r2, %r3, %r4};"
    for mode in ("lockstep", "race"):
        result, memory = launch(body, {"src": matrices, "dst": 512}, threads=32, shared=SMEM, dynamic=1024, mode=mode)
        assert result.ok, result.findings
        assert np.array_equal(memory.read("dst", np.uint16, (4, 8, 8)), matrices)


def fragment_positions(depth: int) -> tuple[list, list, list]:
    """(lane, register, half) -> (row, column) of A, B and the accumulators, from the PTX manual's figures."""
    a, b, c = [], [], []
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(depth // 2):
            a.append((lane, i // 2, i % 2, g + 8 * (i // 2 % 2), t * 2 + i % 2 + 8 * (i // 4)))
        for i in range(depth // 4):
            b.append((lane, i // 2, i % 2, t * 2 + i % 2 + 8 * (i // 2), g))
        for i in range(4):
            c.append((lane, i, 0, g + 8 * (i // 2), t * 2 + i % 2))
    return a, b, c


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("depth", [8, 16])
def test_mma_multiplies_fragments_in_their_documented_places(kind, depth):
    """mma.m16n8k8 and k16 equal the matrix product on integers, exactly, alone and in a chain with a zero start."""
    rng = np.random.default_rng(1)
    A, B = rng.integers(-4, 5, (16, depth)), rng.integers(-4, 5, (depth, 8))
    C = rng.integers(-9, 10, (16, 8)).astype(np.float32)

    def bits(x: float) -> int:
        return int(np.float32(x).view(np.uint32)) >> 16 if kind == "bf16" else int(np.float16(x).view(np.uint16))

    regs = np.zeros((32, 10), np.uint32)  # a0-3, b0-1, c0-3
    pa, pb, pc = fragment_positions(depth)
    for lane, reg, half, row, col in pa:
        regs[lane, reg] |= np.uint32(bits(A[row, col]) << 16 * half)
    for lane, reg, half, row, col in pb:
        regs[lane, 4 + reg] |= np.uint32(bits(B[row, col]) << 16 * half)
    for lane, reg, _, row, col in pc:
        regs[lane, 6 + reg] = C[row, col].view(np.uint32)
    a = ", ".join(f"%r{10 + i}" for i in range(depth // 4))
    b = ", ".join(f"%r{14 + i}" for i in range(depth // 8))
    opcode = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32"
    body = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; mul.wide.u32 %d1, %r0, 40; add.s64 %d0, %d0, %d1;"
    body += "".join(f"ld.global.b32 %r{10 + i}, [%d0+{4 * i}];" for i in range(10))
    body += f"""
    {opcode} {{%r20, %r21, %r22, %r23}}, {{{a}}}, {{{b}}}, {{%r16, %r17, %r18, %r19}};
    mov.b32 %r30, 0f00000000;
    {opcode} {{%r24, %r25, %r26, %r27}}, {{{a}}}, {{{b}}}, {{%r30, %r30, %r30, %r30}};
    {opcode} {{%r24, %r25, %r26, %r27}}, {{{a}}}, {{{b}}}, {{%r24, %r25, %r26, %r27}};
    ld.param.u64 %d2, [dst]; mul.wide.u32 %d1, %r0, 32; add.s64 %d2, %d2, %d1;
    """
    body += "".join(f"st.global.b32 [%d2+{4 * i}], %r{20 + i};" for i in range(8))
    result, memory = launch(body, {"src": regs, "dst": 32 * 32}, threads=32)
    assert result.ok, result.findings
    got = memory.read("dst", np.float32, (32, 8))
    want = A @ B
    for lane, reg, _, row, col in pc:
        assert got[lane, reg] == want[row, col] + C[row, col]
        assert got[lane, 4 + reg] == 2 * want[row, col]
    assert result.counters.mma == {f"m16n8k{depth}.{kind}": 3}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mode", ["lockstep", "warp-serial"])
def test_a_grid_of_mma_instructions_accumulates_over_k_and_over_a_loop(steps, mode):
    """A 2 x 3 grid of tiles, chained over k in fresh registers and carried around a loop by moves, is the product."""
    rows, columns, rounds = 2, 3, 2
    rng = np.random.default_rng(steps)
    A = rng.integers(-3, 4, (steps, rows, 16, 16)).astype(np.float32)
    B = rng.integers(-3, 4, (steps, columns, 16, 8)).astype(np.float32)
    pa, pb, pc = fragment_positions(16)
    fragments = np.zeros((32, steps, rows * 4 + columns * 2), np.uint32)
    for s in range(steps):
        for i in range(rows):
            for lane, reg, half, row, col in pa:
                fragments[lane, s, 4 * i + reg] |= (A[s, i, row, col].view(np.uint32) >> 16) << np.uint32(16 * half)
        for j in range(columns):
            for lane, reg, half, row, col in pb:
                word = (B[s, j, row, col].view(np.uint32) >> 16) << np.uint32(16 * half)
                fragments[lane, s, 4 * rows + 2 * j + reg] |= word
    width = fragments.shape[2]
    tiles = [(i, j) for i in range(rows) for j in range(columns)]
    lines = [f".reg .b32 %f<{steps * width}>; .reg .b32 %c<{4 * len(tiles) * (steps + 1)}>; mov.u32 %r0, %tid.x;"]
    lines.append(
        f"and.b32 %r1, %r0, 31; ld.param.u64 %d0, [src]; mul.wide.u32 %d1, %r1, {4 * steps * width};"
        "add.s64 %d0, %d0, %d1;"
    )
    lines += [f"ld.global.b32 %f{i}, [%d0+{4 * i}];" for i in range(steps * width)]
    lines += [f"mov.b32 %c{i}, 0f3F800000;" for i in range(4 * len(tiles))] + ["mov.b32 %r2, 0;", "LOOP:"]
    for s in range(steps):
        for n, (i, j) in enumerate(tiles):
            a = ", ".join(f"%f{s * width + 4 * i + x}" for x in range(4))
            b = ", ".join(f"%f{s * width + 4 * rows + 2 * j + x}" for x in range(2))
            c, d = (", ".join(f"%c{4 * (len(tiles) * k + n) + x}" for x in range(4)) for k in (s, s + 1))
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};")
    lines += [f"mov.b32 %c{i}, %c{4 * len(tiles) * steps + i};" for i in range(4 * len(tiles))]
    lines.append(f"add.s32 %r2, %r2, 1; setp.lt.s32 %p1, %r2, {rounds}; @%p1 bra LOOP;")
    lines.append(f"ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r0, {16 * len(tiles)}; add.s64 %d0, %d0, %d1;")
    lines += [f"st.global.b32 [%d0+{4 * i}], %c{i};" for i in range(4 * len(tiles))]
    result, memory = launch("\n".join(lines), {"src": fragments, "dst": 64 * 16 * len(tiles)}, mode=mode)
    assert result.ok, [str(f) for f in result.findings]
    got = memory.read("dst", np.float32, (2, 32, len(tiles), 4))
    for n, (i, j) in enumerate(tiles):
        want = 1 + rounds * sum(A[s, i] @ B[s, j] for s in range(steps))
        for lane, reg, _, row, col in pc:
            assert (got[:, lane, n, reg] == want[row, col]).all()
    assert result.counters.mma == {"m16n8k16.bf16": 2 * rounds * steps * len(tiles)}
