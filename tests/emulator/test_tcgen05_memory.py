"""TMEM: allocation, loads and stores of every shape, copies from shared memory, and the faults of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_lab import kinds
from tcgen05_lab import finish, from_global, go, kernel, registers, start, to_global, wait_for

from kernel_factory.emulator import PtxError, load

MODES = ("lockstep", "warp-serial", "race")
MOST = {"32x32b": 7, "16x64b": 7, "16x128b": 6, "16x256b": 5, "16x32bx2": 7}
EVERY = [(shape, 1 << i) for shape, most in MOST.items() for i in range(most + 1)]
REGISTERS_OF = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
SETTLED = "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"


def owner(shape: str, row: int, column: int, split: int) -> tuple[int, int]:
    """(lane of the warp, register) that holds a cell: the figures of the manual, read from the cell's side."""
    if shape == "32x32b":
        return row, column
    if shape == "16x32bx2":
        return (row, column) if column < split else (row + 16, column - split)
    low, high = row % 8, row // 8
    if shape == "16x64b":  # two columns a register; the thread's lowest bit is the upper half of the rows
        return 4 * low + 2 * (column % 2) + high, column // 2
    if shape == "16x128b":  # four columns; even registers are the lower half of the rows
        return 4 * low + column % 4, column // 4 * 2 + high
    pair = column % 8 // 2  # 16x256b: as an accumulator of mma.sync, eight columns
    return 4 * low + pair, column // 8 * 4 + 2 * high + column % 2


def fragment(cells: np.ndarray, shape: str, count: int, split: int) -> np.ndarray:
    """(lane, register) values of one warp whose cells (row, column) these are."""
    out = np.zeros((32, count * REGISTERS_OF[shape]), cells.dtype)
    for row in range(cells.shape[0]):
        for column in range(cells.shape[1]):
            lane, register = owner(shape, row, column, split)
            out[lane, register] = cells[row, column]
    return out


def columns_of(shape: str, count: int) -> int:
    return {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 2}[shape] * count


def traffic(op: str, shape: str, count: int, where: str, first: int, pack: str = "") -> str:
    """A tcgen05.ld or st with its registers from %x<first> on."""
    split = 2 * count if pack else count
    tail = f", {split}" if shape == "16x32bx2" else ""
    vector = registers(count * REGISTERS_OF[shape], first)
    name = f"tcgen05.{op}.sync.aligned.{shape}.x{count}{pack}.b32"
    return f"{name} {vector}, [{where}]{tail};" if op == "ld" else f"{name} [{where}]{tail}, {vector};"


def images(columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (128, columns), dtype=np.uint32)


@pytest.mark.parametrize(("shape", "count"), EVERY)
def test_loads_and_stores_of_every_shape(shape, count):
    """st by one shape and ld by another agree on which thread and register holds which cell, in both half-quarters."""
    rows, width = (32 if shape == "32x32b" else 16), columns_of(shape, count)
    size, data = count * REGISTERS_OF[shape], images(columns_of(shape, count), count)
    halves = (0,) if rows == 32 else (0, 16)
    columns = max(32, width)
    for half in halves:
        steps = [*start(columns), ("base", f"add.s32 %r20, %r7, {half << 16};")]
        for part in (range(c, min(c + 128, width)) for c in range(0, width, 128)):
            steps += [("fill", from_global("src", width, only=part))]
            steps += [("put", "".join(traffic("st", "32x32b", 1, f"%r7+{c}", c) for c in part))]
        steps += [("putw", "tcgen05.wait::st.sync.aligned;"), ("ld", traffic("ld", shape, count, "%r20", 512)),
                  ("ldw", "tcgen05.wait::ld.sync.aligned;"), ("out", to_global("dst", size, 512))]  # fmt: skip
        buffers = {"src": data, "dst": 128 * size * 4}
        result, memory = go(kernel(steps + finish(columns), tuple(buffers)), buffers, dynamic=64)
        assert result.ok, [str(f) for f in result.findings]
        got = memory.read("dst", np.uint32, (4, 32, size))
        for warp in range(4):
            lane = 32 * warp + half
            assert np.array_equal(got[warp], fragment(data[lane : lane + rows], shape, count, count))


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([s for s, _ in EVERY]), power=st.integers(0, 4), packed=st.booleans(), seed=st.integers(0, 99)
)
def test_a_store_comes_back_and_halves_are_packed(shape, power, packed, seed):
    """st then ld of one shape returns the registers; .unpack::16b spreads halves over two columns, .pack::16b joins."""
    count = 1 << power
    size = count * REGISTERS_OF[shape]
    data = images(size, seed)
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    steps = [*start(512), ("fill", from_global("src", size))]
    steps += [("put", traffic("st", shape, count, "%r7", 0, unpack)), ("putw", "tcgen05.wait::st.sync.aligned;")]
    steps += [("ld", traffic("ld", shape, count, "%r7", 512, pack)), ("raw", traffic("ld", "32x32b", 2, "%r7", 800))]
    steps += [
        ("ldw", "tcgen05.wait::ld.sync.aligned;"),
        ("out", to_global("dst", size, 512)),
        ("rout", to_global("raw", 2, 800)),
    ]
    buffers = {"src": data, "dst": 128 * size * 4, "raw": 1024}
    result, memory = go(kernel(steps + finish(512), tuple(buffers)), buffers, dynamic=64)
    assert result.ok, [str(f) for f in result.findings]
    assert np.array_equal(memory.read("dst", np.uint32, (128, size)), data)
    if packed and shape == "32x32b":
        raw = memory.read("raw", np.uint32, (128, 2))
        assert np.array_equal(raw[:, 0], data[:, 0] & 0xFFFF) and np.array_equal(raw[:, 1], data[:, 0] >> 16)


def copied(shape: str, image: np.ndarray, descriptor: int, columns: int, mode: str = "lockstep"):
    """tcgen05.cp of an image, committed and waited for; TMEM (128, columns)."""
    steps = start(32, image.size)
    steps += [
        ("elect", "setp.ne.u32 %p4, %r1, 0; @%p4 bra NOCP;"),
        ("cp", f"cvt.u64.u32 %d20, %r3; shr.u64 %d20, %d20, 4; add.s64 %d20, %d20, {descriptor}; "
               f"tcgen05.cp.cta_group::1.{shape} [%r6], %d20;"),
        ("commit", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r4]; NOCP:"),
        ("wait", wait_for("%r4")), ("after", "tcgen05.fence::after_thread_sync;"),
        ("ld", traffic("ld", "32x32b", columns, "%r7", 0)), ("ldw", "tcgen05.wait::ld.sync.aligned;"),
        ("out", to_global("dst", columns)),
    ]  # fmt: skip
    buffers = {"image": image, "dst": 128 * columns * 4}
    result, memory = go(kernel(steps + finish(32), tuple(buffers)), buffers, mode=mode, dynamic=image.size + 64)
    return result, memory.read("dst", np.uint32, (128, columns))


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial"])
@pytest.mark.parametrize(
    ("shape", "rows", "lanes"),
    [
        ("128x256b", 128, [[r] for r in range(128)]),
        ("128x128b", 128, [[r] for r in range(128)]),
        ("4x256b", 4, [[32 * r] for r in range(4)]),
        ("64x128b.warpx2::02_13", 64, [[r, r + 64] for r in range(64)]),
        ("64x128b.warpx2::01_23", 64, [[r + 32 * (r // 32), r + 32 * (r // 32) + 32] for r in range(64)]),
        ("32x128b.warpx4", 32, [[r, r + 32, r + 64, r + 96] for r in range(32)]),
    ],
)
def test_copies_from_shared_memory(shape, rows, lanes, mode):
    """Each row of core matrices (8 rows of 16 bytes) goes to its lanes; other lanes keep poison."""
    width = 2 if "256b" in shape else 1
    data = np.random.default_rng(rows).integers(0, 2**32, (rows, 4 * width), dtype=np.uint32)
    image = np.zeros((width, -(-rows // 8), 8, 4), np.uint32)  # leading: next 16 bytes of a row; stride: next 8 rows
    for r in range(rows):
        for u in range(width):
            image[u, r // 8, r % 8] = data[r, 4 * u : 4 * u + 4]
    descriptor = (128 * -(-rows // 8) >> 4) << 16 | (128 >> 4) << 32 | 1 << 46
    result, got = copied(shape, image.reshape(-1).view(np.uint8), descriptor, 4 * width, mode)
    assert result.ok, [str(f) for f in result.findings]
    want = np.full((128, 4 * width), 0xFFFFFFFF, np.uint32)
    for r in range(rows):
        want[lanes[r]] = data[r]
    assert np.array_equal(got, want)
    copies = sum(map(len, lanes))
    assert result.counters.tmem_bytes == {"cp": 16 * width * copies, "ld": 128 * 16 * width}


# -- allocation -------------------------------------------------------------------------------------------------------
def held(
    extra: list[tuple[str, str]], drop: tuple[str, ...] = (), columns: int = 64, mode: str = "lockstep", **options
):
    return go(kernel([*start(columns), *extra, *finish(columns)], (), drop), {}, mode=mode, dynamic=64, **options)[0]


@pytest.mark.parametrize("mode", MODES)
def test_an_allocation_that_comes_back_is_fine(mode):
    """Allocate, free, leave: nothing to report in any mode."""
    assert held([], mode=mode).ok


def test_a_leak_and_a_second_dealloc_are_found():
    """An allocation that stays is a leak; freeing it twice or with another size is a fault."""
    result = held([], drop=("dealloc",))
    assert kinds(result) == {"tmem-leak"} and result.findings[0].text.startswith("tcgen05.alloc")
    free = "@!%p1 bra NO2; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, {}; NO2:"
    assert kinds(held([("twice", free.format(64))])) == {"tmem-dealloc", "tmem-leak"} - {"tmem-leak"}
    assert "holds an allocation of 64 columns" in held([("less", free.format(32))]).findings[0].message


@pytest.mark.parametrize("columns", [16, 48, 1024])
def test_sizes_that_alloc_does_not_take(columns):
    """A power of two from 32 to 512."""
    result = held([], columns=columns)
    assert kinds(result) == {"tmem-alloc"} and str(columns) in result.findings[0].message


def test_an_alloc_after_giving_up_the_permit_is_found():
    """relinquish_alloc_permit is for good."""
    again = (
        "@!%p1 bra NO3; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; mov.b32 %r30, 32; "
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], %r30; NO3:"
    )
    result = held([("again", again)])
    assert kinds(result) == {"tmem-alloc-after-relinquish"} and result.findings[0].other_line > 0


@pytest.mark.parametrize("mode", MODES)
def test_alloc_waits_for_columns_that_come_back(mode):
    """With 512 columns taken, another warp's alloc waits until they are freed; without the free it is a deadlock."""
    second = (
        "setp.ne.u32 %p9, %r2, 1; @%p9 bra NO4; mov.b32 %r30, 512; "
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5+4], %r30; ld.shared.b32 %r31, [%r5+4]; "
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r31, 512; NO4:"
    )
    first = "@!%p1 bra NO5; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r6, 512; NO5:"
    steps = [*start(512), ("second", second), ("first", first)]
    result, _ = go(kernel(steps, ()), {}, mode=mode, dynamic=64)
    assert result.ok, [str(f) for f in result.findings]
    result, _ = go(kernel(steps, (), drop=("first",)), {}, mode=mode, dynamic=64)
    stuck = next(f for f in result.findings if f.kind == "deadlock")
    assert "tcgen05.alloc of 512 columns" in stuck.message


# -- faults of accesses -----------------------------------------------------------------------------------------------
def test_a_warp_reaches_only_its_quarter_of_the_lanes():
    """Without the warp's lanes in the address, warps 1 to 3 would read quarter 0."""
    steps = [*start(32), ("ld", traffic("ld", "32x32b", 1, "%r6", 0)), ("w", "tcgen05.wait::ld.sync.aligned;")]
    result, _ = go(kernel(steps + finish(32), ()), {}, dynamic=64)
    assert kinds(result) == {"tmem-lane-quarter"} and result.findings[0].warp == 1


@pytest.mark.parametrize(("offset", "kind"), [(32, "tmem-unallocated"), (500, "tmem-out-of-bounds")])
def test_access_outside_of_the_allocation(offset, kind):
    """Columns past the allocation, and past the memory."""
    load_it = traffic("ld", "32x32b", 16, f"%r7+{offset}", 0)
    result = held([("ld", load_it), ("w", "tcgen05.wait::ld.sync.aligned;")], columns=32)
    assert kinds(result) == {kind} and result.findings[0].text.startswith("tcgen05.ld")


def waited(drop: tuple[str, ...], mode: str):
    """st, wait, ld, wait, use."""
    data = images(4, 1)
    steps = [
        *start(32), ("fill", from_global("src", 4)), ("st", traffic("st", "32x32b", 4, "%r7", 0)),
        ("stw", "tcgen05.wait::st.sync.aligned;"), ("ld", traffic("ld", "32x32b", 4, "%r7", 16)),
        ("ldw", "tcgen05.wait::ld.sync.aligned;"), ("out", to_global("dst", 4, 16)), *finish(32),
    ]  # fmt: skip
    buffers = {"src": data, "dst": 2048}
    result, memory = go(kernel(steps, tuple(buffers), drop), buffers, mode=mode, dynamic=64)
    return result, np.array_equal(memory.read("dst", np.uint32, (128, 4)), data)


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_wait_gives_poison_and_a_finding(mode):
    """Without wait::ld the registers, without wait::st the cells, hold no data yet; in race mode both are found."""
    result, right = waited((), mode)
    assert result.ok and right, [str(f) for f in result.findings]
    for step, kind in (("ldw", "tcgen05-ld-not-waited"), ("stw", "tmem-store-not-waited")):
        result, right = waited((step,), mode)
        assert not right
        assert (kind in kinds(result)) == (mode == "race")
        if mode == "race":
            finding = next(f for f in result.findings if f.kind == kind)
            assert finding.line > finding.other_line > 0 and "wait::" in finding.cure


def test_uninitialised_tensor_memory_is_found():
    """A load of cells that nothing wrote gives poison, and a finding in race mode."""
    result = held([("ld", traffic("ld", "32x32b", 1, "%r7", 0)), ("w", "tcgen05.wait::ld.sync.aligned;")], mode="race")
    assert kinds(result) == {"uninitialised-tmem"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("tcgen05.ld.sync.aligned.16x512b.x1.b32 %x0, [%r7];", "32x32b"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 %x0, [%r7];", "goes up to .x32"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 %x0, [%r7];", "1 registers"),
        ("tcgen05.shift.cta_group::1.down [%r6];", "tcgen05.shift is not emulated"),
        ("tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r6], %d1;", "decompression"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r6], %d1, %d2, [%r6], %r1, %p1;", "sparse"),
        (
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r6], [%r6], %d2, %r1, [%r6], [%r6], %p1;",
            "block-scaled",
        ),
        (
            "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::4X [%r6], %d1, %d2, %r1, [%r6], [%r6], %p1;",
            "not 4",
        ),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r6], %d1, %d2, %r1, {%r1}, %p1;", "mask of output lanes"),
        ("tcgen05.commit.cta_group::2.mbarrier::arrive::one.b64 [%r4];", "one cta_group"),
    ],
)
def test_what_is_not_emulated_is_refused_with_its_line(line, what):
    """An unknown shape, modifier or form is a PtxError that names it, never a guess."""
    with pytest.raises(PtxError, match=what.replace("(", r"\(")):
        load(kernel([*start(32), ("odd", line), *finish(32)], ()))
