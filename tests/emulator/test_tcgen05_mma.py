"""tcgen05.mma against formulas written here: descriptors, canonical layouts, types, majors, data paths, A in TMEM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_lab import kinds
from tcgen05_lab import finish, from_global, go, kernel, multiply, registers, start, to_global

from kernel_factory.emulator.tensor_descriptors import DescriptorError, instruction, matrix

BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "u8": 1, "s8": 1}
KIND = {"bf16": "f16", "f16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "u8": "i8", "s8": "i8"}
CODE = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
SWIZZLE = {16: 0, 32: 6, 64: 4, 128: 2, "base32": 1}


def encode(x: np.ndarray, kind: str) -> np.ndarray:
    """Small integers as bytes of a type, by the definition of the format."""
    if kind in ("u8", "s8"):
        return x.astype(np.int8).view(np.uint8)
    if kind == "tf32":
        return x.astype(np.float32).view(np.uint8)
    if kind == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint8)
    mantissa, bias = (3, 7) if kind == "e4m3" else (2, 15)
    fraction, exponent = np.frexp(np.abs(x).astype(np.float64))
    code = ((exponent - 1 + bias) << mantissa) + ((fraction * 2 - 1) * (1 << mantissa)).astype(np.int64)
    return (np.where(x == 0, 0, code) | np.where(x < 0, 0x80, 0)).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A canonical layout: K- or MN-major, bytes of an atom's row (16: no swizzle), and the two offsets in bytes."""

    mn_major: bool
    atom: int | str
    leading: int
    stride: int

    def address(self, row: int, k: int, size: int) -> int:
        """Byte offset of an element, by the table of canonical layouts, element by element."""
        width = 128 if self.atom == "base32" else self.atom
        along, across = (row, k) if self.mn_major else (k, row)
        unit, inside = divmod(along * size, 16)
        if width == 16:
            first = across % 8 * 16 + inside
            if self.mn_major:
                return first + unit * self.stride + across // 8 * self.leading
            return first + unit * self.leading + across // 8 * self.stride
        deep = 4 if self.atom == "base32" else 8
        plain = across % deep * width + across // deep * self.stride + unit % (width // 16) * 16 + inside
        plain += unit // (width // 16) * self.leading if self.mn_major else 0
        if not self.mn_major:
            assert unit < width // 16
        bits = [int(b) for b in reversed(f"{plain:020b}")]  # bit 0 first
        if self.atom == "base32":
            bits[5], bits[6] = bits[5] ^ bits[7], bits[6] ^ bits[8]
        else:
            for i in range({32: 1, 64: 2, 128: 3}[width]):
                bits[4 + i] ^= bits[7 + i]
        return sum(b << i for i, b in enumerate(bits))

    def descriptor(self, offset: int) -> int:
        return (offset >> 4) | (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | 1 << 46 | SWIZZLE[self.atom] << 61


def layout(mn_major: bool, atom: int | str, rows: int, size: int, gap: int) -> Layout:
    """Offsets that keep the parts of a matrix apart, ``gap`` atoms between them."""
    depth = 32 // size
    if atom == 16:
        if mn_major:
            stride = 128 * (1 + gap)
            return Layout(mn_major=True, atom=16, stride=stride, leading=stride * (rows * size // 16))
        stride = 128 * (1 + gap)
        return Layout(mn_major=False, atom=16, stride=stride, leading=stride * (rows // 8))
    block = 512 if atom == "base32" else 8 * atom
    if not mn_major:
        return Layout(mn_major=False, atom=atom, leading=0, stride=block * (1 + gap))
    stride = max(block, 1024) * (1 + gap)
    groups = -(-depth // (4 if atom == "base32" else 8))
    return Layout(mn_major=True, atom=atom, stride=stride, leading=stride * groups)


def place(values: np.ndarray, kind: str, how: Layout) -> np.ndarray:
    """The bytes of a matrix (rows, k) in a layout."""
    size = BYTES[kind]
    raw = encode(values.reshape(-1), kind).reshape(*values.shape, size)
    where = np.array([[how.address(r, k, size) for k in range(values.shape[1])] for r in range(values.shape[0])])
    out = np.full((int(where.max()) + size + 1023) // 1024 * 1024, 0xEE, np.uint8)
    out[where[..., None] + np.arange(size)] = raw
    return out


def word(kind: str, m: int, n: int, *, d: int = 1, mn: tuple = (0, 0), negate: tuple = (0, 0), b: str = "") -> int:
    """An instruction descriptor, by its table."""
    return (
        d << 4 | CODE[kind] << 7 | CODE[b or kind] << 10 | negate[0] << 13 | negate[1] << 14
        | mn[0] << 15 | mn[1] << 16 | n >> 3 << 17 | m >> 4 << 24
    )  # fmt: skip


def lanes_of(m: int) -> np.ndarray:
    """The TMEM lane of each row of one CTA's accumulator."""
    rows = np.arange(m)
    return rows if m == 128 else 32 * (rows // 16) + rows % 16


def multiplied(kind, m, n, a, b, la, lb, *, before=None, mode="lockstep", seed=0, **options):
    """Run one product; TMEM (128, n) as words afterwards, and the result."""
    image_a, image_b = place(a, kind, la), place(b, kind, lb)
    image = np.concatenate([image_a, image_b])
    columns = max(32, 1 << (n - 1).bit_length())
    negate, d = options.pop("negate", (0, 0)), options.pop("d", 2 if kind in ("u8", "s8") else 1)
    text = word(kind, m, n, d=d, mn=(la.mn_major, lb.mn_major), negate=negate)
    pair = (la.descriptor(0), lb.descriptor(image_a.size))
    steps = start(columns, image.size)
    fill = [("fill", from_global("before", n)), ("put", _rows("st", n)), ("putw", "tcgen05.wait::st.sync.aligned;")]
    fill += [("beforep", "tcgen05.fence::before_thread_sync;"), ("barrierp", "bar.sync 0;"),
             ("afterp", "tcgen05.fence::after_thread_sync;")]  # fmt: skip
    steps += (fill if before is not None else []) + multiply(KIND[kind], [pair], text, **options)
    steps += [("ld", _rows("ld", n)), ("ldw", "tcgen05.wait::ld.sync.aligned;"), ("out", to_global("after", n))]
    buffers = {"image": image, "after": 128 * n * 4}
    if before is not None:
        buffers["before"] = before.view(np.uint32)
    source = kernel(steps + finish(columns), tuple(buffers))
    result, memory = go(source, buffers, mode=mode, seed=seed, dynamic=image.size + 64)
    return memory.read("after", np.uint32, (128, n)), result


def _rows(which: str, n: int) -> str:
    """Loads or stores of n columns, eight at a time."""
    out = ""
    for c in range(0, n, 8):
        vector = registers(8, c)
        operands = f"{vector}, [%r7+{c}]" if which == "ld" else f"[%r7+{c}], {vector}"
        out += f"tcgen05.{which}.sync.aligned.32x32b.x8.b32 {operands};"
    return out


def numbers(seed: int, shape: tuple[int, int], kind: str) -> np.ndarray:
    low = 0 if kind == "u8" else -4
    return np.random.default_rng(seed).integers(low, 5, shape)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(sorted(BYTES)),
    m=st.sampled_from([64, 128]),
    n=st.sampled_from([16, 32, 48, 128]),
    majors=st.tuples(st.booleans(), st.booleans()),
    atoms=st.tuples(st.sampled_from([16, 32, 64, 128]), st.sampled_from([16, 32, 64, 128])),
    gaps=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    seed=st.integers(0, 1000),
)
def test_every_layout_type_and_shape_multiplies_exactly(kind, m, n, majors, atoms, gaps, seed):
    """Both operands in any canonical layout and major, every type: the product is exact, at its lanes and no others."""
    size = BYTES[kind]
    la = layout(majors[0], atoms[0], m, size, gaps[0])
    lb = layout(majors[1], atoms[1], n, size, gaps[1])
    a, b = numbers(seed, (m, 32 // size), kind), numbers(seed + 1, (n, 32 // size), kind)
    got, result = multiplied(kind, m, n, a, b, la, lb)
    assert result.ok, [str(f) for f in result.findings]
    view = got.view(np.int32 if KIND[kind] == "i8" else np.float32)
    assert np.array_equal(view[lanes_of(m)], a @ b.T)
    others = np.setdiff1d(np.arange(128), lanes_of(m))
    assert (got[others] == 0xFFFFFFFF).all()
    assert result.counters.mma == {f"tcgen05.m{m}n{n}k{32 // size}.{kind}": 1}


def test_the_swizzle_of_128_bytes_with_a_base_of_32_bytes():
    """TF32 with MN-major operands, in the layout made for it."""
    how = [layout(True, "base32", rows, 4, 0) for rows in (128, 64)]
    a, b = numbers(5, (128, 8), "tf32"), numbers(6, (64, 8), "tf32")
    got, result = multiplied("tf32", 128, 64, a, b, *how)
    assert result.ok and np.array_equal(got.view(np.float32), a @ b.T)


@settings(max_examples=12, deadline=None)
@given(
    use=st.booleans(),
    scale=st.sampled_from([None, 0, 1, 3]),
    negate=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    masks=st.one_of(st.none(), st.tuples(*[st.integers(0, 2**32 - 1)] * 4)),
    d=st.sampled_from([0, 1]),
)
def test_input_d_scale_negation_masks_and_half_results(use, scale, negate, masks, d):
    """D = ±A ±B (+ D / 2^s) into f32 or f16 cells, and masked lanes keep what they hold."""
    a, b = numbers(1, (128, 16), "f16"), numbers(2, (32, 16), "f16")
    before = np.random.default_rng(3).integers(-40, 40, (128, 32)) * 8
    cells = before.astype(np.float32) if d else before.astype(np.float16).view(np.uint16).astype(np.uint32)
    how = [layout(False, 128, rows, 2, 0) for rows in (128, 32)]
    got, result = multiplied("f16", 128, 32, a, b, *how, before=np.ascontiguousarray(cells), use=use, scale=scale,
                             negate=negate, masks=masks, d=d)  # fmt: skip
    assert result.ok, [str(f) for f in result.findings]
    sign = -1 if negate[0] != negate[1] else 1
    want = sign * (a @ b.T) + (before * 0.5 ** (scale or 0) if use else 0)
    if masks:
        kept = np.array([masks[lane // 32] >> lane % 32 & 1 for lane in range(128)], bool)
        want = np.where(kept[:, None], before, want)
    view = got.view(np.float32) if d else got.astype(np.uint16).view(np.float16).astype(np.float32)
    assert np.array_equal(view, want)


@pytest.mark.parametrize(("m", "kind"), [(128, "bf16"), (64, "bf16"), (128, "tf32"), (128, "e5m2")])
def test_a_from_tensor_memory(m, kind):
    """A in TMEM: 32 bytes of a row in eight columns of the row's lane."""
    size = BYTES[kind]
    a, b = numbers(7, (m, 32 // size), kind), numbers(8, (64, 32 // size), kind)
    before = np.full((128, 72), 0xFFFFFFFF, np.uint32)
    before[lanes_of(m), 64:] = encode(a.reshape(-1), kind).reshape(m, 32).view(np.uint32)
    lb = layout(False, 64, 64, size, 0)
    image = place(b, kind, lb)
    steps = start(128, image.size)
    steps += [("fill", from_global("before", 72)), ("put", _rows("st", 72)), ("w", "tcgen05.wait::st.sync.aligned;"),
              ("b", "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;")]  # fmt: skip
    steps += multiply(KIND[kind], [(0, lb.descriptor(0))], word(kind, m, 64), a_in_tmem=64)
    steps += [("ld", _rows("ld", 64)), ("ldw", "tcgen05.wait::ld.sync.aligned;"), ("out", to_global("after", 64))]
    buffers = {"image": image, "before": before, "after": 128 * 64 * 4}
    for mode in ("lockstep", "warp-serial"):
        result, memory = go(kernel(steps + finish(128), tuple(buffers)), buffers, mode=mode, dynamic=image.size + 64)
        assert result.ok, [str(f) for f in result.findings]
        got = memory.read("after", np.float32, (128, 64))
        assert np.array_equal(got[lanes_of(m)], a @ b.T)


def paired(m: int, n: int, mode: str, drop: tuple[str, ...] = ()):
    """One product of a pair of CTAs; the result's cells, the product, and the run."""
    a, b = numbers(1, (m, 16), "bf16"), numbers(2, (n, 16), "bf16")
    la, lb = layout(False, 128, m // 2, 2, 0), layout(False, 128, n // 2, 2, 0)
    images = [
        np.concatenate(
            [place(a[h * m // 2 : (h + 1) * m // 2], "bf16", la), place(b[h * 32 : h * 32 + 32], "bf16", lb)]
        )
        for h in (0, 1)
    ]
    size = images[0].size
    pair = (la.descriptor(0), lb.descriptor(place(a[: m // 2], "bf16", la).size))
    steps = start(64, size, group=2) + multiply("f16", [pair], word("bf16", m, n), group=2)
    steps += [("ld", _rows("ld", n)), ("ldw", "tcgen05.wait::ld.sync.aligned;"), ("out", to_global("after", n))]
    if m == 128:  # only half of the columns exist
        steps = [(name, text) for name, text in steps if name not in ("ld", "out")]
        steps[-1:-1] = [("ld", _rows("ld", n // 2))]
        steps += [("out", to_global("after", n // 2))]
    buffers = {"image": np.stack(images), "after": 2 * 128 * n * 4}
    text = kernel(steps + finish(64, group=2), tuple(buffers), drop)
    result, memory = go(text, buffers, dynamic=size + 64, grid=2, cluster=2, mode=mode)
    return memory, (a @ b.T).astype(np.float32), result


@pytest.mark.parametrize("m", [128, 256])
@pytest.mark.parametrize("mode", ["lockstep", "warp-serial", "race"])
def test_a_pair_of_ctas_multiplies_together(m, mode):
    """cta_group::2: each CTA holds half of A's rows and half of B's, and gets its rows of the result."""
    n = 64
    memory, want, result = paired(m, n, mode)
    assert result.ok, [str(f) for f in result.findings]
    if m == 256:
        assert np.array_equal(memory.read("after", np.float32, (256, n)), want)
        return
    got = memory.read("after", np.float32, (2, 128, n // 2))
    for half in (0, 1):
        rows = want[half * 64 : half * 64 + 64]
        assert np.array_equal(got[half, :64], rows[:, : n // 2]) and np.array_equal(got[half, 64:], rows[:, n // 2 :])


@pytest.mark.parametrize(
    ("drop", "kind"),
    [(("cluster0",), "race-read-after-write"), (("proxy",), "missing-proxy-fence"), (("wait",), "tmem-not-committed"),
     (("after1",), "tcgen05-missing-fence")],
)  # fmt: skip
def test_hazards_between_the_ctas_of_a_pair(drop, kind):
    """The issuing CTA reads the other's shared memory and writes its TMEM: both need the order of the cluster."""
    result = paired(256, 64, "race", drop)[2]
    assert any(f.kind == kind and f.text.startswith("tcgen05") for f in result.findings), [
        str(f) for f in result.findings
    ]


@settings(max_examples=200, deadline=None)
@given(
    start_=st.integers(0, 0x3FFF), leading=st.integers(0, 0x3FFF), stride=st.integers(0, 0x3FFF),
    base=st.integers(0, 7), mode=st.sampled_from([0, 1, 2, 4, 6]),
)  # fmt: skip
def test_matrix_descriptor_fields(start_, leading, stride, base, mode):
    """Each field comes back in bytes; a wrong version or an unused swizzle code is refused."""
    bits = start_ | leading << 16 | stride << 32 | 1 << 46 | base << 49 | mode << 61
    got = matrix(bits)
    assert (got.start, got.leading, got.stride) == (16 * start_, 16 * leading, 16 * stride)
    assert (got.base_offset, got.swizzle) == (base, mode)
    for wrong in (bits ^ 1 << 46, bits & ~(7 << 61) | 3 << 61, bits | 1 << 53):
        with pytest.raises(DescriptorError):
            matrix(wrong)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(sorted(BYTES)), group=st.sampled_from([1, 2]), m=st.sampled_from([64, 128, 256]),
    n=st.integers(1, 32), negate=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    mn=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)  # fmt: skip
def test_instruction_descriptor_fields(kind, group, m, n, negate, mn):
    """Types, sizes, majors and signs come back; sizes that no instruction takes are refused."""
    integer = KIND[kind] == "i8"
    bits = word(kind, m, 8 * n, d=2 if integer else 1, mn=mn, negate=(0, 0) if integer else negate)
    fits = m in ((64, 128) if group == 1 else (128, 256))
    fits &= 8 * n % (8 if m == 64 and not integer else 16) == 0 or (integer and n == 1 and m == 64)
    if not fits:
        with pytest.raises(DescriptorError):
            instruction(bits, KIND[kind], group)
        return
    got = instruction(bits, KIND[kind], group)
    assert (got.m, got.n, got.k, got.a_type, got.b_type) == (m, 8 * n, 32 // BYTES[kind], kind, kind)
    assert (got.a_mn_major, got.b_mn_major) == (bool(mn[0]), bool(mn[1]))
    assert integer or (got.negate_a, got.negate_b) == (bool(negate[0]), bool(negate[1]))


@pytest.mark.parametrize(
    ("change", "what"),
    [(lambda d: d ^ 1 << 46, "version"), (lambda d: d | 7 << 61, "swizzle"), (lambda d: d | 0x3F00, "out-of-bounds")],
)
def test_a_bad_descriptor_is_a_finding(change, what):
    """A descriptor without its version, with no such swizzle, or one that leaves shared memory stops the run."""
    how = [layout(False, 128, rows, 2, 0) for rows in (128, 32)]
    a, b = numbers(1, (128, 16), "f16"), numbers(2, (32, 16), "f16")
    image = np.concatenate([place(a, "f16", how[0]), place(b, "f16", how[1])])
    pair = (change(how[0].descriptor(0)), how[1].descriptor(place(a, "f16", how[0]).size))
    steps = start(32, image.size) + multiply("f16", [pair], word("f16", 128, 32)) + finish(32)
    result, _ = go(kernel(steps, ("image",)), {"image": image}, dynamic=image.size + 64)
    assert kinds(result) == {"tcgen05-descriptor" if what != "out-of-bounds" else "out-of-bounds"}
    finding = result.findings[0]
    assert finding.text.startswith("tcgen05.mma") and (what in finding.message or what == "out-of-bounds")
