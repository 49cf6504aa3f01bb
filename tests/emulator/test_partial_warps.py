"""Warp collectives with member masks, diverged lanes and lanes that have left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_lab import THREADS, apply, kinds, launch

EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
MODES = ("lockstep", "warp-serial", "race")
STORE = "ld.param.u64 %d0, [dst]; mul.wide.u32 %d1, %r0, 4; add.s64 %d0, %d0, %d1; st.global.u32 [%d0], {0};"


@pytest.mark.parametrize("form", ["any", "all"])
@pytest.mark.parametrize("bits", [32, 64])
@EXAMPLES
@given(values=st.lists(st.integers(0, 3), min_size=THREADS, max_size=THREADS), same=st.booleans())
def test_match_finds_equal_values(form, bits, values, same):
    """match.any names the lanes of equal value; match.all names all lanes if all are equal, and says so."""
    a = np.array([7] * THREADS if same else values, f"u{bits // 8}")
    pred = "|%p" if form == "all" else ""
    outputs = {"o": np.uint32, **({"p": bool} if pred else {})}
    got = apply(f"match.{form}.sync.b{bits} %o{pred}, %a, 0xffffffff;", {"a": a}, outputs)
    for i in range(THREADS):
        warp = a[i // 32 * 32 : i // 32 * 32 + 32]
        mask = sum(1 << k for k, x in enumerate(warp) if x == a[i])
        if form == "any":
            assert got["o"][i] == mask
        else:
            assert got["p"][i] == (mask == 0xFFFFFFFF) and got["o"][i] == (mask if mask == 0xFFFFFFFF else 0)


@EXAMPLES
@given(cut=st.integers(1, 31), seed=st.integers(0, 2**32))
def test_two_parts_of_a_warp_work_in_their_own_masks(cut, seed):
    """All lanes execute one collective, each within the mask of its part."""
    x = np.random.default_rng(seed).integers(0, 2**32, THREADS).astype(np.uint32)
    low = (1 << cut) - 1
    body = f"and.b32 %r2, %r0, 31; setp.lt.u32 %p1, %r2, {cut}; selp.b32 %m, {low}, {~low & 0xFFFFFFFF}, %p1;"
    body = ".reg .b32 %m; .reg .pred %p1x;" + body
    body += "redux.sync.add.u32 %sum, %a, %m; redux.sync.min.s32 %low, %a, %m; redux.sync.xor.b32 %xor, %a, %m;"
    body += "setp.gt.s32 %p1x, %a, 0; vote.sync.ballot.b32 %bal, %p1x, %m; vote.sync.all.pred %every, %p1x, %m;"
    body += "elect.sync %lead|%is, %m; match.any.sync.b32 %mat, %a, %m; shfl.sync.bfly.b32 %sh, %a, 1, 31, %m;"
    words = dict.fromkeys(("sum", "low", "xor", "bal", "lead", "mat", "sh"), np.uint32)
    got = apply(body, {"a": x}, {**words, "every": bool, "is": bool})
    for i in range(THREADS):
        base, lane = i // 32 * 32, i % 32
        part = [k for k in range(32) if (k < cut) == (lane < cut)]
        v = [int(x[base + k]) for k in part]
        assert got["sum"][i] == sum(v) % 2**32 and got["xor"][i] == np.bitwise_xor.reduce(np.array(v, np.uint32))
        assert got["low"][i].view(np.int32) == min(t - (t >> 31 << 32) for t in v)
        positive = [k for k in part if 0 < x[base + k] < 2**31]
        assert got["bal"][i] == sum(1 << k for k in positive) and got["every"][i] == (positive == part)
        assert got["lead"][i] == part[0] and got["is"][i] == (lane == part[0])
        assert got["mat"][i] == sum(1 << k for k in part if x[base + k] == x[i])
        if lane ^ 1 in part:
            assert got["sh"][i] == x[i ^ 1]


@pytest.mark.parametrize("mode", MODES)
def test_diverged_lanes_meet_by_their_mask(mode):
    """Two branches, each with a collective over its own lanes, and a collective of all after them."""
    body = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; setp.lt.u32 %p1, %r1, 10; @%p1 bra LOW;"
    body += "redux.sync.max.u32 %r2, %r0, 0xfffffc00; bra JOIN; LOW: redux.sync.add.u32 %r2, %r0, 0x3ff; JOIN:"
    body += "redux.sync.add.u32 %r3, %r2, 0xffffffff;" + STORE.format("%r3")
    result, memory = launch(body, {"dst": 4 * THREADS}, mode=mode)
    assert result.ok, result.findings
    got = memory.read("dst", np.uint32, (2, 32))
    for w in range(2):
        lanes = np.arange(32 * w, 32 * w + 32)
        assert (got[w] == 10 * lanes[:10].sum() + 22 * lanes.max()).all()


@pytest.mark.parametrize("mode", MODES)
def test_lanes_that_have_left_are_not_waited_for(mode):
    """A full mask is right although the upper half of the warp has returned."""
    body = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; setp.ge.u32 %p1, %r1, 16; @%p1 ret;"
    body += "redux.sync.add.u32 %r2, %r1, 0xffffffff; shfl.sync.down.b32 %r3, %r1, 1, 31, 0xffff; activemask.b32 %r4;"
    body += "add.u32 %r2, %r2, %r4;" + STORE.format("%r2")
    result, memory = launch(body, {"dst": 4 * THREADS}, mode=mode)
    assert result.ok, result.findings
    assert (memory.read("dst", np.uint32, (2, 32))[:, :16] == 120 + 0xFFFF).all()


def test_a_lane_outside_its_own_mask_is_a_finding():
    """The manual leaves it undefined; a lane that its mask leaves out is reported."""
    result, _ = launch("mov.u32 %r2, 1; shfl.sync.bfly.b32 %r1, %r2, 1, 31, 0xffff;", {})
    assert kinds(result) == {"member-mask"}


@pytest.mark.parametrize("mode", MODES)
def test_a_guarded_collective_runs_for_the_lanes_it_names(mode):
    """A guard on a collective or a barrier is a branch around it."""
    body = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; mov.u32 %r2, 5; setp.lt.u32 %p1, %r1, 4;"
    body += "@%p1 redux.sync.add.u32 %r2, %r1, 0xf; setp.lt.u32 %p2, %r0, 64; @%p2 bar.sync 0;" + STORE.format("%r2")
    result, memory = launch(body, {"dst": 4 * THREADS}, mode=mode)
    assert result.ok, result.findings
    assert (memory.read("dst", np.uint32, (2, 32)) == np.where(np.arange(32) < 4, 6, 5)).all()
