"""Barriers, asynchronous copies, divergence, and the faults of each: what every mode must find."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import kinds, launch

SMEM = ".extern .shared .align 1024 .b8 smem[];"
MODES = ("lockstep", "warp-serial", "race")
AT = "mov.u32 %r0, %tid.x; mov.u32 %r9, smem; mad.lo.s32 %r8, %r0, 16, %r9; "
AT += "ld.param.u64 %d0, [src]; ld.param.u64 %d1, [dst]; mul.wide.u32 %d2, %r0, 16;"
AT += "add.s64 %d0, %d0, %d2; add.s64 %d1, %d1, %d2;"
REVERSED = "xor.b32 %r7, %r0, {mask}; mad.lo.s32 %r7, %r7, 16, %r9;"
TAKE = "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r7]; st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};"
DATA = np.arange(4 * 64, dtype=np.uint32).reshape(64, 4)


def copy(
    *,
    wait: str = "cp.async.wait_group 0;",
    commit: str = "cp.async.commit_group;",
    barrier: str = "bar.sync 0;",
    mask: int = 63,
) -> str:
    """Stage 16 bytes a thread by cp.async and read another thread's."""
    return (
        AT + REVERSED.format(mask=mask) + "cp.async.cg.shared.global [%r8], [%d0], 16;" + commit + wait + barrier + TAKE
    )


def go(body: str, mode: str, seed: int = 0):
    result, memory = launch(body, {"src": DATA, "dst": 1024}, shared=SMEM, dynamic=1024, mode=mode, seed=seed)
    return result, memory.read("dst", np.uint32, (64, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_correct_staged_copy_has_no_findings(mode):
    """Copy, commit, wait, barrier, read: right numbers and nothing found, in every mode."""
    result, got = go(copy(), mode)
    assert result.ok, [str(f) for f in result.findings]
    assert np.array_equal(got, DATA[::-1])
    assert result.counters.cp_async_bytes == 1024


def test_a_missing_wait_gives_wrong_numbers_and_a_finding():
    """Without the wait, data has not landed: poison in the numbers, async-in-flight in race mode."""
    for mode in ("lockstep", "warp-serial"):
        _, got = go(copy(wait=""), mode)
        assert not np.array_equal(got, DATA[::-1])
    result, _ = go(copy(wait=""), "race")
    assert "async-in-flight" in kinds(result)
    finding = next(f for f in result.findings if f.kind == "async-in-flight")
    assert finding.text.startswith("ld.shared") and finding.other_line > 0 and "wait_group" in finding.cure


def test_a_wait_that_leaves_the_group_pending_is_found():
    """wait_group 1 after one commit covers nothing."""
    result, got = go(copy(wait="cp.async.wait_group 1;"), "race")
    assert "async-in-flight" in kinds(result) and not np.array_equal(got, DATA[::-1])


def test_a_missing_commit_is_found_and_wait_all_needs_none():
    """Uncommitted copies are not covered by wait_group; wait_all covers them."""
    assert "async-in-flight" in kinds(go(copy(commit=""), "race")[0])
    result, got = go(copy(commit="", wait="cp.async.wait_all;"), "race")
    assert result.ok and np.array_equal(got, DATA[::-1])


def test_a_missing_barrier_is_found():
    """Without bar.sync the other warp's data is a race; under some warp order the numbers are wrong."""
    result, _ = go(copy(barrier=""), "race")
    assert "race-read-after-write" in kinds(result)
    wrong = [not np.array_equal(go(copy(barrier=""), "warp-serial", seed)[1], DATA[::-1]) for seed in range(4)]
    assert all(wrong)


def test_within_a_warp_the_other_lanes_data_needs_a_warp_barrier():
    """Reading a neighbour lane's cp.async needs bar.warp.sync after the wait."""
    assert kinds(go(copy(barrier="", mask=1), "race")[0]) == {"warp-race-read-after-write"}
    result, got = go(copy(barrier="bar.warp.sync -1;", mask=1), "race")
    assert result.ok and np.array_equal(got, DATA.reshape(32, 2, 4)[:, ::-1].reshape(64, 4))


def test_overwriting_before_readers_are_done_is_found():
    """A second round that overwrites what another warp, or lane, still reads is a write-after-read race."""
    again = "st.shared.v4.b32 [%r8], {%r0, %r0, %r0, %r0};"
    assert kinds(go(copy() + again, "race")[0]) == {"race-write-after-read"}
    assert kinds(go(copy(mask=1) + again, "race")[0]) == {"warp-race-write-after-read"}
    assert go(copy() + "bar.sync 0;" + again, "race")[0].ok


def test_two_warps_writing_one_place_is_found():
    """Unordered writes of two warps to the same bytes are a race."""
    body = AT + "and.b32 %r7, %r0, 31; mad.lo.s32 %r7, %r7, 16, %r9; st.shared.b32 [%r7], %r0;"
    assert kinds(go(body, "race")[0]) == {"race-write-after-write"}


def test_copies_left_in_flight_at_the_end_are_reported():
    """A kernel that ends with unwaited copies is told so."""
    body = AT + "cp.async.cg.shared.global [%r8], [%d0], 16; cp.async.commit_group;"
    assert kinds(go(body, "race")[0]) == {"async-not-waited"}


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_with_zeros_past_its_source_size(size):
    """Bytes past the source size are zeros; a size of zero reads nothing, not even out of bounds."""
    kind = "cg" if size == 16 else "ca"
    body = AT + (
        "st.shared.v4.b32 [%r8], {%r0, %r0, %r0, %r0}; bar.sync 0; and.b32 %r5, %r0, 3;"
        f"mul.lo.s32 %r5, %r5, {size // 4}; setp.eq.b32 %p1, %r5, 0; selp.b64 %d0, 16, %d0, %p1;"
        f"cp.async.{kind}.shared.global [%r8], [%d0], {size}, %r5; cp.async.wait_all; bar.sync 0; mov.b32 %r7, %r8;"
    )
    for mode in MODES:
        result, got = go(body + TAKE, mode)
        assert result.ok, [str(f) for f in result.findings]
        for i in range(64):
            raw = bytearray(np.full(4, i, np.uint32).tobytes())
            n = i % 4 * (size // 4)
            raw[:size] = DATA[i].tobytes()[:n] + bytes(size - n)
            assert got[i].tobytes() == bytes(raw)


def test_named_barriers_with_counts_synchronise_their_warps():
    """Warps 0 and 1 meet at barrier 1 (64 threads) while 2 and 3 go on; all modes agree."""
    body = AT.replace("16, %r9", "4, %r9").replace("%r0, 16", "%r0, 4") + (
        "setp.ge.u32 %p1, %r0, 64; @%p1 bra END; st.shared.b32 [%r8], %r0; bar.sync 1, 64;"
        "xor.b32 %r7, %r0, 32; mad.lo.s32 %r7, %r7, 4, %r9; ld.shared.b32 %r1, [%r7]; st.global.b32 [%d1], %r1; END:"
    )
    for mode in MODES:
        for seed in range(3):
            result, memory = launch(
                body, {"src": DATA, "dst": 512}, threads=128, shared=SMEM, dynamic=512, mode=mode, seed=seed, grid=3
            )
            assert result.ok, [str(f) for f in result.findings]
            assert memory.read("dst", np.uint32, (64,)).tolist() == [i ^ 32 for i in range(64)]
    racy, _ = launch(
        body.replace("bar.sync 1, 64;", ""),
        {"src": DATA, "dst": 512},
        threads=128,
        shared=SMEM,
        dynamic=512,
        mode="race",
    )
    assert "race-read-after-write" in kinds(racy)


@pytest.mark.parametrize("mode", MODES)
def test_a_deadlock_says_who_waits_where(mode):
    """Two warps at different barriers never meet: the finding names warps, barriers and lines."""
    body = "mov.u32 %r0, %tid.x; setp.ge.u32 %p1, %r0, 32; @%p1 bra OTHER;"
    body += "bar.sync 1, 64; bra END; OTHER: bar.sync 2, 64; END:"
    result, _ = launch(body, {}, mode=mode)
    (finding,) = result.findings
    assert finding.kind == "deadlock" and finding.text.startswith("bar.sync")
    assert "warp 0: 32 threads wait at barrier 1 (needs 64 threads) at line" in finding.message
    assert "warp 1: 32 threads wait at barrier 2" in finding.message


@pytest.mark.parametrize("mode", MODES)
def test_half_a_warp_at_a_collective_is_a_deadlock(mode):
    """A shuffle that half of the warp skips can never complete."""
    body = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 1; setp.eq.b32 %p1, %r1, 0; @%p1 bra END;"
    body += "shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1; END: bar.sync 0;"
    result, _ = launch(body, {}, mode=mode)
    assert kinds(result) == {"deadlock"} and "names lanes that do not arrive" in result.findings[0].message


@pytest.mark.parametrize("mode", MODES)
def test_divergent_loops_reconverge_before_collectives(mode):
    """Threads loop for different counts, meet again, and shuffle: the counts arrive as written."""
    body = (
        "mov.u32 %r0, %tid.x; mov.b32 %r1, 0; and.b32 %r2, %r0, 7; LOOP: setp.ge.s32 %p1, %r1, %r2; @%p1 bra OUT;"
        "add.s32 %r1, %r1, 1; bra.uni LOOP; OUT: shfl.sync.bfly.b32 %r3, %r1, 7, 31, -1; add.s32 %r3, %r3, %r1;"
        "ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1; st.global.b32 [%d0], %r3;"
    )
    result, memory = launch(body, {"dst": 256}, mode=mode)
    assert result.ok and (memory.read("dst", np.uint32, (64,)) == 7).all()


def test_ctas_that_conflict_in_global_memory_are_found():
    """Two CTAs' different data in one place, and a read of another CTA's output, are findings; equal data is not."""
    at = "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %d0, [dst];"
    at += "mul.wide.u32 %d1, %r0, 4; add.s64 %d2, %d0, %d1;"
    run = lambda body, grid=2: kinds(launch(at + body, {"dst": 2048}, grid=grid, mode="race")[0])  # noqa: E731
    assert run("st.global.b32 [%d2], %r1;") == {"global-write-conflict"}
    assert run("st.global.b32 [%d2], %r0;") == set()
    other = "mul.wide.u32 %d3, %r1, 256; add.s64 %d4, %d2, %d3; st.global.b32 [%d4], %r0; xor.b32 %r2, %r1, 1;"
    other += "mul.wide.u32 %d3, %r2, 256;"
    assert run(other + "add.s64 %d4, %d2, %d3; ld.global.b32 %r3, [%d4];") == {"global-read-write-race"}
    assert run(other + "ld.global.b32 %r3, [%d4];") == set()


def test_trap_is_a_finding_with_its_thread():
    """A guarded trap stops the run and names the first thread that took it."""
    result, _ = launch("mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 37; @%p1 trap;", {}, grid=2)
    (finding,) = result.findings
    assert (finding.kind, finding.cta, finding.warp, finding.lane) == ("trap", 0, 1, 5)


def test_early_exit_leaves_the_other_threads_running():
    """Threads that return early do not hold up the barrier of the rest."""
    body = (
        "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; @%p1 ret; bar.sync 0; ld.param.u64 %d0, [dst];"
        "mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1; st.global.b32 [%d0], %r0;"
    )
    for mode in MODES:
        result, memory = launch(body, {"dst": 256}, mode=mode)
        assert result.ok
        assert memory.read("dst", np.uint32, (64,)).tolist() == [0xFFFFFFFF] * 32 + list(range(32, 64))
