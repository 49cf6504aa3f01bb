"""Counters: known access patterns have known counts, the same in every mode."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ptx_lab import THREADS, launch

from kernel_factory.emulator import Counters
from kernel_factory.emulator.launch import BATCH_THREADS

MODES = ("lockstep", "warp-serial", "race")
SMEM = ".extern .shared .align 1024 .b8 smem[];"


def global_load(stride: int, kind: str = "b32", regs: str = "%r1") -> str:
    return (
        f"mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; mul.wide.u32 %d1, %r0, {stride}; add.s64 %d0, %d0, %d1;"
        f"\nld.global.{kind} {regs}, [%d0];\n"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("stride", "kind", "regs", "per_warp", "unique"),
    [
        (4, "b32", "%r1", 4, 8),
        (32, "b32", "%r1", 32, 64),
        (0, "b32", "%r1", 1, 1),
        (16, "v4.b32", "{%r1, %r2, %r3, %r4}", 16, 32),
        (8, "v2.b32", "{%r1, %r2}", 8, 16),
        (64, "v4.b32", "{%r1, %r2, %r3, %r4}", 32, 64),
    ],
)
def test_sectors_follow_from_the_stride(stride, kind, regs, per_warp, unique, mode):
    """Coalesced words ask for 4 sectors a warp, strided ones for 32, a broadcast for one."""
    result, _ = launch(global_load(stride, kind, regs), {"src": np.zeros(64 * 64, np.uint8)}, mode=mode)
    size = {"b32": 4, "v2.b32": 8, "v4.b32": 16}[kind]
    assert result.ok
    assert result.counters.memory["src"] == {
        "read": {"sectors": 2 * per_warp, "unique": unique, "bytes": THREADS * size}
    }
    (line,) = result.counters.lines.values()
    assert line["global"] == {"src.read": {"sectors": 2 * per_warp, "bytes": THREADS * size}}
    assert line["thread_instructions"] == THREADS


@pytest.mark.parametrize("order", ["%r0", "%r2"])
def test_sectors_do_not_depend_on_lane_order_or_guards(order):
    """A permuted coalesced access costs the same; a guard leaves only the sectors of the lanes that are on."""
    at = "mov.u32 %r0, %tid.x; mul.lo.s32 %r2, %r0, 5; bfi.b32 %r2, %r2, %r0, 0, 5; ld.param.u64 %d0, [dst];"
    at += f"mul.wide.u32 %d1, {order}, 4; add.s64 %d0, %d0, %d1;"
    result, _ = launch(at + "st.global.b32 [%d0], %r0;", {"dst": 256})
    assert result.counters.memory["dst"]["write"] == {"sectors": 8, "unique": 8, "bytes": 256}
    guarded = at + f"setp.lt.u32 %p1, {order}, 12; @%p1 st.global.b32 [%d0], %r0;"
    for mode in MODES:
        result, _ = launch(guarded, {"dst": 256}, mode=mode)
        assert result.counters.memory["dst"]["write"] == {"sectors": 2, "unique": 2, "bytes": 48}


def shared_access(stride: int, kind: str, regs: str) -> str:
    return (
        f"mov.u32 %r0, %tid.x; mov.u32 %r9, smem; mad.lo.s32 %r9, %r0, {stride}, %r9; st.shared.{kind} [%r9], {regs};"
    )


@pytest.mark.parametrize(
    ("stride", "kind", "regs", "wavefronts", "ideal"),
    [
        (4, "b32", "%r0", 1, 1),
        (8, "b32", "%r0", 2, 1),
        (128, "b32", "%r0", 32, 1),
        (132, "b32", "%r0", 1, 1),
        (0, "b32", "%r0", 1, 1),
        (2, "b16", "%h1", 1, 1),
        (8, "v2.b32", "{%r0, %r0}", 2, 2),
        (16, "v4.b32", "{%r0, %r0, %r0, %r0}", 4, 4),
        (0, "v4.b32", "{%r0, %r0, %r0, %r0}", 4, 4),
        (0, "v2.b32", "{%r0, %r0}", 2, 2),
        (32, "v4.b32", "{%r0, %r0, %r0, %r0}", 8, 4),
        (128, "v4.b32", "{%r0, %r0, %r0, %r0}", 32, 4),
        (144, "v4.b32", "{%r0, %r0, %r0, %r0}", 4, 4),
    ],
)
def test_wavefronts_follow_from_the_bank_model(stride, kind, regs, wavefronts, ideal):
    """Conflict-free patterns take the ideal number of wavefronts, conflicted ones one a distinct word in a bank."""
    for mode, grid in (("lockstep", 3), ("warp-serial", 1)):
        body = "mov.b16 %h1, 3;" + shared_access(stride, kind, regs)
        result, _ = launch(body, {}, shared=SMEM, dynamic=64 * 144, mode=mode, grid=grid)
        size = {"b16": 2, "b32": 4, "v2.b32": 8, "v4.b32": 16}[kind]
        want = {"wavefronts": 2 * grid * wavefronts, "ideal": 2 * grid * ideal, "bytes": THREADS * grid * size}
        assert result.counters.shared == want


@pytest.mark.parametrize(("stride", "wavefronts"), [(16, 4), (128, 32), (144, 4), (64, 16)])
def test_ldmatrix_takes_a_wavefront_a_matrix_when_rows_hit_all_banks(stride, wavefronts):
    """Rows 16 or 144 bytes apart are conflict-free; rows 128 apart put all eight in the same banks."""
    body = (
        f"mov.u32 %r0, %tid.x; mov.u32 %r9, smem; mad.lo.s32 %r9, %r0, {stride}, %r9;"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9];"
    )
    result, _ = launch(body, {}, threads=32, shared=SMEM, dynamic=32 * 144)
    assert result.counters.shared == {"wavefronts": wavefronts, "ideal": 4, "bytes": 512}


def test_counts_are_equal_in_every_mode_and_survive_json():
    """A kernel with a loop, a guard, barriers and divergence counts the same in all modes; JSON is lossless."""
    body = (
        "mov.u32 %r0, %tid.x; mov.u32 %r1, smem; mad.lo.s32 %r2, %r0, 12, %r1; mov.b32 %r3, 0; ld.param.u64 %d0, [dst];"
        "and.b32 %r4, %r0, 3; LOOP: st.shared.b32 [%r2], %r3; bar.sync 0;"
        "add.s32 %r3, %r3, 1; setp.lt.s32 %p1, %r3, 3; @%p1 bra LOOP;"
        "setp.eq.b32 %p2, %r4, 0; @%p2 bra END; mul.wide.u32 %d1, %r0, 20;"
        "add.s64 %d0, %d0, %d1; st.global.b32 [%d0], %r3;"
        "ld.shared.b32 %r5, [%r2]; END:"
    )
    counts = []
    for mode in MODES:
        result, _ = launch(body, {"dst": 64 * 20}, shared=SMEM, dynamic=64 * 12, mode=mode, grid=5)
        assert result.ok, [str(f) for f in result.findings]
        counts.append(json.loads(json.dumps(result.counters.to_json())))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["barriers"] == 3 * 2 * 5 and counts[0]["memory"]["dst"]["write"]["bytes"] == 48 * 5 * 4
    assert Counters.from_json(counts[0]).to_json() == counts[0]
    assert result.thread_instructions == counts[0]["thread_instructions"]


@pytest.mark.parametrize("mode", MODES)
def test_batches_do_not_show(mode, monkeypatch):
    """Running CTAs a few at a time or all together gives the same output, findings and counts."""
    body = (
        "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r9, smem; mad.lo.s32 %r8, %r0, 4, %r9;"
        "mad.lo.s32 %r2, %r1, 64, %r0; ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r2, 4; add.s64 %d0, %d0, %d1;"
        "st.shared.b32 [%r8], %r2; bar.sync 0; xor.b32 %r3, %r0, 40; mad.lo.s32 %r3, %r3, 4, %r9;"
        "ld.shared.b32 %r4, [%r3]; setp.lt.u32 %p1, %r1, 3; @%p1 bra SKIP; add.s32 %r4, %r4, 1000; SKIP:"
        "st.global.b32 [%d0], %r4; st.global.b32 [%d0], %r4;"
    )
    seen = []
    for threads in (64, 192, 65536):
        monkeypatch.setitem(BATCH_THREADS, mode, threads)
        result, memory = launch(body, {"dst": 7 * 256}, shared=SMEM, dynamic=256, grid=7, mode=mode)
        assert result.ok, [str(f) for f in result.findings]
        seen.append((memory.read("dst", np.uint32, (448,)).tolist(), result.counters.to_json()))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == [64 * c + (t ^ 40) + (1000 if c >= 3 else 0) for c in range(7) for t in range(64)]


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_parted_meet_again_before_they_store(mode):
    """After an if and else of odd and even lanes the warp stores together: 4 sectors, not 8."""
    body = (
        "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1;"
        "and.b32 %r1, %r0, 1; setp.eq.b32 %p1, %r1, 0; @%p1 bra EVEN; mov.b32 %r2, 7; bra.uni JOIN;"
        "EVEN: mov.b32 %r2, 8; JOIN: st.global.b32 [%d0], %r2;"
    )
    result, memory = launch(body, {"dst": 256}, mode=mode)
    assert result.ok and memory.read("dst", np.uint32, (4,)).tolist() == [8, 7, 8, 7]
    assert result.counters.memory["dst"]["write"] == {"sectors": 8, "unique": 8, "bytes": 256}
