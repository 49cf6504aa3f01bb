"""Planted hazards of tcgen05 kernels: each is found, with the two lines and a cure; the right kernel has no finding."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_lab import kinds
from tcgen05_lab import finish, from_global, go, kernel, multiply, registers, start, to_global, wait_for
from test_tcgen05_mma import layout, numbers, place, word

MODES = ("lockstep", "warp-serial", "race")
N = 32
A, B = numbers(1, (128, 16), "bf16"), numbers(2, (N, 16), "bf16")
LAYOUTS = (layout(False, 128, 128, 2, 0), layout(False, 128, N, 2, 0))
PARTS = (place(A, "bf16", LAYOUTS[0]), place(B, "bf16", LAYOUTS[1]))
IMAGE = np.concatenate(PARTS)
PAIR = (LAYOUTS[0].descriptor(0), LAYOUTS[1].descriptor(PARTS[0].size))
WORD = word("bf16", 128, N)
LOAD = [
    ("ld", f"tcgen05.ld.sync.aligned.32x32b.x{N}.b32 {registers(N)}, [%r7];"),
    ("ldw", "tcgen05.wait::ld.sync.aligned;"),
]
SYNC = [
    ("before2", "tcgen05.fence::before_thread_sync;"),
    ("barrier2", "bar.sync 0;"),
    ("after2", "tcgen05.fence::after_thread_sync;"),
]
NO_FENCES = ("before0", "after0", "after1", "before2", "after2", "after1'", "before9", "after9")


def once() -> list[tuple[str, str]]:
    """Stage, multiply, commit, wait, load, write out."""
    steps = start(32, IMAGE.size) + multiply("f16", [PAIR], WORD) + LOAD
    return [*steps, ("out", to_global("dst", N)), *finish(32)]


def twice() -> list[tuple[str, str]]:
    """The same, and a second product into the same accumulator once everybody has loaded the first."""
    second = [(f"{name}'", text.replace("NOMMA", "NOMMB")) for name, text in multiply("f16", [PAIR], WORD, use=True)]
    second = [(n, wait_for("%r4", 1) if n == "wait'" else text) for n, text in second]
    steps = start(32, IMAGE.size) + multiply("f16", [PAIR], WORD) + LOAD
    steps += [("keep", " ".join(f"mov.b32 %x{100 + i}, %x{i};" for i in range(N))), *SYNC, *second]
    return [*steps, *[(f"{n}'", t) for n, t in LOAD], ("out", to_global("dst", N)), *finish(32)]


def check(steps, drop=(), mode="race", seed=0, extra=()):
    buffers = {"image": IMAGE, "dst": 128 * N * 4}
    text = kernel([*steps, *extra], tuple(buffers), drop)
    result, memory = go(text, buffers, mode=mode, seed=seed, dynamic=IMAGE.size + 64)
    return result, memory.read("dst", np.float32, (128, N))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drop", [(), NO_FENCES])
@pytest.mark.parametrize(("steps", "times"), [(once(), 1), (twice(), 2)])
def test_right_kernels_have_no_findings(steps, times, mode, drop):
    """With every tcgen05.fence, and with none at all (as CUTLASS writes kernels), nothing is reported."""
    result, got = check(steps, drop, mode)
    assert result.ok, [str(f) for f in result.findings]
    assert np.array_equal(got, times * (A @ B.T))


@pytest.mark.parametrize(
    ("steps", "drop", "kind", "first", "second"),
    [
        (once(), ("proxy",), "missing-proxy-fence", "tcgen05.mma", "st.shared"),
        (once(), ("wait",), "tmem-not-committed", "tcgen05.ld", "tcgen05.mma"),
        (once(), ("commit", "wait"), "tmem-not-committed", "tcgen05.ld", "tcgen05.mma"),
        (once(), ("barrier0",), "race-read-after-write", "", ""),
        (once(), ("ldw",), "tcgen05-ld-not-waited", "st.global", "tcgen05.ld"),
        (once(), ("barrier9",), "tmem-race", "tcgen05.dealloc", "tcgen05.ld"),
        (once(), ("after1",), "tcgen05-missing-fence", "tcgen05.ld", "tcgen05.mma"),
        (twice(), ("barrier2",), "tmem-race", "tcgen05.mma", "tcgen05.ld"),
        (twice(), ("before2",), "tcgen05-missing-fence", "tcgen05.mma", "tcgen05.ld"),
        (twice(), ("after2",), "tcgen05-missing-fence", "tcgen05.mma", "tcgen05.ld"),
        (twice(), ("wait'",), "tmem-not-committed", "tcgen05.ld", "tcgen05.mma"),
        (twice(), ("ldw",), "tmem-load-not-waited", "tcgen05.mma", "tcgen05.ld"),
    ],
)
def test_a_dropped_step_is_found_in_race_mode(steps, drop, kind, first, second):
    """Each finding names the two accesses and what to do."""
    result, _ = check(steps, drop)
    assert kind in kinds(result), [str(f) for f in result.findings]
    finding = next(f for f in result.findings if f.kind == kind and first in f.text)
    assert finding.cure and finding.other_line > 0
    assert second in kernel(steps, ("image", "dst"), drop).splitlines()[finding.other_line - 1]


@pytest.mark.parametrize(
    ("keep", "kind"), [("mov.b32 %x{}, %x{};", "tmem-load-not-waited"), ("add.u32 %x{}, %x{}, 0;", None)]
)
def test_without_fences_a_load_is_done_at_its_wait_or_first_use(keep, kind):
    """The wait gone, the next product may overwrite what is still being loaded; a copy is no use, a sum is one."""
    steps = [
        (name, "".join(keep.format(100 + i, i) for i in range(N)) if name == "keep" else text) for name, text in twice()
    ]
    result, got = check(steps, (*NO_FENCES, "ldw"))
    assert kinds(result) == ({kind} if kind else set()), [str(f) for f in result.findings]
    assert np.array_equal(got, 2 * (A @ B.T))


def test_late_landing_shows_a_missing_wait_in_the_numbers():
    """Warp-serial: the product lands when nothing else can go on, so a load that does not wait reads poison."""
    for drop in (("wait",), ("commit", "wait")):
        assert not np.array_equal(check(once(), drop, "warp-serial")[1], A @ B.T)
    result, _ = check(once(), ("commit", "wait"), "warp-serial")
    assert kinds(result) == {"tmem-dealloc-in-flight", "tcgen05-in-flight"}


def test_shared_memory_overwritten_under_a_product_is_found():
    """A generic write into an operand between the issue and the commit's wait."""
    steps = once()
    at = next(i for i, (name, _) in enumerate(steps) if name == "wait")
    harm = ("harm", "setp.eq.u32 %p8, %r1, 96; @%p8 st.shared.b32 [%r3], %r1;")
    result, _ = check([*steps[:at], harm, *steps[at:]])
    assert "async-read-in-flight" in kinds(result)
    after = next(i for i, (name, _) in enumerate(steps) if name == "ld")
    result, _ = check([*steps[:after], harm, *steps[after:]])
    assert result.ok, [str(f) for f in result.findings]


def test_a_commit_by_another_warp_covers_nothing():
    """tcgen05.commit tracks what its own thread has issued."""
    steps = []
    for name, text in once():
        if name == "commit":
            steps += [("skip", "NOMMA: bar.warp.sync -1; bar.sync 0; setp.ne.u32 %p8, %r1, 64; @%p8 bra LATE;")]
            steps += [("commit", text), ("late", "LATE:")]
        elif name != "end":
            steps.append((name, text))
    assert "tmem-not-committed" in kinds(check(steps)[0])


@pytest.mark.parametrize(("lane", "found"), [(0, set()), (1, {"tmem-not-committed"})])
def test_a_commit_by_another_lane_covers_nothing(lane, found):
    """Lane 0 is elected for the products; all of its warp come to the commit."""
    commit = dict(once())["commit"]
    last = f"NOMMA: setp.ne.u32 %p9, %r1, {lane}; @%p9 bra LATE; {commit} LATE: bar.warp.sync -1;"
    steps = [(name, last if name == "end" else text) for name, text in once() if name != "commit"]
    assert kinds(check(steps)[0]) == found


def test_accumulating_onto_nothing_is_found():
    """enable-input-d on a fresh allocation reads uninitialised TMEM."""
    steps = start(32, IMAGE.size) + multiply("f16", [PAIR], WORD, use=True) + LOAD
    result, got = check([*steps, ("out", to_global("dst", N)), *finish(32)])
    assert kinds(result) == {"uninitialised-tmem"} and result.findings[0].text.startswith("tcgen05.mma")
    assert np.isnan(got).all()


@pytest.mark.parametrize(
    ("drop", "kind"),
    [((), None), (("putw",), "tmem-store-not-waited"), (("barrierp",), "tmem-race"),
     (("beforep",), "tcgen05-missing-fence"),
     (("afterp",), "tcgen05-missing-fence")],
)  # fmt: skip
def test_operand_a_written_by_all_warps(drop, kind):
    """A goes to TMEM by tcgen05.st of four warps; the issuing warp must be ordered behind all of them."""
    steps = [*start(64, IMAGE.size), ("fill", from_global("a", 8)),
             ("put", f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7+32], {registers(8)};"),
             ("putw", "tcgen05.wait::st.sync.aligned;"), ("beforep", "tcgen05.fence::before_thread_sync;"),
             ("barrierp", "bar.sync 0;"), ("afterp", "tcgen05.fence::after_thread_sync;")]  # fmt: skip
    steps += [*multiply("f16", [(0, PAIR[1])], WORD, a_in_tmem=32), *LOAD, ("out", to_global("dst", N)), *finish(64)]
    words = (A.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
    buffers = {"image": IMAGE, "a": np.ascontiguousarray(words), "dst": 128 * N * 4}
    result, memory = go(kernel(steps, tuple(buffers), drop), buffers, mode="race", dynamic=IMAGE.size + 64)
    if kind is None:
        assert result.ok, [str(f) for f in result.findings]
        assert np.array_equal(memory.read("dst", np.float32, (128, N)), A @ B.T)
    else:
        assert kind in kinds(result), [str(f) for f in result.findings]


@pytest.mark.parametrize(
    ("order", "found"),
    [("", {"tmem-not-committed"}), (wait_for("%r4").replace("AGAIN", "AGAIN1").replace("DONE", "DONE1"), set())],
)
def test_products_of_two_warps_are_in_no_order(order, found):
    """Warp 1 adds onto what warp 0 multiplies: only behind warp 0's commit. Without fences, as CUTLASS has it."""
    first = dict(once())
    add = first["mma"].replace("setp.ne.u32 %p5, 0", "setp.eq.u32 %p5, 0")
    second = (
        f"setp.ne.u32 %p8, %r2, 1; @%p8 bra NOM2; elect.sync %r17|%p9, -1; @!%p9 bra NOM2; {order} {add} "
        + first["commit"].replace("%r4", "%r4+8") + " NOM2:"
    )  # fmt: skip
    edits = {
        "init": first["init"] + "@%p3 mbarrier.init.shared.b64 [%r4+8], 1;",
        "end": first["end"] + second,
        "wait": first["wait"] + wait_for("%r4+8").replace("AGAIN", "AGAIN2").replace("DONE", "DONE2"),
    }
    result, got = check([(name, edits.get(name, text)) for name, text in once()], NO_FENCES)
    assert kinds(result) == found, [str(f) for f in result.findings]
    assert found or np.array_equal(got, 2 * (A @ B.T))


@pytest.mark.parametrize(("n", "found"), [(N, set()), (16, {"tmem-not-committed"})])
def test_products_of_one_thread_are_in_order_on_one_shape_only(n, found):
    """The second product adds onto the first, or onto half of its columns."""
    first = dict(once())["mma"]
    second = first.replace("setp.ne.u32 %p5, 0", "setp.eq.u32 %p5, 0").replace(str(WORD), str(word("bf16", 128, n)))
    result, got = check([(name, text + " " + second if name == "mma" else text) for name, text in once()])
    assert kinds(result) == found, [str(f) for f in result.findings]
    assert found or np.array_equal(got, 2 * (A @ B.T))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("column", "found"), [(32, set()), (31, {"tcgen05-descriptor"}), (24, {"tcgen05-descriptor"})])
def test_operand_a_in_tensor_memory_lies_outside_of_the_result(column, found, mode):
    """A takes eight columns; the result has columns 0 to 31."""
    steps = [*start(64, IMAGE.size), ("fill", from_global("a", 8)),
             ("put", f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r7+{column}], {registers(8)};"),
             ("putw", "tcgen05.wait::st.sync.aligned;"), *SYNC]  # fmt: skip
    steps += [*multiply("f16", [(0, PAIR[1])], WORD, a_in_tmem=column), *LOAD, *finish(64)]
    buffers = {"image": IMAGE, "a": np.zeros((128, 8), np.uint32)}
    result, _ = go(kernel(steps, tuple(buffers)), buffers, mode=mode, dynamic=IMAGE.size + 64)
    assert kinds(result) == found, [str(f) for f in result.findings]
