"""An arrival by some lanes of a warp releases what they did, and not what the other lanes did since the warp met."""

from __future__ import annotations

import pytest
from hopper_lab import findings, launch
from ptx_lab import kinds

READ = "ld.shared.b32 %r4, [%r3+1024];"
SAME = "ld.shared.b32 %r4, [%r1+1024];"
WRITE = "st.shared.b32 [%r3+1024], %r0;"
MATRIX = "and.b32 %r8, %r0, 7; shl.b32 %r8, %r8, 4; add.s32 %r8, %r8, %r1;" + (
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r8+1024];"
)
SYNC, FENCE = "bar.warp.sync -1;", "fence.proxy.async.shared::cta;"
ELECTED = "@%p3 mbarrier.arrive.shared.b64 %d1, [%r1];"
EVERY = "mbarrier.arrive.shared.b64 %d1, [%r1];"


def handed_on(first: str, then: str, count: int = 1):
    """Warp 1 runs ``first`` after everybody has filled its words; warp 0 waits for the barrier and runs ``then``."""
    body = (
        f"@%p0 mbarrier.init.shared.b64 [%r1], {count}; and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 2;"
        "add.s32 %r3, %r3, %r1; setp.eq.u32 %p3, %r2, 0; setp.lt.u32 %p2, %r0, 32;"
        "@%p2 st.shared.b32 [%r3+1024], %r0; bar.sync 0; @!%p2 bra OTHER;"
        "L: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra L;" + then + "bra END; OTHER:" + first + "END:"
    )
    return launch(body, {"y": 4}, threads=64, mode="race")[0]


@pytest.mark.parametrize(
    ("first", "then", "count"),
    [
        (READ + SYNC + ELECTED, WRITE, 1),
        (SAME + SYNC + ELECTED, WRITE, 1),
        (WRITE + SYNC + ELECTED, READ, 1),
        (READ + EVERY, WRITE, 32),
        (SAME + EVERY, WRITE, 32),
        ("@%p3 " + WRITE + ELECTED, SAME, 1),
        ("st.shared.b32 [%r3+2048], %r0;" + MATRIX + ELECTED, WRITE, 1),
    ],
)
def test_what_is_released_in_order_is_clean(first, then, count):
    """A warp that has met, lanes that arrive for themselves, and an instruction of the whole warp."""
    result = handed_on(first, then, count)
    assert result.ok, findings(result)


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        (READ + ELECTED, WRITE, "race-write-after-read"),
        (SAME + ELECTED, WRITE, "race-write-after-read"),
        (WRITE + ELECTED, READ, "race-read-after-write"),
        (WRITE + ELECTED, WRITE, "race-write-after-write"),
        (READ + ELECTED + SYNC, WRITE, "race-write-after-read"),
    ],
)
def test_an_elected_arrival_does_not_release_the_other_lanes(first, then, kind):
    """The bar.warp.sync before it does: without it the other warp's access races."""
    assert kinds(handed_on(first, then)) == {kind}


def test_a_later_arrival_releases_them():
    """The others' accesses are only late, not lost: an arrival behind the next bar.warp.sync covers them."""
    both = READ + ELECTED + SYNC + ELECTED
    assert handed_on(both, WRITE, 2).ok


def test_a_proxy_fence_by_every_lane_keeps_what_it_orders():
    """Writes behind fence.proxy.async stay behind it, whatever an elected lane releases in between."""
    copy = "@%p3 cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r1+1024], 16;"
    copy += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    ready = "ld.param.u64 %d2, [y];" + WRITE + FENCE
    for between, expected in ((SYNC, set()), ("", {"warp-race-read-after-write"})):
        first = ready + ELECTED + between + copy
        assert kinds(launch_copy(first)) == expected
    assert kinds(launch_copy(ready.replace(FENCE, "") + ELECTED + SYNC + copy)) == {"missing-proxy-fence"}


def launch_copy(first: str):
    """``first`` in a warp of its own, with a pointer to 16 bytes."""
    body = (
        "@%p0 mbarrier.init.shared.b64 [%r1], 1; and.b32 %r2, %r0, 31; shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1;"
        "setp.eq.u32 %p3, %r2, 0; bar.sync 0;" + first
    )
    return launch(body, {"y": 16}, threads=32, mode="race")[0]
