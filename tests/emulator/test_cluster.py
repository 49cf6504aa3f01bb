"""Clusters and grids: ranks, distributed shared memory, cluster barriers, multicast, software grid barriers."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_lab import findings, launch, tensor_map, text
from ptx_lab import kinds

from kernel_factory.emulator import LaunchConfig, LaunchError, Memory, load, run

MODES = ("lockstep", "warp-serial", "race")
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
RANK = "mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mad.lo.s32 %r4, %r3, %r4, %r0;"
OUT = "ld.param.u64 %d9, [out]; mul.wide.u32 %d8, %r4, 4; add.s64 %d9, %d9, %d8; st.global.b32 [%d9], {0};"


def test_special_registers_of_a_cluster():
    """Rank, cluster number, place in the cluster and counts, for a cluster of 2 x 1 x 1 and a grid of 6."""
    body = RANK + (
        "mov.u32 %r5, %clusterid.x; mov.u32 %r6, %cluster_ctaid.x; mov.u32 %r7, %nclusterid.x;"
        "mov.u32 %r8, %cluster_nctaid.x; mov.u32 %r9, %cluster_nctarank; mov.b32 %r10, 0;"
        + "".join(f"mad.lo.s32 %r10, %r10, 10, %r{i};" for i in (2, 5, 6, 7, 8, 9))
        + OUT.format("%r10")
    )
    result, memory = launch(body, {"out": 6 * 128}, grid=6, cluster=2)
    assert result.ok, findings(result)
    got = memory.read("out", np.uint32, (6, 32))
    assert got[:, 0].tolist() == [322 + 1000 * (c % 2) + 10000 * (c // 2) + 100000 * (c % 2) for c in range(6)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("generic", [False, True])
def test_distributed_shared_memory_reads_and_writes_the_neighbour(generic, mode):
    """mapa names another CTA's variable; ld and st of shared::cluster and generic addresses reach it."""
    if generic:
        move = (
            "cvt.u64.u32 %d1, %r6; cvta.shared.u64 %d1, %d1; mapa.u64 %d2, %d1, %r7; getctarank.u64 %r12, %d2;"
            "ld.b32 %r8, [%d2]; add.s32 %r8, %r8, %r12; st.b32 [%d2+512], %r8;"
        )
    else:
        move = (
            "mapa.shared::cluster.u32 %r11, %r6, %r7; getctarank.shared::cluster.u32 %r12, %r11;"
            "ld.shared::cluster.b32 %r8, [%r11]; add.s32 %r8, %r8, %r12; st.shared::cluster.b32 [%r11+512], %r8;"
        )
    body = (
        RANK + "shl.b32 %r5, %r0, 2; add.s32 %r6, %r1, %r5; mul.lo.s32 %r8, %r4, 10; st.shared.b32 [%r6], %r8;"
        "xor.b32 %r7, %r2, 1;" + MEET + move + MEET + "ld.shared.b32 %r9, [%r6+512];" + OUT.format("%r9")
    )  # fmt: skip
    result, memory = launch(body, {"out": 4 * 256}, threads=64, grid=4, cluster=2, mode=mode)
    assert result.ok, findings(result)
    # The neighbour wrote this CTA's own value (rank of this CTA added) back into it.
    number = np.arange(256)
    assert np.array_equal(memory.read("out", np.uint32, (256,)), 10 * number + number // 64 % 2)


@pytest.mark.parametrize(
    ("drop", "kind"),
    [(0, "race-read-after-write"), (1, "race-read-after-write")],
)
def test_a_missing_cluster_barrier_is_a_race(drop, kind):
    """Reading the neighbour's memory without the cluster barrier before it is found, and so is a relaxed arrive."""
    body = (
        RANK + "shl.b32 %r5, %r0, 2; add.s32 %r6, %r1, %r5; st.shared.b32 [%r6], %r4; xor.b32 %r7, %r2, 1;"
        + ("" if drop == 0 else MEET.replace("arrive", "arrive.relaxed"))
        + "mapa.shared::cluster.u32 %r11, %r6, %r7; ld.shared::cluster.b32 %r8, [%r11];" + MEET + OUT.format("%r8")
    )  # fmt: skip
    result, _ = launch(body, {"out": 512}, threads=64, grid=2, cluster=2, mode="race")
    assert kind in kinds(result), findings(result)
    good = body.replace("arrive.relaxed", "arrive.release") if drop else body.replace("mapa", MEET + "mapa", 1)
    result, _ = launch(good, {"out": 512}, threads=64, grid=2, cluster=2, mode="race")
    assert result.ok, findings(result)
    fenced = body.replace("barrier.cluster.arrive.relaxed", "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed")
    if drop:
        result, _ = launch(fenced, {"out": 512}, threads=64, grid=2, cluster=2, mode="race")
        assert result.ok, findings(result)


def test_addresses_outside_of_the_cluster_are_findings():
    """A rank that the cluster does not have, and a plain shared access with another CTA's address."""
    for access, message in (
        ("mov.b32 %r7, 2; mapa.shared::cluster.u32 %r11, %r1, %r7; ld.shared::cluster.b32 %r8, [%r11];", "rank 2"),
        ("mov.b32 %r7, 1; mapa.shared::cluster.u32 %r11, %r1, %r7; ld.shared.b32 %r8, [%r11];", "shared access"),
    ):
        result, _ = launch(RANK + access, {"out": 512}, grid=2, cluster=2)
        assert kinds(result) == {"out-of-bounds"}
        assert message in result.findings[0].message
    memory = Memory(0)
    kernel = load(text("", ["out"], 32)).kernels["k"]
    with pytest.raises(LaunchError, match="cluster"):
        run(kernel, LaunchConfig(grid=(3, 1, 1), block=(32, 1, 1), cluster=(2, 1, 1), params=(bytes(8),)), memory)


@pytest.mark.parametrize("mode", MODES)
def test_remote_arrivals_complete_a_barrier_of_another_cta(mode):
    """Each CTA's 32 threads arrive on the barrier of the other; data written there before is seen after the wait."""
    body = (
        RANK + "@%p0 mbarrier.init.shared.b64 [%r1], 32; fence.mbarrier_init.release.cluster;" + MEET
        + "xor.b32 %r7, %r2, 1; mapa.shared::cluster.u32 %r11, %r1, %r7; shl.b32 %r5, %r0, 2; add.s32 %r6, %r11, %r5;"
        "st.shared::cluster.b32 [%r6+64], %r4; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];"
        "L: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra L;"
        "add.s32 %r6, %r1, %r5; ld.shared.b32 %r8, [%r6+64];" + OUT.format("%r8") + MEET
    )  # fmt: skip
    result, memory = launch(body, {"out": 512}, grid=4, cluster=2, mode=mode)
    assert result.ok, findings(result)
    assert np.array_equal(memory.read("out", np.uint32, (128,)), np.arange(128) ^ 32)
    bare = body.replace("fence.mbarrier_init.release.cluster;", "")
    result, _ = launch(bare, {"out": 512}, grid=4, cluster=2, mode="race")
    assert "mbarrier-init-unfenced" in kinds(result)


def test_a_cta_that_may_leave_too_early_is_found():
    """A remote arrival on a CTA that does not wait for the end of the others; a dropped wait for its init."""
    body = (
        RANK + "@%p0 mbarrier.init.shared.b64 [%r1], 32; fence.mbarrier_init.release.cluster;" + MEET
        + "setp.eq.u32 %p2, %r2, 0; @%p2 bra END; xor.b32 %r7, %r2, 1; mapa.shared::cluster.u32 %r11, %r1, %r7;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11]; END:"
    )  # fmt: skip
    result, _ = launch(body, {"out": 512}, grid=2, cluster=2, mode="race")
    assert kinds(result) == {"cluster-exit"}
    result, _ = launch(body + MEET, {"out": 512}, grid=2, cluster=2, mode="race")
    assert result.ok, findings(result)
    relaxed = body.replace("arrive.aligned", "arrive.relaxed.aligned") + MEET
    result, _ = launch(relaxed, {"out": 512}, grid=2, cluster=2, mode="race")
    assert result.ok, findings(result)


@pytest.mark.parametrize("mode", MODES)
def test_multicast_brings_one_tile_to_every_cta_of_the_mask(mode):
    """Each CTA of two loads half of a tile for both; each barrier counts all the bytes."""
    data = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    half = tensor_map(data, (64, 8), swizzle=3)
    body = (
        RANK + "@%p0 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;" + MEET
        + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 2048; mov.u64 %d0, map_x; cvta.param.u64 %d2, %d0;"
        "shl.b32 %r5, %r2, 10; add.s32 %r5, %r5, %r1; shl.b32 %r6, %r2, 3; mov.b16 %h1, 3;"
        "@%p0 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%r5+1024], [%d2, {0, %r6}], [%r1], %h1;"
        "L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra L; shl.b32 %r7, %r0, 4; xor.b32 %r7, %r7, %r7;"
        "shl.b32 %r7, %r0, 6; add.s32 %r7, %r7, %r1; ld.param.u64 %d9, [out]; mul.wide.u32 %d8, %r4, 64;"
        "add.s64 %d9, %d9, %d8;"
        + "".join(
            f"ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r7+{1024 + 16 * i}];"
            f"st.global.v4.b32 [%d9+{16 * i}], {{%r20, %r21, %r22, %r23}};"
            for i in range(4)
        ) + MEET
    )  # fmt: skip
    result, memory = launch(body, {"x": data, "out": 2 * 2048}, {"map_x": ("x", half)}, grid=2, cluster=2, mode=mode)
    assert result.ok, findings(result)
    got = memory.read("out", np.uint16, (2, 16, 8, 8))
    row, chunk = np.arange(16)[:, None], np.arange(8)
    want = data.reshape(16, 8, 8)[row, chunk ^ row % 8]
    assert np.array_equal(got[0], want) and np.array_equal(got[1], want)
    result, _ = launch(body.replace("%h1, 3", "%h1, 5"), {"x": data, "out": 2 * 2048}, {"map_x": ("x", half)},
                       grid=2, cluster=2, mode=mode)  # fmt: skip
    assert kinds(result) == {"bad-multicast"}


@pytest.mark.parametrize("mode", MODES)
def test_shared_memory_is_sent_to_another_cta(mode):
    """cp.async.bulk from shared::cta to shared::cluster completes on the receiver's barrier."""
    body = (
        RANK + "@%p0 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;" + MEET
        + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 128; shl.b32 %r5, %r0, 2; add.s32 %r6, %r1, %r5;"
        "st.shared.b32 [%r6+128], %r4; fence.proxy.async.shared::cta; bar.warp.sync -1; xor.b32 %r7, %r2, 1;"
        "mapa.shared::cluster.u32 %r11, %r1, %r7;"
        "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r11+256], [%r1+128], 128, [%r11];"
        "L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra L; ld.shared.b32 %r8, [%r6+256];"
        + OUT.format("%r8") + MEET
    )  # fmt: skip
    result, memory = launch(body, {"out": 256}, grid=2, cluster=2, mode=mode)
    assert result.ok, findings(result)
    assert np.array_equal(memory.read("out", np.uint32, (64,)), np.arange(64) ^ 32)


GRID_BARRIER = (
    RANK + "ld.param.u64 %d1, [count]; ld.param.u64 %d2, [data]; mul.wide.u32 %d3, %r3, 4; add.s64 %d3, %d3, %d2;"
    "mov.u32 %r5, %nctaid.x; @!%p0 bra MEET; st.global.b32 [%d3], %r3; fence.acq_rel.gpu;"
    "atom.global.add.u32 %r6, [%d1], 1;"
    "SPIN: ld.acquire.gpu.global.b32 %r7, [%d1]; setp.lt.u32 %p2, %r7, %r5; @%p2 bra SPIN; MEET: bar.sync 0;"
    "add.s32 %r8, %r3, 1; rem.u32 %r8, %r8, %r5; mul.wide.u32 %d4, %r8, 4; add.s64 %d4, %d4, %d2;"
    "ld.global.b32 %r9, [%d4];" + OUT.format("%r9")
)


@pytest.mark.parametrize("mode", MODES)
def test_a_software_grid_barrier_gets_every_cta_running(mode):
    """1200 CTAs that wait for one another finish though a batch holds fewer; without residency it is a deadlock."""
    grid = 1200
    buffers = {"count": np.zeros(1, np.uint32), "data": 4 * grid, "out": 128 * grid}
    result, memory = launch(GRID_BARRIER, buffers, grid=grid, mode=mode)
    assert result.ok, findings(result)
    got = memory.read("out", np.uint32, (grid, 32))
    assert np.array_equal(got, np.repeat((np.arange(grid) + 1) % grid, 32).reshape(grid, 32))


@pytest.mark.parametrize("mode", MODES)
def test_a_grid_barrier_beyond_residency_is_a_deadlock(mode):
    """With 16 CTAs on the device and 24 in the grid, the 16 poll for ever."""
    buffers = {"count": np.zeros(1, np.uint32), "data": 96, "out": 128 * 24}
    result, _ = launch(GRID_BARRIER, buffers, grid=24, mode=mode, resident=16)
    assert kinds(result) == {"deadlock"}
    assert "16 resident CTAs of 24" in result.findings[0].message
    assert "SPIN" in GRID_BARRIER and result.findings[0].line > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("generic", [False, True])
def test_atomics_reach_the_neighbours_memory(generic, mode):
    """Every thread of both CTAs adds to the neighbour's counter; without a barrier before the read it is a race."""
    if generic:
        add = "cvt.u64.u32 %d1, %r1; cvta.shared.u64 %d1, %d1; mapa.u64 %d2, %d1, %r7; atom.add.u32 %r8, [%d2], %r4;"
    else:
        add = "mapa.shared::cluster.u32 %r11, %r1, %r7; red.shared::cluster.add.u32 [%r11], %r4;"
    body = (
        RANK + "mov.b32 %r5, 0; st.shared.b32 [%r1], %r5; xor.b32 %r7, %r2, 1;" + MEET + add + MEET
        + "ld.shared.b32 %r9, [%r1];" + OUT.format("%r9")
    )  # fmt: skip
    result, memory = launch(body, {"out": 4 * 256}, threads=64, grid=4, cluster=2, mode=mode)
    assert result.ok, findings(result)
    sums = np.arange(256).reshape(4, 64).sum(axis=1)[[1, 0, 3, 2]]  # %r4 of all threads of the neighbour
    assert np.array_equal(memory.read("out", np.uint32, (4, 64)), np.broadcast_to(sums[:, None], (4, 64)))
    if mode == "race":
        start = body.rindex(MEET)
        unordered, _ = launch(body[:start] + body[start + len(MEET) :], {"out": 1024}, threads=64, grid=4, cluster=2,
                              mode=mode)  # fmt: skip
        assert "race-read-after-write" in kinds(unordered), findings(unordered)


def test_an_atomic_past_the_cluster_is_out_of_bounds():
    """A rank that the cluster does not have."""
    body = RANK + "mov.b32 %r7, 2; mapa.shared::cluster.u32 %r11, %r1, %r7; red.shared::cluster.add.u32 [%r11], %r7;"
    result, _ = launch(body, {"out": 256}, threads=32, grid=2, cluster=2)
    assert kinds(result) == {"out-of-bounds"} and "rank 2" in findings(result)[0]
