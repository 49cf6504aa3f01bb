"""clusterlaunchcontrol: a request is declined, completes on its mbarrier, and gives no CTA."""

from __future__ import annotations

import numpy as np
import pytest
from tcgen05_lab import go, kernel, wait_for

STEPS = [
    ("who", "mov.u32 %r1, %tid.x; mov.u32 %r3, smem; add.s32 %r4, %r3, 16; setp.eq.u32 %p1, %r1, 0;"),
    ("init", "@%p1 mbarrier.init.shared.b64 [%r4], 1;"),
    ("fence", "fence.mbarrier_init.release.cluster;"),
    ("barrier", "bar.sync 0;"),
    ("expect", "@%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r4], 16;"),
    ("ask", "@%p1 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r4];"),
    ("wait", wait_for("%r4")),
    ("read", ".reg .b128 %q; ld.shared.v2.b64 {%d2, %d3}, [%r3]; mov.b128 %q, {%d2, %d3};"),
    ("is", "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q; selp.b32 %r5, 1, 0, %p2;"),
    ("one", "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r6, %q;"),
    ("all", "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r7, %r8, %r9, _}, %q;"),
    ("out", "ld.param.u64 %d4, [dst]; mul.wide.u32 %d5, %r1, 16; add.s64 %d4, %d4, %d5; "
            "st.global.v4.b32 [%d4], {%r5, %r6, %r7, %r9};"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial", "race"])
def test_a_request_is_declined(mode):
    """All CTAs of the grid run here, so nothing is left to take over; the CTA of the answer is poison."""
    result, memory = go(kernel(STEPS, ("dst",)), {"dst": 128 * 16}, mode=mode, dynamic=64)
    assert result.ok, [str(f) for f in result.findings]
    got = memory.read("dst", np.uint32, (128, 4))
    assert (got == [0, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF]).all()


def test_the_answer_must_be_waited_for():
    """Without the wait the answer is in flight."""
    result, _ = go(kernel(STEPS, ("dst",), ("wait",)), {"dst": 128 * 16}, mode="race", dynamic=64)
    assert "async-in-flight" in {f.kind for f in result.findings}
