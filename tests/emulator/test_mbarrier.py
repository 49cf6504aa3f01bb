"""mbarriers: phases, parities, states, counts, transaction bytes, waits, deadlocks, and the copies that arrive."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_lab import findings, launch
from ptx_lab import kinds

MODES = ("lockstep", "warp-serial", "race")
INIT = "@%p0 mbarrier.init.shared.b64 [%r1], {0}; bar.sync 0;"
OUT = "ld.param.u64 %d9, [out]; mul.wide.u32 %d8, %r0, 4; add.s64 %d9, %d9, %d8; st.global.b32 [%d9], {0};"


def wait(name: str, parity: object, address: str = "%r1") -> str:
    """Spin on try_wait until the phase of a parity completes."""
    return (
        f"{name}: mbarrier.try_wait.parity.shared.b64 %p1, [{address}], {parity}, 1000; @%p1 bra {name}_D; "
        f"bra {name}; {name}_D:"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["try_wait", "test_wait"])
def test_an_mbarrier_is_a_barrier_for_threads_that_arrive_and_wait(form, mode):
    """128 arrivals complete a phase; what was written before is there afterwards, phase after phase."""
    body = INIT.format(128) + "mov.b32 %r5, 0; shl.b32 %r6, %r0, 2; add.s32 %r6, %r6, %r1; xor.b32 %r7, %r6, 256;"
    for phase in range(3):
        body += (
            f"add.s32 %r8, %r0, {100 * phase}; st.shared.b32 [%r6+1024], %r8; "
            "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];"
            + wait(f"A{phase}", phase & 1)
            .replace("try_wait", form)
            .replace(", 1000", "" if form == "test_wait" else ", 9")
            + "ld.shared.b32 %r8, [%r7+1024]; add.s32 %r5, %r5, %r8; mbarrier.arrive.shared.b64 %d1, [%r1+8];"
            + wait(f"B{phase}", phase & 1, "%r1+8")
        )
    body = body.replace("bar.sync 0;", "@%p0 mbarrier.init.shared.b64 [%r1+8], 128; bar.sync 0;")
    result, memory = launch(body + OUT.format("%r5"), {"out": 512}, threads=128, mode=mode)
    assert result.ok, findings(result)
    assert np.array_equal(memory.read("out", np.uint32, (128,)), 3 * (np.arange(128) ^ 64) + 300)
    assert result.counters.mbarrier_operations == 2 + 6 * 128


def test_states_counts_drops_and_pending():
    """The state forms, arrivals with a count, arrive_drop and pending_count."""
    body = (
        INIT.format(8) + "@!%p0 bra END; mbarrier.arrive.shared.b64 %d1, [%r1], 5; mbarrier.pending_count.b64 %r5, %d1;"
        "mbarrier.arrive.noComplete.shared.b64 %d2, [%r1], 1; mbarrier.pending_count.b64 %r6, %d2;"
        "mbarrier.arrive_drop.shared.b64 %d3, [%r1], 2; T1: mbarrier.try_wait.shared.b64 %p1, [%r1], %d1; @!%p1 bra T1;"
        "mbarrier.arrive.shared.b64 %d4, [%r1]; mbarrier.pending_count.b64 %r7, %d4;"
        "mad.lo.s32 %r5, %r5, 100, %r6; mad.lo.s32 %r5, %r5, 100, %r7; END:" + OUT.format("%r5")
    )
    result, memory = launch(body, {"out": 128})
    assert result.ok, findings(result)
    assert memory.read("out", np.uint32, (1,))[0] == 8 * 10000 + 3 * 100 + 6


@pytest.mark.parametrize("mode", MODES)
def test_a_try_wait_that_nothing_satisfies_yet_reports_false(mode):
    """A peek before the arrival it needs returns False once nothing else can run, and the thread goes on."""
    body = (
        INIT.format(32) + "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; mbarrier.arrive.shared.b64 %d1, [%r1];"
        + wait("A", 0) + "selp.b32 %r5, 1, 0, %p2;" + OUT.format("%r5")
    )  # fmt: skip
    result, memory = launch(body, {"out": 128}, mode=mode)
    assert result.ok, findings(result)
    assert not memory.read("out", np.uint32, (32,)).any()


@pytest.mark.parametrize("mode", MODES)
def test_a_deadlock_names_barrier_phase_and_what_is_pending(mode):
    """Too few arrivals, and bytes that nobody sends: who waits, where, and for what."""
    body = INIT.format(2) + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 64;" + wait("A", 0)
    result, _ = launch(body, {"out": 128}, mode=mode)
    (finding,) = result.findings
    assert finding.kind == "deadlock"
    for part in ("32 threads wait", "smem+0", "phase 0 (parity 0)", "1 of 2 arrivals", "64 transaction bytes"):
        assert part in finding.message, finding.message


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (wait("A", 0), "mbarrier-uninitialised"),
        (INIT.format(1) + "@%p0 mbarrier.inval.shared.b64 [%r1]; @%p0 mbarrier.arrive.shared.b64 %d1, [%r1];",
         "mbarrier-after-inval"),
        (INIT.format(1) + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 1048000;"
         "@%p0 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048000;", "mbarrier-bytes"),
        (INIT.format(1) + "mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 16;", "mbarrier-arrivals"),
        (INIT.format(2) + "@%p0 mbarrier.arrive.shared.b64 %d1, [%r1]; @%p0 mbarrier.init.shared.b64 [%r1], 2;",
         "mbarrier-reinit"),
        (INIT.format(1) + "@%p0 mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1;", "mbarrier-no-complete"),
        (INIT.format(0), "mbarrier-count"),
        (INIT.format(1) + "mbarrier.arrive.shared.b64 %d1, [%r1+4];", "misaligned"),
    ],
)  # fmt: skip
def test_protocol_faults_are_findings_in_every_mode(body, kind):
    """Use before init or after inval, too many bytes or arrivals, init in the middle of a phase."""
    for mode in MODES:
        result, _ = launch(body, {"out": 128}, mode=mode)
        assert kind in kinds(result), (mode, findings(result))
        assert result.findings[0].cure


@pytest.mark.parametrize("mode", MODES)
def test_cp_async_arrives_when_the_copies_have_landed(mode):
    """cp.async.mbarrier.arrive.noinc, and the incrementing form: a wait on the barrier covers the cp.async before."""
    for form, count in ((".noinc", 32), ("", 1)):
        body = (
            INIT.format(count)
            + "ld.param.u64 %d1, [x]; mul.wide.u32 %d2, %r0, 16; add.s64 %d1, %d1, %d2; shl.b32 %r5, %r0, 4;"
            "add.s32 %r5, %r5, %r1; cp.async.cg.shared.global [%r5+1024], [%d1], 16;"
            f"cp.async.mbarrier.arrive{form}.shared.b64 [%r1];"
            + ("" if form else "@%p0 mbarrier.arrive.shared.b64 %d3, [%r1];")
            + wait("A", 0)
            + "xor.b32 %r6, %r5, 16; ld.shared.b32 %r7, [%r6+1024];"
            + OUT.format("%r7")
        )
        data = np.arange(128, dtype=np.uint32)
        result, memory = launch(body, {"x": data, "out": 128}, mode=mode)
        assert result.ok, findings(result)
        assert np.array_equal(memory.read("out", np.uint32, (32,)), 4 * (np.arange(32) ^ 1))


@pytest.mark.parametrize("mode", MODES)
def test_bar_arrive_lets_a_producer_run_ahead(mode):
    """One warp arrives, the other waits; without the arrive it is a deadlock."""
    body = (
        "setp.lt.u32 %p2, %r0, 32; @!%p2 bra CONSUMER; shl.b32 %r5, %r0, 2; add.s32 %r5, %r5, %r1;"
        "st.shared.b32 [%r5], %r0; bar.arrive 1, 64; bra END; CONSUMER: bar.sync 1, 64; sub.s32 %r6, %r0, 32;"
        "xor.b32 %r6, %r6, 5; shl.b32 %r6, %r6, 2; add.s32 %r6, %r6, %r1; ld.shared.b32 %r7, [%r6];"
        + OUT.format("%r7") + "END:"
    )  # fmt: skip
    result, memory = launch(body, {"out": 256}, threads=64, mode=mode)
    assert result.ok, findings(result)
    assert np.array_equal(memory.read("out", np.uint32, (64,))[32:], np.arange(32) ^ 5)
    result, _ = launch(body.replace("bar.arrive 1, 64;", ""), {"out": 256}, threads=64, mode=mode)
    assert "deadlock" in kinds(result)


@pytest.mark.parametrize("mode", MODES)
def test_bar_red_reduces_over_the_threads_of_the_barrier(mode):
    """popc, and, or of a predicate over 64 threads."""
    body = (
        "setp.lt.u32 %p2, %r0, 40; bar.red.popc.u32 %r5, 0, %p2; bar.red.and.pred %p3, 0, %p2;"
        "barrier.red.or.pred %p4, 1, 64, !%p2; selp.b32 %r6, 1000, 0, %p3; selp.b32 %r7, 100, 0, %p4;"
        "add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r7;" + OUT.format("%r5")
    )
    result, memory = launch(body, {"out": 256}, threads=64, mode=mode)
    assert result.ok, findings(result)
    assert (memory.read("out", np.uint32, (64,)) == 140).all()


@pytest.mark.parametrize(("early", "found"), [(True, set()), (False, {"race-read-after-write"})])
def test_cp_async_arrive_releases_what_came_before_it_only(early, found):
    """A store before cp.async.mbarrier.arrive is released by it; one behind it is not, though the arrival is later."""
    store, arrive = "st.shared.b32 [%r5+4096], %r0;", "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"
    body = (
        INIT.format(64) + "ld.param.u64 %d1, [x]; shl.b32 %r5, %r0, 4; add.s32 %r5, %r5, %r1;"
        "cp.async.cg.shared.global [%r5+1024], [%d1], 16;" + (store + arrive if early else arrive + store)
        + wait("A", 0) + "xor.b32 %r6, %r5, 512; ld.shared.b32 %r7, [%r6+4096]; ld.shared.b32 %r8, [%r6+1024];"
    )  # fmt: skip
    result, _ = launch(body, {"x": np.zeros(4, np.uint32)}, threads=64, mode="race")
    assert kinds(result) == found, findings(result)


@pytest.mark.parametrize(("meet", "found"), [("bar.sync 0;", set()), ("", {"mbarrier-after-inval"})])
def test_inval_comes_behind_all_waits(meet, found):
    """One warp ends the barrier while the other may still wait for its phase."""
    body = INIT.format(64) + "mbarrier.arrive.shared.b64 %d1, [%r1];" + wait("A", 0) + meet
    result, _ = launch(body + "@%p0 mbarrier.inval.shared.b64 [%r1];", {"x": 4}, threads=64, mode="race")
    assert kinds(result) == found, findings(result)
