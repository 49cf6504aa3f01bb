"""Planted hazards of asynchronous Hopper kernels, each found by name; the right kernel is clean in every mode.

The kernel streams eight tiles through a ring of two stages: warp 0 loads them by TMA, warp 1 adds one to every word
of a tile in shared memory, and stores the tile back by TMA.
"""

from __future__ import annotations

import numpy as np
import pytest
from hopper_lab import findings, launch, tensor_map
from ptx_lab import kinds

MODES = ("lockstep", "warp-serial", "race")
TILES, STAGE = 8, 512
INIT = (
    "@%p0 mbarrier.init.shared.b64 [%r1], 1; @%p0 mbarrier.init.shared.b64 [%r1+8], 1;"
    "@%p0 mbarrier.init.shared.b64 [%r1+16], 1; @%p0 mbarrier.init.shared.b64 [%r1+24], 1;"
    "fence.mbarrier_init.release.cluster; bar.sync 0;"
)
# %r2 tile, %r3 stage, %r4 parity, %r5 full barrier, %r6 empty barrier, %r7 stage data
STEP = (
    "and.b32 %r3, %r2, 1; shr.u32 %r4, %r2, 1; and.b32 %r4, %r4, 1; shl.b32 %r5, %r3, 3; add.s32 %r5, %r5, %r1;"
    "add.s32 %r6, %r5, 16; shl.b32 %r7, %r3, 9; add.s32 %r7, %r7, %r1; add.s32 %r7, %r7, 1024; shl.b32 %r8, %r2, 2;"
)
NEXT = "add.s32 %r2, %r2, 1; setp.lt.u32 %p4, %r2, 8; @%p4 bra {0};"
EMPTY = "xor.b32 %r9, %r4, 1; EW: mbarrier.try_wait.parity.shared.b64 %p1, [%r6], %r9; @!%p1 bra EW;"
FULL = "FW: mbarrier.try_wait.parity.shared.b64 %p1, [%r5], %r4; @!%p1 bra FW;"
LOAD = (
    "elect.sync _|%p5, -1; @%p5 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r5], 512;"
    "@%p5 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r7], [%d2, {0, %r8}], [%r5];"
)
# Every lane adds 1 to its own four words.
WORK = (
    "and.b32 %r10, %r0, 31; shl.b32 %r10, %r10, 4; add.s32 %r10, %r10, %r7;"
    "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r10]; add.s32 %r20, %r20, 1; add.s32 %r21, %r21, 1;"
    "add.s32 %r22, %r22, 1; add.s32 %r23, %r23, 1; st.shared.v4.b32 [%r10], {%r20, %r21, %r22, %r23};"
)
STORE = (
    "elect.sync _|%p5, -1;"
    "@%p5 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d3, {0, %r8}], [%r7];"
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
)
KERNEL = (
    "mov.u64 %d4, map_x; cvta.param.u64 %d2, %d4; mov.u64 %d4, map_y; cvta.param.u64 %d3, %d4; mov.b32 %r2, 0;"
    + INIT
    + "setp.lt.u32 %p2, %r0, 32; @!%p2 bra CONSUME; PRODUCE:" + STEP + EMPTY + LOAD + NEXT.format("PRODUCE")
    + "bra END; CONSUME:" + STEP + FULL + WORK + "fence.proxy.async.shared::cta; bar.warp.sync -1;" + STORE
    + "bar.warp.sync -1; @%p5 mbarrier.arrive.shared.b64 %d1, [%r6];" + NEXT.format("CONSUME") + "END:"
)  # fmt: skip


def stream(mode: str, edit=str, seed: int = 0):
    """Run the kernel (edited); the run and whether its output is right."""
    data = np.arange(TILES * 128, dtype=np.uint32).reshape(TILES * 4, 32)
    tile = tensor_map(data, (32, 4))
    result, memory = launch(
        edit(KERNEL), {"x": data, "y": data.nbytes}, {"map_x": ("x", tile), "map_y": ("y", tile)},
        threads=64, mode=mode, seed=seed,
    )  # fmt: skip
    return result, np.array_equal(memory.read("y", np.uint32, data.shape), data + 1)


@pytest.mark.parametrize("mode", MODES)
def test_the_right_kernel_is_exact_and_clean(mode):
    """Several seeds of each mode."""
    for seed in range(3):
        result, right = stream(mode, seed=seed)
        assert result.ok, findings(result)
        assert right


HAZARDS = {
    "no empty wait": ((EMPTY, ""), {"race-write-after-read", "async-read-in-flight", "mbarrier-arrivals"}),
    "no full wait": ((FULL, ""), {"async-in-flight", "uninitialised-shared"}),
    "no proxy fence": (("fence.proxy.async.shared::cta;", ""), {"missing-proxy-fence"}),
    "no warp sync before the store": (
        ("bar.warp.sync -1;elect.sync", "elect.sync"),
        {"warp-race-read-after-write"},
    ),
    "early reuse of the source": (("cp.async.bulk.wait_group.read 0;", ""), {"async-read-in-flight"}),
    "no commit": (("cp.async.bulk.commit_group;", ""), {"async-read-in-flight"}),
    "init without fence": (("fence.mbarrier_init.release.cluster;", ""), {"mbarrier-init-unfenced"}),
    "init without barrier": (("bar.sync 0;", ""), {"mbarrier-init-race", "mbarrier-uninitialised"}),
    "too few bytes expected": (("%d1, [%r5], 512", "%d1, [%r5], 256"), {"mbarrier-bytes", "deadlock"}),
    "too many bytes expected": (("%d1, [%r5], 512", "%d1, [%r5], 1024"), {"deadlock"}),
    "no expected bytes": ((".expect_tx.shared.b64 %d1, [%r5], 512", ".shared.b64 %d1, [%r5]"),
                          {"async-in-flight", "mbarrier-bytes", "deadlock", "async-not-waited"}),
    "no arrival on empty": (("@%p5 mbarrier.arrive.shared.b64 %d1, [%r6];", ""), {"deadlock"}),
    "empty barrier counts two": (("[%r1+16], 1", "[%r1+16], 2"), {"deadlock"}),
    "wrong parity": (("xor.b32 %r9, %r4, 1;", "mov.b32 %r9, %r4;"), {"deadlock"}),
    "unaligned tile": (("%r7, %r7, 1024", "%r7, %r7, 1040"), {"misaligned"}),
}  # fmt: skip


@pytest.mark.parametrize("name", HAZARDS)
def test_each_planted_hazard_is_found(name):
    """The race checker names every one of them, with a line and a cure."""
    (old, new), expected = HAZARDS[name]
    assert old in KERNEL
    result, _ = stream("race", lambda text: text.replace(old, new))
    assert expected & kinds(result), findings(result)
    assert all(f.cure and f.message for f in result.findings)


def test_a_run_says_whether_it_reached_its_end():
    """A race is collected and the run goes on; a deadlock stops it."""
    for name, complete in (("no proxy fence", True), ("no arrival on empty", False)):
        (old, new), _ = HAZARDS[name]
        assert stream("race", lambda text, old=old, new=new: text.replace(old, new))[0].complete is complete


@pytest.mark.parametrize("name", ["no full wait", "early reuse of the source", "init without barrier"])
def test_late_landing_shows_missing_waits_in_the_numbers(name):
    """In warp-serial order what lands late is missed: the output is wrong or the run faults, for some seed."""
    (old, new), _ = HAZARDS[name]
    runs = [stream("warp-serial", lambda text: text.replace(old, new), seed) for seed in range(6)]
    assert any(not right or not result.ok for result, right in runs)


def test_a_waiter_that_can_miss_a_phase_is_found():
    """A barrier whose phases do not wait for their waiter: two phases on, the parity is the same again."""
    body = (
        "@%p0 mbarrier.init.shared.b64 [%r1], 1; bar.sync 0; setp.lt.u32 %p2, %r0, 32; @%p2 bra A;"
        "L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra L; bar.sync 1, 64; bra END;"
        "A: @%p0 mbarrier.arrive.shared.b64 %d1, [%r1]; bar.sync 1, 64; @%p0 mbarrier.arrive.shared.b64 %d1, [%r1];"
        "END:"
    )
    result, _ = launch(body, {"out": 64}, threads=64, mode="race")
    assert result.ok, findings(result)
    result, _ = launch(body.replace("bar.sync 1, 64;", ""), {"out": 64}, threads=64, mode="race")
    assert kinds(result) == {"mbarrier-phase-lag"}
    assert "parity" in result.findings[0].message


def test_a_store_of_bytes_that_nobody_wrote_is_found():
    """The async proxy reads uninitialised shared memory."""
    data = np.zeros((4, 32), np.uint32)
    body = (
        "mov.u64 %d4, map_y; cvta.param.u64 %d3, %d4;"
        "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d3, {0, 0}], [%r1];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    )
    result, _ = launch(body, {"y": data}, {"map_y": ("y", tensor_map(data, (32, 4)))}, mode="race")
    assert kinds(result) == {"uninitialised-shared"}
