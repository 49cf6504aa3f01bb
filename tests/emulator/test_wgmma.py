"""wgmma against NumPy: types, shapes, majors, every canonical layout, A in registers, scales, f16 accumulators."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hopper_lab import findings, launch
from ptx_lab import kinds

MODES = ("lockstep", "warp-serial", "race")
IMAGE = 49152
B_AT = 16384
SIZE = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
MODE = {0: 0, 128: 1, 64: 2, 32: 3}
FILL = (
    "ld.param.u64 %d9, [image]; mul.wide.u32 %d8, %r0, 16; add.s64 %d9, %d9, %d8; shl.b32 %r9, %r0, 4;"
    "add.s32 %r9, %r9, %r1;"
    + "".join(
        f"ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%d9+{2048 * i}];"
        f"st.shared.v4.b32 [%r9+{2048 * i}], {{%r20, %r21, %r22, %r23}};"
        for i in range(IMAGE // 2048)
    )
    + "fence.proxy.async.shared::cta; bar.sync 0;"
)


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Small integers as bits of a type, by its definition."""
    x = values.astype(np.float32)
    if kind == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    if kind == "tf32":
        return x.view(np.uint32)
    if kind in ("s8", "u8"):
        return values.astype(np.int8 if kind == "s8" else np.uint8).view(np.uint8)
    half = x.astype(np.float16).view(np.uint16)
    if kind == "e5m2":
        return (half >> 8).astype(np.uint8)
    exponent = ((half >> 10) & 31).astype(int) - 15 + 7
    bits = (half >> 15 << 7) | (np.maximum(exponent, 0) << 3) | ((half >> 7) & 7)
    return np.where(x == 0, 0, bits).astype(np.uint8)


def place(image: np.ndarray, at: int, words: np.ndarray, span: int, mn_major: bool) -> tuple[int, int]:
    """Put a (rows, k) matrix into an image by the canonical layout of ``span`` swizzle bytes; (LBO, SBO)."""
    rows, columns = words.shape
    size = words.dtype.itemsize
    atom = span or 16
    if mn_major:
        each = atom // size  # rows in an atom line
        if span:
            lbo, sbo = atom * 8, atom * 8 * (rows // each)
        else:
            sbo, lbo = 128, 128 * (rows // each)
    else:
        sbo, lbo = (atom * 8, 16) if span else (256, 128)
    for r, k in itertools.product(range(rows), range(columns)):
        if mn_major:
            outer, inner = (lbo, sbo) if span else (sbo, lbo)
            offset = r % each * size + r // each * outer + k % 8 * atom + k // 8 * inner
        elif span:
            offset = r % 8 * atom + r // 8 * sbo + k * size
        else:
            offset = r % 8 * 16 + r // 8 * sbo + k * size // 16 * lbo + k * size % 16
        address = at + offset
        if span:
            chunk, line = address // 16, address // 128
            address += ((chunk ^ (line % (span // 16))) - chunk) * 16
        image[address : address + size] = words[r, k : k + 1].view(np.uint8)
    return lbo, sbo


def descriptor(register: str, at: int, lbo: int, sbo: int, span: int) -> str:
    """PTX that builds a matrix descriptor."""
    high = MODE[span] << 62 | sbo >> 4 << 32 | lbo >> 4 << 16
    return (
        f"add.s32 %r10, %r1, {at}; shr.u32 %r10, %r10, 4; and.b32 %r10, %r10, 16383; cvt.u64.u32 {register}, %r10;"
        f"or.b64 {register}, {register}, {high};"
    )


def multiply(
    n: int, kind: str, accumulator: str = "f32", *, span_a=128, span_b=128, a_mn=False, b_mn=False, mode="lockstep",
    start: int | None = None, scale: tuple[int, int] = (1, 1), from_registers=False, times=1, kind_b: str = "",
    edit=str,
):  # fmt: skip
    """Run D = A B^T (+ D) of random integers; (result, D, expected D)."""
    kind_b = kind_b or kind
    size, k = SIZE[kind], 32 // SIZE[kind]
    rng = np.random.default_rng(n + k)
    low, high = (0, 4) if kind == "u8" else (-3, 4)
    a, b = rng.integers(low, high, (64, k)), rng.integers(0 if kind_b == "u8" else -3, 4, (n, k))
    image = np.full(IMAGE, 0x7F, np.uint8)
    a_words, b_words = encode(a, kind), encode(b, kind_b)
    da, db = place(image, 0, a_words, span_a, a_mn), place(image, B_AT, b_words, span_b, b_mn)
    half, integer = accumulator == "f16", accumulator == "s32"
    count = n // 4 if half else n // 2
    regs = ", ".join(f"%acc{i}" for i in range(count))
    first = {"f32": f"0f{np.float32(start or 0).view(np.uint32):08X}", "s32": str(start or 0)}.get(
        accumulator, str(int(np.float16(start or 0).view(np.uint16)) * 0x10001)
    )
    body = FILL + f".reg .b32 %acc<{count}>; .reg .b32 %a<4>;"
    body += descriptor("%d1", 0, *da, span_a) + descriptor("%d2", B_AT, *db, span_b)
    body += "".join(f"mov.b32 %acc{i}, {first};" for i in range(count))
    operand = "%d1"
    buffers = {"image": image, "out": count * 128 * 4}
    if from_registers:
        words = _fragments(a_words)
        buffers["frag"] = words
        body += "ld.param.u64 %d5, [frag]; mul.wide.u32 %d6, %r0, 16; add.s64 %d5, %d5, %d6;"
        body += "ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%d5];"
        operand = "{%a0, %a1, %a2, %a3}"
    body += f"setp.ne.u32 %p2, {int(start is not None)}, 0; wgmma.fence.sync.aligned;"
    flags = f", {scale[0]}, {scale[1]}" if not integer else ""
    if size == 2:
        flags += (f", {int(a_mn)}" if not from_registers else "") + f", {int(b_mn)}"
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{accumulator}.{kind}.{kind_b} {{{regs}}}, {operand}, %d2, "
    body += f"{op}%p2{flags};"
    if times > 1:
        body += "setp.eq.u32 %p3, %r1, %r1;" + f"{op}%p3{flags};" * (times - 1)
    body += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    body += "ld.param.u64 %d7, [out]; mul.wide.u32 %d6, %r0, 4; add.s64 %d7, %d7, %d6;"
    body += "".join(f"st.global.b32 [%d7+{512 * i}], %acc{i};" for i in range(count))
    result, memory = launch(edit(body), buffers, threads=128, mode=mode, dynamic=IMAGE)
    raw = memory.read("out", np.uint32, (count, 128))
    product = times * scale[0] * scale[1] * (a.astype(np.int64) @ b.T.astype(np.int64)) + (start or 0)
    return result, _matrix(raw, n, accumulator), product.astype(np.float64)


def _fragments(words: np.ndarray) -> np.ndarray:
    """A (64, k) matrix as 4 registers of 128 threads, lane by lane."""
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(64, 32)
    out = np.zeros((128, 4, 4), np.uint8)
    for thread, i in itertools.product(range(128), range(4)):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2)
        out[thread, i] = raw[row, thread % 4 * 4 + 16 * (i // 2) :][:4]
    return out


def _matrix(raw: np.ndarray, n: int, accumulator: str) -> np.ndarray:
    """Registers (count, 128) of D as (64, n), by the manual's figure: row and column of each register."""
    out = np.zeros((64, n))
    for i, thread in itertools.product(range(raw.shape[0]), range(128)):
        row = thread // 32 * 16 + thread % 32 // 4
        word = raw[i, thread : thread + 1]
        if accumulator == "f16":
            row, column = row + 8 * (i % 2), i // 2 * 8 + thread % 4 * 2
            out[row, column : column + 2] = word.view(np.float16)
        else:
            row, column = row + 8 * (i // 2 % 2), i // 4 * 8 + thread % 4 * 2 + i % 2
            out[row, column] = word.view(np.float32 if accumulator == "f32" else np.int32)[0]
    return out


def check(**options) -> None:
    result, got, want = multiply(**options)
    assert result.ok, findings(result)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8"])
def test_every_input_type_is_exact_on_integers(kind, mode):
    """One product of each type, with accumulation."""
    check(n=32, kind=kind, accumulator="s32" if kind in ("s8", "u8") else "f32", start=5, mode=mode)


@pytest.mark.parametrize("n", [8, 24, 64, 128, 256])
def test_every_width(n):
    """N from 8 to 256, without accumulation: what D held before is not read."""
    check(n=n, kind="bf16")


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (True, False), (False, True), (True, True)])
def test_every_canonical_layout(span, a_mn, b_mn):
    """Both majors of both operands in all four swizzles."""
    check(n=64, kind="f16", span_a=span, span_b=span, a_mn=a_mn, b_mn=b_mn, start=1)


@pytest.mark.parametrize("kind", ["bf16", "tf32", "e4m3"])
def test_a_from_registers(kind):
    """The fragment of A: four registers a lane, rows 16w to 16w+15 in warp w."""
    check(n=32, kind=kind, from_registers=True, start=2)


def test_mixed_eight_bit_types_scales_and_half_accumulators():
    """e4m3 with e5m2, s8 with u8, negated operands, f16 accumulators."""
    check(n=16, kind="e4m3", kind_b="e5m2")
    check(n=16, kind="s8", kind_b="u8", accumulator="s32")
    check(n=16, kind="bf16", scale=(-1, 1), start=3)
    check(n=16, kind="bf16", scale=(-1, -1))
    check(n=16, kind="f16", accumulator="f16", start=4)


@pytest.mark.parametrize("mode", MODES)
def test_products_of_one_group_accumulate_in_order(mode):
    """Three products on one accumulator; the first one replaces it."""
    check(n=64, kind="bf16", times=3, mode=mode)
    check(n=64, kind="f16", accumulator="f16", times=3, start=1, mode=mode)


def test_counters_name_the_operations():
    """wgmma operations by shape and type."""
    result, *_ = multiply(n=64, kind="bf16", times=3)
    assert result.counters.mma == {"wgmma.m64n64k16.bf16": 3}


def test_a_missing_wait_gives_old_values_and_a_finding():
    """Without wait_group the accumulator is read in flight: stale in every mode, and found in every mode."""
    for mode in MODES:
        result, *_ = multiply(n=16, kind="bf16", start=0, mode=mode,
                                     edit=lambda s: s.replace("wgmma.wait_group.sync.aligned 0;", ""))  # fmt: skip
        assert "wgmma-in-flight" in kinds(result)
        assert "%acc0" in result.findings[0].text


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("wgmma.fence.sync.aligned;", "", "missing-wgmma-fence"),
        ("fence.proxy.async.shared::cta;", "", "missing-proxy-fence"),
        ("bar.sync 0;", "", "race-read-after-write"),
    ],
)
def test_planted_hazards_are_found(before, after, kind):
    """A dropped wgmma.fence, proxy fence or barrier is a finding of the race checker."""
    result, *_ = multiply(n=16, kind="bf16", mode="race", edit=lambda s: s.replace(before, after))
    assert kind in kinds(result), findings(result)


def test_registers_of_a_in_flight_must_not_change():
    """Writing a register of A between issue and wait is found."""
    result, *_ = multiply(
        n=16, kind="bf16", from_registers=True,
        edit=lambda s: s.replace("wgmma.wait_group", "add.u32 %a0, %r0, 1; wgmma.wait_group"),
    )  # fmt: skip
    assert "wgmma-in-flight" in kinds(result)


def test_bad_descriptors_are_findings():
    """A descriptor that leaves shared memory, one with a base offset, one that differs within a warpgroup."""
    for edit in (
        lambda s: s.replace("add.s32 %r10, %r1, 16384;", "add.s32 %r10, %r1, 49024;"),
        lambda s: s.replace("wgmma.fence", f"or.b64 %d2, %d2, {1 << 49}; wgmma.fence"),
        lambda s: s.replace("wgmma.fence", "cvt.u64.u32 %d3, %r0; add.u64 %d2, %d2, %d3; wgmma.fence"),
    ):
        result, *_ = multiply(n=16, kind="bf16", edit=edit)
        assert kinds(result) == {"bad-descriptor"}, findings(result)


def test_a_fence_must_lie_between_writes_of_registers_and_the_product():
    """Written accumulators need another wgmma.fence, reads do not; plain copies are renames."""
    second = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
    for touch, found in (
        ("add.f32 %acc0, %acc0, %acc1;", True),
        ("add.f32 %r30, %acc0, %acc1;", False),
        ("mov.b32 %acc0, %r0;", False),
        ("add.f32 %acc0, %acc0, %acc1; wgmma.fence.sync.aligned;", False),
    ):

        def edit(text: str, touch: str = touch) -> str:
            wait = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
            head, tail = text.split(wait)
            again = head[head.index(second) :]
            return head + wait + touch + again + wait + tail

        result, *_ = multiply(n=16, kind="bf16", mode="race", edit=edit)
        assert kinds(result) == ({"missing-wgmma-fence"} if found else set()), (touch, findings(result))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rest", ["", "wgmma.wait_group.sync.aligned 0; wgmma.fence.sync.aligned;"])
def test_accumulators_in_flight_belong_to_products_of_one_shape(rest, mode):
    """A product of N = 8 on the first registers of one of N = 16: the wider one must have been waited for."""

    def edit(text: str) -> str:
        commit = "wgmma.commit_group.sync.aligned;"
        head, tail = text.split(commit)
        wide = head[head.index("wgmma.mma_async") :]
        narrow = wide.replace("n16", "n8").replace(
            wide[wide.index("{") : wide.index("}")], "{%acc0, %acc1, %acc2, %acc3"
        )
        return head + commit + rest + narrow + commit + tail

    result, got, want = multiply(n=16, kind="bf16", mode=mode, edit=edit)
    assert kinds(result) == (set() if rest else {"wgmma-in-flight"}), findings(result)
    assert np.array_equal(got, want)
