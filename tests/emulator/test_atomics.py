"""atom and red against one thread after another in Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptx_lab import THREADS, kinds, launch

EXAMPLES = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
AT = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [{0}]; mul.wide.u32 %d1, %r0, {1}; add.s64 %d0, %d0, %d1;"
NUMBERS = {"u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
           "f32": np.float32, "f64": np.float64}  # fmt: skip


def step(op: str, old: int, value: int, bits: int) -> int:
    """The cell after one integer operation."""
    mask = (1 << bits) - 1
    table = {
        "add": (old + value) & mask, "min": min(old, value), "max": max(old, value), "and": old & value,
        "or": old | value, "xor": old ^ value, "exch": value, "inc": 0 if old >= value else old + 1,
        "dec": value if old == 0 or old > value else old - 1,
    }  # fmt: skip
    return table[op]


def program(op: str, kind: str, space: str, want: bool) -> str:
    size = NUMBERS[kind]().itemsize
    reg, where = ("%d5", "%d6") if size == 8 else ("%r5", "%r6")
    target = "[%d3]" if space != "shared" else "[%r3]"
    text = AT.format("at", 4) + "ld.global.u32 %r2, [%d0];" + AT.format("value", size)
    text += f"ld.global.b{8 * size} {reg}, [%d0]; ld.param.u64 %d2, [cells]; mul.wide.u32 %d3, %r2, {size};"
    if space == "shared":  # the cells live in shared memory, and go back at the end
        text += f"mul.lo.u32 %r3, %r2, {size}; mov.u32 %r4, smem; add.u32 %r3, %r3, %r4;"
        text += f"mul.wide.u32 %d4, %r0, {size}; add.s64 %d4, %d4, %d2; mul.lo.u32 %r7, %r0, {size};"
        text += "add.u32 %r7, %r7, %r4; setp.lt.u32 %p1, %r0, 8;"
        text += f"@%p1 ld.global.b{8 * size} {where}, [%d4]; @%p1 st.shared.b{8 * size} [%r7], {where}; bar.sync 0;"
    else:
        text += "add.s64 %d3, %d3, %d2;"
    if want:
        text += f"atom.{space}.{op}.{kind} {where}, {target}, {reg};" + AT.format("old", size)
        text += f"st.global.b{8 * size} [%d0], {where};"
    else:
        text += f"red.{space}.{op}.{kind} {target}, {reg};"
    if space == "shared":
        text += f"bar.sync 0; @%p1 ld.shared.b{8 * size} {where}, [%r7]; @%p1 st.global.b{8 * size} [%d4], {where};"
    return text


CASES = [
    *((op, kind) for op in ("add", "min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *((op, kind) for op in ("and", "or", "xor") for kind in ("b32", "b64")),
    ("inc", "u32"), ("dec", "u32"), ("exch", "b32"), ("exch", "b64"),
]  # fmt: skip


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("op", "kind"), CASES)
@EXAMPLES
@given(data=st.data())
def test_integer_atomics_act_thread_by_thread(op, kind, space, data):
    """Cells and old values are those of the threads acting in thread order, few or many to a cell."""
    number, cells = NUMBERS[kind], data.draw(st.sampled_from([1, 2, 8]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    info = np.iinfo(number)
    low, high = (info.min, info.max) if data.draw(st.booleans()) else (0, 5)
    value = rng.integers(low, high, THREADS, dtype=number, endpoint=True)
    start = rng.integers(low, high, 8, dtype=number, endpoint=True)
    at = rng.integers(0, cells, THREADS).astype(np.uint32)
    want, olds = [int(x) for x in start], []
    for i in range(THREADS):
        olds.append(want[at[i]])
        new = step(op, want[at[i]], int(value[i]), 8 * number().itemsize)
        want[at[i]] = (
            new
            if not np.issubdtype(number, np.signedinteger) or new <= info.max
            else new - (1 << 8 * number().itemsize)
        )
    for keep in (True, False):
        buffers = {"at": at, "value": value, "cells": start.copy(), "old": THREADS * number().itemsize}
        shared = ".shared .align 16 .b8 smem[64];"
        for mode in ("lockstep", "race"):
            result, memory = launch(program(op, kind, space, keep), buffers, shared=shared, mode=mode)
            assert result.ok, result.findings
            assert memory.read("cells", number, (8,)).tolist() == want
            if keep:
                assert memory.read("old", number, (THREADS,)).tolist() == olds


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("cells", [1, 8])
def test_float_sums_are_added_in_thread_order(kind, cells):
    """red.add of floats equals the same sum in the same order, rounded at every step."""
    number, rng = NUMBERS[kind], np.random.default_rng(cells)
    value, at = rng.standard_normal(THREADS).astype(number), rng.integers(0, cells, THREADS).astype(np.uint32)
    want = np.zeros(8, number)
    for i in range(THREADS):
        want[at[i]] = number(want[at[i]] + value[i])
    for keep in (True, False):
        buffers = {"at": at, "value": value, "cells": np.zeros(8, number), "old": THREADS * number().itemsize}
        result, memory = launch(program("add", kind, "global", keep), buffers)
        assert result.ok and np.array_equal(memory.read("cells", number, (8,)), want)


def test_compare_and_swap_takes_the_first_match():
    """Of threads that compare with one value, the first swaps; the others see what it wrote."""
    body = AT.format("old", 4) + "ld.param.u64 %d2, [cells]; add.u32 %r1, %r0, 100;"
    body += "atom.acq_rel.gpu.global.cas.b32 %r2, [%d2], 7, %r1; st.global.b32 [%d0], %r2;"
    result, memory = launch(body, {"old": 4 * THREADS, "cells": np.full(1, 7, np.uint32)})
    assert result.ok and memory.read("cells", np.uint32, (1,))[0] == 100
    assert memory.read("old", np.uint32, (THREADS,)).tolist() == [7, *[100] * (THREADS - 1)]


@pytest.mark.parametrize("form", ["add.noftz.f16x2", "add.noftz.bf16x2", "add.noftz.f16", "add.noftz.bf16"])
def test_half_atomics_round_every_step(form):
    """Sums of small integers in halves are exact."""
    wide = form.endswith("x2")
    register, source = ("%r1", "0x40003C00") if wide else ("%h1", "0x3C00")  # 1.0 and 2.0 in f16
    if "bf16" in form:
        source = "0x40003F80" if wide else "0x3F80"
    body = f"ld.param.u64 %d2, [cells]; mov.b{32 if wide else 16} {register}, {source};"
    body += f"red.global.{form} [%d2], {register};"
    result, memory = launch(body, {"cells": np.zeros(4, np.uint16)})
    assert result.ok
    bits = memory.read("cells", np.uint16, (4,))
    got = (bits.astype(np.uint32) << 16).view(np.float32) if "bf16" in form else bits.view(np.float16)
    assert got.tolist() == [64.0, 128.0 if wide else 0.0, 0.0, 0.0]


def test_vector_reductions_add_each_element():
    """red.global.add.v4.f32 adds four floats, and the .v2 form of halves four halves."""
    body = "ld.param.u64 %d2, [cells]; mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000;"
    body += "red.global.add.v4.f32 [%d2], {%r1, %r2, %r1, %r2}; mov.b32 %r3, 0x40003C00;"
    body += "red.relaxed.gpu.global.add.noftz.v2.f16x2 [%d2+16], {%r3, %r3};"
    result, memory = launch(body, {"cells": np.zeros(6, np.float32)})
    assert result.ok
    assert memory.read("cells", np.float32, (4,)).tolist() == [64.0, 128.0, 64.0, 128.0]
    assert memory.read("cells", np.float16, (12,))[8:].tolist() == [64.0, 128.0, 64.0, 128.0]


def test_an_atomic_races_with_a_plain_read():
    """Between warps, a read of a cell that others update atomically needs a barrier; atomics alone need none."""
    head = "mov.u32 %r0, %tid.x; mov.u32 %r1, smem; setp.eq.u32 %p1, %r0, 0; @%p1 st.shared.u32 [%r1], 0; bar.sync 0;"
    update = "atom.shared.add.u32 %r2, [%r1], 1;"
    shared = ".shared .align 4 .b8 smem[4];"
    good, _ = launch(head + update + update + "bar.sync 0; ld.shared.u32 %r3, [%r1];", {}, shared=shared, mode="race")
    assert good.ok, good.findings
    bad, _ = launch(head + update + "ld.shared.u32 %r3, [%r1];", {}, shared=shared, mode="race")
    assert "race-read-after-write" in kinds(bad)
    worse, _ = launch(head.replace("bar.sync 0;", "") + update, {}, shared=shared, mode="race")
    assert kinds(worse) & {"race-read-after-write", "uninitialised-shared"}


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial"])
def test_threads_that_spin_on_a_lock_let_its_holder_run(mode):
    """A failed compare-and-swap changes nothing, so spinning does not keep the holder of a lock from going on."""
    body = "mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 31; setp.ne.u32 %p1, %r1, 0; @%p1 bra END;"
    body += (
        "ld.param.u64 %d0, [lock]; SPIN: atom.global.cas.b32 %r2, [%d0], 0, 1; setp.ne.u32 %p2, %r2, 0; @%p2 bra SPIN;"
    )
    body += "ld.volatile.global.u32 %r3, [%d0+4]; add.u32 %r3, %r3, 1; st.volatile.global.u32 [%d0+4], %r3;"
    body += "atom.global.exch.b32 %r4, [%d0], 0; END:"
    result, memory = launch(body, {"lock": np.zeros(2, np.uint32)}, mode=mode, grid=2)
    assert result.ok, result.findings
    assert memory.read("lock", np.uint32, (2,)).tolist() == [0, 4]
