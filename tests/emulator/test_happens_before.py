"""What orders two accesses and what does not: each protocol is clean as written, and one word less is a finding."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_lab import launch as launch_cluster
from ptx_lab import kinds, launch

MODES = ("lockstep", "warp-serial", "race")
SMEM = ".extern .shared .align 1024 .b8 smem[];"
AT = """mov.u32 %r0, %tid.x; mov.u32 %r1, smem; shl.b32 %r2, %r0, 2; add.u32 %r3, %r1, %r2; mov.u32 %r4, %ctaid.x;
mov.u32 %r5, %ntid.x; mad.lo.u32 %r5, %r4, %r5, %r0; ld.param.u64 %d0, [out]; mul.wide.u32 %d1, %r5, 4;
add.s64 %d0, %d0, %d1; setp.eq.u32 %p0, %r0, 0; setp.ge.u32 %p1, %r0, 32;"""
OUT = "st.global.u32 [%d0], %r40;"
NOBODY = 0xFFFFFFFF


def check(body: str, *, clean: bool, want: list[int] | None = None, kind: str = "race", **how) -> None:
    """A clean kernel has the right numbers and no finding in every mode; another has one of the kind in race mode."""
    how = {"threads": 64, "grid": 1, "extra": {}, **how}
    buffers = {"out": 4 * how["threads"] * how["grid"], **how.pop("extra")}
    go = launch_cluster if "cluster" in how else lambda *a, **k: launch(*a, shared=SMEM, dynamic=8192, **k)
    for mode in MODES if clean else ("race",):
        result, memory = go(AT + body, buffers, mode=mode, **how)
        if not clean:
            assert any(kind in k for k in kinds(result)), kinds(result)
            continue
        assert result.ok, (mode, [str(f) for f in result.findings])
        assert want is None or memory.read("out", np.uint32, (len(want),)).tolist() == want


# -- flags in shared memory: warp 0 writes, its first lane raises a flag, warp 1 waits for it and reads ----------------
FLAG = """@%p0 st.shared.u32 [smem+4096], 0; bar.sync 0; @%p1 bra WAIT; st.shared.u32 [%r3], %r0; bar.warp.sync -1;
@!%p0 bra END; {raise_} bra END; WAIT: SPIN: {wait} setp.eq.u32 %p3, %r5, 0; @%p3 bra SPIN; {then} bar.warp.sync -1;
ld.shared.u32 %r40, [%r3+-128]; st.global.u32 [%d0], %r40; END:"""
RAISES = {  # the instruction, and whether it releases
    "st.release.cta.shared.u32 [smem+4096], 1;": True,
    "fence.acq_rel.cta; st.relaxed.cta.shared.u32 [smem+4096], 1;": True,
    "membar.cta; st.volatile.shared.u32 [smem+4096], 1;": True,
    "red.release.cta.shared.add.u32 [smem+4096], 1;": True,
    "fence.sc.cta; atom.shared.exch.b32 %r6, [smem+4096], 1;": True,
    "st.relaxed.cta.shared.u32 [smem+4096], 1; fence.acq_rel.cta;": False,
    "atom.acquire.cta.shared.add.u32 %r6, [smem+4096], 1;": False,
    "st.shared.u32 [smem+4096], 1;": False,
}
WAITS = {
    ("ld.acquire.cta.shared.u32 %r5, [smem+4096];", ""): True,
    ("ld.relaxed.cta.shared.u32 %r5, [smem+4096];", "fence.acq_rel.cta;"): True,
    ("atom.acq_rel.cta.shared.add.u32 %r5, [smem+4096], 0;", ""): True,
    ("ld.volatile.shared.u32 %r5, [smem+4096];", ""): False,
    ("atom.shared.add.u32 %r5, [smem+4096], 0;", ""): False,
}


@pytest.mark.parametrize("wait", WAITS, ids=lambda w: w[0].split()[0] + (" fence" if w[1] else ""))
@pytest.mark.parametrize("raise_", RAISES, ids=lambda r: r.split(";")[0])
def test_a_flag_in_shared_memory_orders_what_it_releases_and_acquires(raise_, wait):
    """Only a release (or a fence before) together with an acquire (or a fence behind) orders the data."""
    body = FLAG.format(raise_=raise_, wait=wait[0], then=wait[1])
    check(body, clean=RAISES[raise_] and WAITS[wait], want=[NOBODY] * 32 + list(range(32)))


def test_a_flag_of_one_lane_does_not_release_the_others():
    """Without bar.warp.sync the writes of the other lanes may come after the flag."""
    body = FLAG.format(raise_=next(iter(RAISES)), wait=next(iter(WAITS))[0], then="")
    check(body.replace("bar.warp.sync -1;\n@!%p0", "@!%p0"), clean=False, kind="race-read-after-write")


LOCK = """@%p0 st.shared.v2.u32 [smem+4096], {0, 0}; bar.sync 0; and.b32 %r7, %r0, 31; setp.ne.u32 %p2, %r7, 0;
@%p2 bra JOIN; TAKE: atom.acquire.cta.shared.cas.b32 %r6, [smem+4096], 0, 1; setp.ne.u32 %p3, %r6, 0; @%p3 bra TAKE;
ld.shared.u32 %r8, [smem+4100]; add.u32 %r8, %r8, 1; st.shared.u32 [smem+4100], %r8;
atom.release.cta.shared.exch.b32 %r6, [smem+4096], 0; JOIN: bar.sync 0; ld.shared.u32 %r40, [smem+4100];"""


def test_a_lock_in_shared_memory():
    """compare-and-swap with .acquire and exchange with .release protect a counter; relaxed ones do not."""
    check(LOCK + OUT, clean=True, want=[4] * 128, threads=128)
    check((LOCK + OUT).replace(".acquire.cta", "").replace(".release.cta", ""), clean=False, threads=128)


def test_volatile_words_do_not_replace_a_warp_barrier():
    """Lanes that exchange volatile words without bar.warp.sync race, as they did not before independent threads."""
    body = "st.volatile.shared.u32 [%r3], %r0; {} xor.b32 %r5, %r3, 4; ld.volatile.shared.u32 %r40, [%r5];" + OUT
    check(body.format("bar.warp.sync -1;"), clean=True, want=[i ^ 1 for i in range(64)])
    check(body.format(""), clean=False, kind="warp-race-read-after-write")


# -- flags in global memory: CTA 0 writes and raises a flag, CTA 1 waits for it and reads ------------------------------
GRID = """ld.param.u64 %d2, [data]; ld.param.u64 %d3, [flag]; mul.wide.u32 %d4, %r0, 4; add.s64 %d4, %d2, %d4;
setp.ne.u32 %p2, %r4, 0; @%p2 bra WAIT; st.global.u32 [%d4], %r0; bar.sync 0; @!%p0 bra END; {raise_} bra END;
WAIT: @!%p0 bra JOIN; SPIN: {wait} setp.eq.u32 %p3, %r5, 0; @%p3 bra SPIN; {then} JOIN: bar.sync 0;
ld.global.u32 %r40, [%d4]; st.global.u32 [%d0], %r40; END:"""
GRID_RAISES = {
    "st.release.gpu.global.u32 [%d3], 1;": True,
    "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%d3], 1;": True,
    "membar.gl; atom.global.add.u32 %r6, [%d3], 1;": True,
    "red.release.sys.global.add.u32 [%d3], 1;": True,
    "st.release.cta.global.u32 [%d3], 1;": False,
    "fence.acq_rel.cta; st.relaxed.gpu.global.u32 [%d3], 1;": False,
    "membar.cta; st.volatile.global.u32 [%d3], 1;": False,
    "atom.global.add.u32 %r6, [%d3], 1;": False,
    "fence.acq_rel.gpu; st.release.gpu.global.u32 [%d3], 1; st.global.u32 [%d4], 9;": False,
}
GRID_WAITS = {
    ("ld.acquire.gpu.global.u32 %r5, [%d3];", ""): True,
    ("ld.volatile.global.u32 %r5, [%d3];", "fence.acq_rel.gpu;"): True,
    ("ld.acquire.cta.global.u32 %r5, [%d3];", ""): False,
    ("ld.relaxed.gpu.global.u32 %r5, [%d3];", "fence.acq_rel.cta;"): False,
    ("atom.global.add.u32 %r5, [%d3], 0;", ""): False,
}


@pytest.mark.parametrize("wait", GRID_WAITS, ids=lambda w: w[0].split()[0] + (" fence" if w[1] else ""))
@pytest.mark.parametrize("raise_", GRID_RAISES, ids=lambda r: r.split(";")[0])
def test_a_flag_between_ctas_needs_an_order_and_a_scope(raise_, wait):
    """Release and acquire order two CTAs at a scope that holds both; relaxed ones, or .cta, do not."""
    body = GRID.format(raise_=raise_, wait=wait[0], then=wait[1])
    buffers = {"data": 256, "flag": np.zeros(1, np.uint32)}
    want = [NOBODY] * 64 + list(range(64))
    clean = GRID_RAISES[raise_] and GRID_WAITS[wait]
    check(body, clean=clean, want=want, kind="global-read-write-race", grid=2, extra=buffers)


@pytest.mark.parametrize(
    ("meet", "clean"),
    [
        ("barrier.cluster.arrive; barrier.cluster.wait;", True),
        ("fence.acq_rel.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;", True),
        ("barrier.cluster.arrive.relaxed; barrier.cluster.wait;", False),
        ("", False),
    ],
)
def test_a_cluster_barrier_orders_global_memory_too(meet, clean):
    """One CTA of a cluster may read what another has written to global memory before barrier.cluster."""
    body = """ld.param.u64 %d2, [data]; mul.wide.u32 %d4, %r0, 4; add.s64 %d4, %d2, %d4; setp.ne.u32 %p2, %r4, 0;
    @%p2 bra MEET; st.global.u32 [%d4], %r0; MEET: {} @!%p2 bra END; ld.global.u32 %r40, [%d4];
    st.global.u32 [%d0], %r40; END:"""
    how = {"grid": 2, "cluster": 2, "extra": {"data": 256}, "kind": "global-read-write-race"}
    check(body.format(meet), clean=clean, want=[NOBODY] * 64 + list(range(64)), **how)


REMOTE = """@%p0 mbarrier.init.shared.b64 [%r1+4096], 64; fence.mbarrier_init.release.cluster; barrier.cluster.arrive;
barrier.cluster.wait; ld.param.u64 %d2, [data]; mul.wide.u32 %d4, %r0, 4; add.s64 %d4, %d2, %d4;
setp.ne.u32 %p2, %r4, 0; @%p2 bra WAIT; st.global.u32 [%d4], %r0; mov.u32 %r6, 1; add.u32 %r7, %r1, 4096;
mapa.shared::cluster.u32 %r7, %r7, %r6; mbarrier.arrive.{}.cluster.shared::cluster.b64 _, [%r7]; bra END;
WAIT: mbarrier.try_wait.parity.{}.cluster.shared::cta.b64 %p5, [%r1+4096], 0; @!%p5 bra WAIT;
ld.global.u32 %r40, [%d4]; st.global.u32 [%d0], %r40; END: barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize("order", [("release", "acquire"), ("relaxed", "acquire"), ("release", "relaxed")])
def test_an_mbarrier_of_the_cluster_orders_global_memory_too(order):
    """A remote arrival hands over what its CTA has written to global memory."""
    how = {"grid": 2, "cluster": 2, "extra": {"data": 256}, "kind": "global-read-write-race"}
    want = [NOBODY] * 64 + list(range(64))
    check(REMOTE.format(*order), clean=order == ("release", "acquire"), want=want, **how)


# -- mbarriers ---------------------------------------------------------------------------------------------------------
INIT = "@%p0 mbarrier.init.shared.b64 [smem+4096], 32; bar.sync 0;"
HANDOVER = """@%p1 bra WAIT; st.shared.u32 [%r3], %r0; {} bra END; WAIT: {} @!%p5 bra WAIT; {}
ld.shared.u32 %r40, [%r3+-128]; st.global.u32 [%d0], %r40; END:"""
ARRIVE = "mbarrier.arrive.{}.cta.shared::cta.b64 _, [smem+4096];"
TRY = "mbarrier.try_wait.parity.{}.cta.shared::cta.b64 %p5, [smem+4096], 0;"
FENCE = "fence.acq_rel.cta;"


@pytest.mark.parametrize(
    ("arrive", "wait", "then", "clean"),
    [
        (ARRIVE.format("release"), TRY.format("acquire"), "", True),
        (FENCE + ARRIVE.format("relaxed"), TRY.format("relaxed"), FENCE, True),
        (ARRIVE.format("relaxed"), TRY.format("acquire"), "", False),
        (ARRIVE.format("release"), TRY.format("relaxed"), "", False),
    ],
)
def test_relaxed_mbarrier_operations_order_nothing_without_fences(arrive, wait, then, clean):
    """.relaxed arrivals and waits count, but release and acquire only what fences do."""
    check(INIT + HANDOVER.format(arrive, wait, then), clean=clean, want=[NOBODY] * 32 + list(range(32)))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("@%p0 mbarrier.init.shared.b64 [smem+4096], 32;", "mbarrier-reinit"),
        ("@%p0 st.shared.u32 [smem+4096], 7;", "mbarrier-plain-access"),
        ("ld.shared.u32 %r5, [smem+4100];", "mbarrier-plain-access"),
    ],
)
def test_the_bytes_of_an_mbarrier_are_its_own_until_inval(body, kind):
    """A second init, a store and a load are undefined on a live mbarrier; after inval and a barrier they are fine."""
    check(INIT + body, clean=False, kind=kind)
    gone = "@%p0 mbarrier.inval.shared.b64 [smem+4096]; bar.sync 0;"
    if kind == "mbarrier-plain-access":
        gone += "@%p0 st.shared.v2.u32 [smem+4096], {7, 7}; bar.sync 0;"
    check(INIT + gone + body + "bar.sync 0; mov.u32 %r40, 1;" + OUT, clean=True, want=[1] * 64)


# -- warps and named barriers ------------------------------------------------------------------------------------------
SPLIT = """and.b32 %r6, %r0, 16; setp.ne.u32 %p2, %r6, 0; st.shared.u32 [%r3], %r0; bar.warp.sync -1; {first}
@%p2 bra UPPER; bar.warp.sync 0x0000ffff; bra MET; UPPER: bar.warp.sync 0xffff0000; MET: {met} xor.b32 %r5, %r3, {far};
{then}"""
WRITE_READ = {"first": "st.shared.u32 [%r3], %r0;", "then": "ld.shared.u32 %r40, [%r5];" + OUT}
READ_WRITE = {"first": "ld.shared.u32 %r40, [%r3];", "then": "st.shared.u32 [%r5], %r0;" + OUT}


@pytest.mark.parametrize("hazard", [WRITE_READ, READ_WRITE], ids=["read-after-write", "write-after-read"])
def test_a_partial_warp_barrier_orders_its_own_lanes(hazard, request):
    """Lanes that met in halves know their half, and the other one only after the halves have met."""
    want = lambda far: [i ^ far if hazard is WRITE_READ else i for i in range(64)]  # noqa: E731
    check(SPLIT.format(met="", far=4, **hazard), clean=True, want=want(1))
    check(SPLIT.format(met="bar.warp.sync -1;", far=64, **hazard), clean=True, want=want(16))
    check(SPLIT.format(met="", far=64, **hazard), clean=False, kind=f"warp-race-{request.node.callspec.id}")


def test_lanes_that_met_release_each_other():
    """An elected lane's arrival releases what the lanes did that it has met in part of the warp."""
    body = (
        INIT
        + """@%p1 bra WAIT; setp.ge.u32 %p2, %r0, 16; @%p2 bra END; st.shared.u32 [%r3], %r0; {}
    @%p0 mbarrier.arrive.shared.b64 _, [smem+4096], 32; bra END; WAIT: mbarrier.try_wait.parity.shared.b64 %p5,
    [smem+4096], 0; @!%p5 bra WAIT; and.b32 %r5, %r2, 60; add.u32 %r5, %r5, %r1; ld.shared.u32 %r40, [%r5];"""
    )
    body += OUT + "END:"
    check(body.replace("{}", "bar.warp.sync 0xffff;"), clean=True, want=[NOBODY] * 32 + [i & 15 for i in range(32)])
    check(body.replace("{}", ""), clean=False, kind="race-read-after-write")


def test_two_lanes_that_write_one_place_need_a_warp_barrier():
    """A later write by another lane may come first."""
    body = "st.shared.u32 [%r3], %r0; {} xor.b32 %r5, %r3, 4; st.shared.u32 [%r5], %r0; bar.warp.sync -1;"
    body += "ld.shared.u32 %r40, [%r3];" + OUT
    check(body.format("bar.warp.sync -1;"), clean=True, want=[i ^ 1 for i in range(64)])
    check(body.format(""), clean=False, kind="warp-race-write-after-write")


def test_arrivals_alone_complete_a_named_barrier():
    """A producer that runs two arrivals ahead lets its consumer wait for arrivals that have been used up."""
    body = "@%p1 bra WAIT; bar.arrive 1, 64; {} bar.arrive 1, 64; bra END;"
    body += "WAIT: bar.sync 1, 64; {} bar.sync 1, 64; END:"
    check(body.format("bar.sync 2, 64;", "bar.sync 2, 64;"), clean=True)
    check(body.format("", ""), clean=False, kind="barrier-count")


def test_an_atomic_of_another_lane_needs_a_warp_barrier():
    """A plain read of what other lanes have just added to comes too early without bar.warp.sync."""
    body = "@%p0 st.shared.u32 [smem+4096], 0; bar.warp.sync -1; red.shared.add.u32 [smem+4096], 1; {}"
    body += "ld.shared.u32 %r40, [smem+4096];" + OUT
    check(body.format("bar.warp.sync -1;"), clean=True, want=[32] * 32, threads=32)
    check(body.format(""), clean=False, kind="warp-race-read-after-write", threads=32)


def test_an_atomic_of_a_lane_that_has_been_met_is_ordered():
    """Halves of a warp that count by themselves need to meet in halves only."""
    body = """and.b32 %r5, %r2, 64; add.u32 %r5, %r5, %r1; st.shared.u32 [%r5], 0; bar.warp.sync -1;
    red.shared.add.u32 [%r5], 1; setp.ge.u32 %p2, %r0, 16; @%p2 bra UPPER; bar.warp.sync 0x0000ffff; bra READ;
    UPPER: bar.warp.sync 0xffff0000; READ: ld.shared.u32 %r40, [%r5];"""
    check(body + OUT, clean=True, want=[16] * 32, threads=32)


def test_one_arrival_stays_within_its_phase():
    """A count above what the phase still waits for is undefined."""
    body = "@%p0 mbarrier.init.shared.b64 [smem+4096], 2; bar.sync 0;"
    body += "@%p0 mbarrier.arrive.shared.b64 _, [smem+4096], {};"
    check(body.format(2), clean=True)
    check(body.format(3), clean=False, kind="mbarrier-arrivals")
