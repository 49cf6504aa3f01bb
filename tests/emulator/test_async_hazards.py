"""What bulk and tensor copies promise, and no more: planted bugs are found, unusual but right kernels are clean."""

from __future__ import annotations

import numpy as np
import pytest
from hopper_lab import findings, launch, tensor_map
from ptx_lab import kinds

MODES = ("lockstep", "warp-serial", "race")
DATA = np.arange(256, dtype=np.uint32).reshape(8, 32)
TILE = tensor_map(DATA, (32, 8))  # 1024 bytes
INIT = "@%p0 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
MAP = "mov.u64 %d0, map_x; cvta.param.u64 %d2, %d0; ld.param.u64 %d3, [x]; mov.u32 %r2, %ctaid.x;"
# The 32 lanes of a warp write eight words each, the tile's contents, at 1024; then the async proxy may read them.
FILL = "shl.b32 %r9, %r0, 5; add.s32 %r9, %r9, %r1;" + "".join(
    f"mad.lo.u32 %r20, %r0, 8, {i}; st.shared.b32 [%r9+{1024 + 4 * i}], %r20;" for i in range(8)
)
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
STORES = {
    "tensor": "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {0, 0}], [%r1+1024];",
    "bulk": "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d3], [%r1+1024], 1024;",
    "tensor add": "@%p0 cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d2, {0, 0}], [%r1+1024];",
    "bulk add": "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d3], [%r1+1024], 1024;",
}
COMMIT, READ, FULL = (f"cp.async.bulk.{x};" for x in ("commit_group", "wait_group.read 0", "wait_group 0"))
LOAD = "@%p0 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r1+1024], [%d2, {0, 0}], [%r1];"
EXPECT = "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 1024;"
WAIT = "LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra LOOP;"
# The lanes copy x to out.
COPY = (
    "ld.param.u64 %d5, [x]; ld.param.u64 %d6, [out]; mul.wide.u32 %d7, %r0, 32; add.s64 %d5, %d5, %d7;"
    "add.s64 %d6, %d6, %d7;"
    + "".join(f"ld.global.v2.b64 {{%d8, %d9}}, [%d5+{i}]; st.global.v2.b64 [%d6+{i}], {{%d8, %d9}};" for i in (0, 16))
)


def go(body: str, x: object = 1024, **options):
    """The run, and what it left in ``out``."""
    result, memory = launch(MAP + body, {"x": x, "out": 1024}, {"map_x": ("x", TILE)}, **options)
    return result, memory.read("out", np.uint32, DATA.shape)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("store", ["tensor", "bulk"])
def test_what_a_store_wrote_is_there_after_a_full_wait_only(store, mode):
    """After wait_group.read the source may change, but the target still holds what it did."""
    harm = "st.shared.b32 [%r9+1024], %r1;"
    for wait, there in ((READ, False), (FULL, True), (READ + harm + FULL, True)):
        result, got = go(FILL + FENCE + STORES[store] + COMMIT + wait + "bar.sync 0;" + COPY, mode=mode)
        assert result.ok, findings(result)
        assert np.array_equal(got, DATA) is there


@pytest.mark.parametrize("store", ["tensor", "bulk"])
def test_a_tile_handed_on_by_a_flag_needs_the_full_wait(store):
    """The reader's CTA acquires the flag; with .read alone, the tile may not have arrived."""
    flag = "ld.param.u64 %d10, [out]; add.s64 %d10, %d10, 1024;"
    give = "@%p0 fence.acq_rel.gpu; @%p0 st.release.gpu.global.b32 [%d10], 1; bra END;"
    take = "TAKE: SPIN: ld.acquire.gpu.global.b32 %r11, [%d10]; setp.ne.u32 %p8, %r11, 1; @%p8 bra SPIN;"
    for wait, right in ((READ, False), (FULL, True)):
        body = flag + "setp.eq.u32 %p5, %r2, 1; @%p5 bra TAKE;" + FILL + FENCE + STORES[store] + COMMIT + wait + give
        result, memory = launch(
            MAP + body + take + COPY + "END:", {"x": 1024, "out": np.zeros(257, np.uint32)},
            {"map_x": ("x", TILE)}, grid=2, mode="race",
        )  # fmt: skip
        assert kinds(result) == (set() if right else {"global-read-write-race"}), findings(result)
        assert np.array_equal(memory.read("out", np.uint32, (257,))[:256].reshape(8, 32), DATA) is right


BOTH = "setp.lt.u32 %p6, %r0, 2; shl.b32 %r6, %r0, {shift}; add.s32 %r6, %r6, %r1; bar.warp.sync -1;"


@pytest.mark.parametrize(("shift", "found"), [(9, {"race-write-after-write"}), (10, set())])
def test_two_lanes_load_into_stages_of_their_own(shift, found):
    """One instruction of two lanes: tiles of 1024 bytes, 512 bytes apart, overlap."""
    load = LOAD.replace("@%p0", "@%p6").replace("%r1+1024", "%r6+1024")
    body = INIT + BOTH.format(shift=shift) + EXPECT.replace("1024", "2048") + "bar.warp.sync -1;" + load + WAIT
    result, _ = go(body, DATA, mode="race")
    assert kinds(result) == found, findings(result)


@pytest.mark.parametrize(("fence", "found"), [("", {"missing-proxy-fence"}), (FENCE, set())])
def test_a_load_over_generic_writes_needs_a_proxy_fence(fence, found):
    """The zeros that a thread put into a stage, and then the tile."""
    result, _ = go(INIT + "@%p0 st.shared.b32 [%r1+1024], %r0;" + fence + EXPECT + LOAD + WAIT, DATA, mode="race")
    assert kinds(result) == found, findings(result)


PAIR = (
    "mov.u32 %r2, %cluster_ctarank; xor.b32 %r7, %r2, 1; mapa.shared::cluster.u32 %r11, %r1, %r7;"
    "setp.eq.u32 %p5, %r2, 0; and.pred %p6, %p0, %p5; mov.b16 %h1, 3; mov.b32 %r30, 0;"
)
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
COUNT = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r11+64], %r30, [%r11];"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", ["@%p0 st.shared.b32 [%r1+64], %r30;", ""])
def test_reductions_into_a_neighbour_need_no_order_among_themselves(start, mode):
    """red.async twice on one word, as all lanes do; the word must have been written before."""
    body = (
        PAIR + start + INIT + MEET + EXPECT.replace("1024", "256") + "mov.b32 %r30, 1;" + COUNT + COUNT + WAIT
        + "ld.shared.b32 %r8, [%r1+64]; ld.param.u64 %d6, [out]; mul.wide.u32 %d7, %r2, 4; add.s64 %d6, %d6, %d7;"
        "st.global.b32 [%d6], %r8;" + MEET
    )  # fmt: skip
    result, got = go(body, DATA, mode=mode, grid=2, cluster=2)
    assert kinds(result) == ({"uninitialised-shared"} if mode == "race" and not start else set()), findings(result)
    assert not start or got[0, :2].tolist() == [64, 64]


@pytest.mark.parametrize("end", ["", WAIT, "@%p5 bra END;" + WAIT + "END:", MEET])
def test_a_cta_waits_for_what_is_multicast_to_it(end):
    """CTA 0 loads for both. The other must wait itself; to meet CTA 0, which knows of its own copy, is not enough."""
    load = LOAD.replace("@%p0", "@%p6").replace("shared::cta.global", "shared::cluster.global")
    load = load.replace("bytes [", "bytes.multicast::cluster [").replace("[%r1];", "[%r1], %h1;")
    wait = "@!%p5 bra LATER;" + WAIT.replace("LOOP", "FIRST") + "LATER:"
    body = PAIR + INIT + MEET + EXPECT + load + wait + end
    result, _ = go(body, DATA, mode="race", grid=2, cluster=2)
    assert kinds(result) == (set() if WAIT in end else {"cluster-exit"}), findings(result)


ATOMIC = "@%p0 red.global.add.f32 [%d3], 0f3F800000;"
REDUCE = {name: FILL + FENCE + STORES[name] + COMMIT + FULL for name in ("tensor add", "bulk add")} | {"atomic": ATOMIC}
OTHER = {
    "reads": ("@%p0 ld.global.b32 %r12, [%d3];", "global-read-write-race"),
    "writes": ("@%p0 st.global.b32 [%d3], %r2;", "global-write-conflict"),
    "reduces": (ATOMIC, None),
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("reduction", REDUCE)
def test_reductions_of_two_ctas_need_no_order_but_reads_and_writes_do(reduction, other, ordered, first):
    """One CTA combines, another one does something with the same bytes, before or after it, by a flag or without."""
    text, kind = OTHER[other]
    parts = (REDUCE[reduction], text)
    flag = "ld.param.u64 %d10, [out];"
    give = "bar.sync 0; @%p0 fence.acq_rel.gpu; @%p0 st.release.gpu.global.b32 [%d10], 1;" if ordered else ""
    take = "SPIN: ld.acquire.gpu.global.b32 %r11, [%d10]; setp.ne.u32 %p8, %r11, 1; @%p8 bra SPIN;" if ordered else ""
    body = flag + f"setp.eq.u32 %p5, %r2, 1; @%p5 bra TAKE; {parts[first]} {give} bra END;"
    body += f"TAKE: {take} {parts[1 - first]} END:"
    result, _ = launch(
        MAP + body, {"x": DATA, "out": np.zeros(1, np.uint32)}, {"map_x": ("x", TILE)}, grid=2, mode="race"
    )
    found = {f.kind for f in result.findings}
    if ordered or kind is None:
        assert not found, findings(result)
    else:
        assert found and found <= {kind, "global-read-write-race"}, findings(result)


@pytest.mark.parametrize(("fence", "found"), [("", {"missing-proxy-fence"}), (".shared::cta", {"missing-proxy-fence"}),
                                              (".global", set()), ("all", set())])  # fmt: skip
@pytest.mark.parametrize("load", ["tensor", "bulk"])
def test_a_copy_of_what_generic_stores_wrote_needs_a_proxy_fence(load, fence, found):
    """A CTA writes a tile to global memory, and loads it back through the async proxy."""
    write = "@%p0 st.global.b32 [%d3+4], %r1;"
    fence = f"fence.proxy.async{fence.replace('all', '')};" if fence else ""
    copy = LOAD if load == "tensor" else (
        "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+1024], [%d3], 1024, [%r1];"
    )  # fmt: skip
    result, _ = go(INIT + write + fence + "bar.sync 0;" + EXPECT + copy + WAIT, DATA, mode="race")
    assert kinds(result) == found, findings(result)


@pytest.mark.parametrize("load", ["tensor", "bulk"])
@pytest.mark.parametrize(("early", "found"), [(False, set()), (True, {"global-read-write-race"})])
def test_a_copy_reads_with_what_was_acquired_when_it_was_issued(early, found, load):
    """A load that is issued before its CTA acquires the flag may have read the tile before it was written."""
    flag = "ld.param.u64 %d10, [out]; setp.eq.u32 %p5, %r2, 1; @%p5 bra TAKE;"
    give = (
        "@%p0 st.global.b32 [%d3+4], %r1; fence.proxy.async.global; @%p0 st.release.gpu.global.b32 [%d10], 1; bra END;"
    )
    take = "SPIN: ld.acquire.gpu.global.b32 %r11, [%d10]; setp.ne.u32 %p8, %r11, 1; @%p8 bra SPIN;"
    copy = EXPECT + (
        LOAD if load == "tensor" else LOAD.replace(".tensor.2d", "").replace("[%d2, {0, 0}]", "[%d3], 1024")
    )
    body = MAP + INIT + flag + give + "TAKE:" + (copy + take if early else take + copy) + WAIT + "END:"
    buffers = {"x": DATA, "out": np.zeros(1, np.uint32)}
    result, _ = launch(body, buffers, {"map_x": ("x", TILE)}, grid=2, mode="race")
    assert kinds(result) == found, findings(result)


@pytest.mark.parametrize(
    ("end", "found"),
    [
        (WAIT + "{meet}" + "st.shared.b32 [%r6+128], %r0;", set()),
        (WAIT + "st.shared.b32 [%r6+128], %r0; {meet}", {"async-read-in-flight"}),
        (WAIT, {"cluster-exit"}),
    ],
)
def test_what_is_sent_stays_until_the_receiver_has_it(end, found):
    """Each CTA sends 128 bytes to the other, and knows only from the other that its own have arrived."""
    body = (
        PAIR + INIT + MEET + EXPECT.replace("1024", "128") + "shl.b32 %r5, %r0, 2; add.s32 %r6, %r1, %r5;"
        "st.shared.b32 [%r6+128], %r0; fence.proxy.async.shared::cta; bar.warp.sync -1;"
        "@%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%r11+256], [%r1+128], 128, [%r11];" + end.format(meet=MEET)
    )
    result, _ = go(body, DATA, mode="race", grid=2, cluster=2)
    assert kinds(result) == found, findings(result)
