"""TMA: tiles of every rank and swizzle, bounds, multicast, reductions and plain bulk copies, against NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hopper_lab import findings, launch, tensor_map
from ptx_lab import kinds

from kernel_factory.emulator.tensor_map import TensorMap, TensorMapError

MODES = ("lockstep", "warp-serial", "race")
INIT = "@%p0 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; fence.proxy.async; bar.sync 0;"
WAIT = "LOOP: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; @!%p1 bra LOOP;"
# Copy the 4096 bytes of the tile from shared memory to the buffer out, 16 bytes a lane and step.
DUMP = (
    "ld.param.u64 %d9, [out]; mul.wide.u32 %d8, %r0, 16; add.s64 %d9, %d9, %d8; shl.b32 %r9, %r0, 4;"
    "add.s32 %r9, %r9, %r1;"
    + "".join(
        f"ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r9+{1024 + 512 * i}];"
        f"st.global.v4.b32 [%d9+{512 * i}], {{%r20, %r21, %r22, %r23}};"
        for i in range(8)
    )
)


def _load(rank: int, nbytes: int, coords: str) -> str:
    return (
        f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], {nbytes}; mov.u64 %d0, map_x; cvta.param.u64 %d2, %d0;"
        f"@%p0 cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        f"[%r1+1024], [%d2, {{{coords}}}], [%r1], %d1;"
    )


def _box(array: np.ndarray, start: tuple[int, ...], box: tuple[int, ...], fill: int = 0) -> np.ndarray:
    """The box at ``start`` (fastest dimension first), filled outside of the array; by plain loops."""
    out = np.full(box[::-1], fill, array.dtype)
    for at in itertools.product(*(range(b) for b in box[::-1])):
        where = tuple(a + s for a, s in zip(at, start[::-1], strict=True))
        if all(0 <= w < n for w, n in zip(where, array.shape, strict=True)):
            out[at] = array[where]
    return out


def _swizzle(tile: bytes, base: int, span: int) -> bytes:
    """Where hardware puts a tile: the 16-byte chunk number within ``span`` bytes XOR the 128-byte row number."""
    out = bytearray(len(tile))
    for i in range(0, len(tile), 16):
        address = base + i
        row, chunk = address // 128, address // 16
        moved = (chunk ^ (row % (span // 16))) * 16 if span else address
        out[moved - base : moved - base + 16] = tile[i : i + 16]
    return bytes(out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "box", "start"),
    [
        ((4096,), (256,), (128,)),
        ((40, 64), (32, 16), (16, 8)),
        ((6, 20, 32), (32, 8, 2), (0, 4, 3)),
        ((3, 4, 10, 32), (16, 4, 2, 2), (16, 5, 1, 1)),
        ((2, 3, 4, 6, 16), (16, 2, 2, 3, 1), (0, 3, 1, 0, 1)),
        ((40, 64), (32, 16), (-16, 30)),
        ((7, 40), (32, 8), (24, 3)),
        ((6, 20, 32), (32, 8, 2), (16, 17, 5)),
    ],
)
def test_a_tile_load_brings_the_box_with_zeros_outside(shape, box, start, mode):
    """Loads of rank 1 to 5: the box in order, zeros where it leaves the tensor on any side."""
    data = np.random.default_rng(1).integers(0, 60000, shape).astype(np.uint16)
    tmap = tensor_map(data, box)
    body = INIT + _load(len(shape), tmap.box_bytes, ", ".join(map(str, start))) + WAIT
    size = tmap.box_bytes
    dump = DUMP if size == 4096 else _dump(size)
    result, memory = launch(body + dump, {"x": data, "out": size}, {"map_x": ("x", tmap)}, mode=mode)
    assert result.ok, findings(result)
    got = memory.read("out", np.uint16, box[::-1])
    assert np.array_equal(got, _box(data, start, box))
    assert result.counters.tma["x"]["read"]["bytes"] <= size


def _dump(size: int) -> str:
    """Lane 0 copies ``size`` bytes of the tile out."""
    moves = "".join(
        f"@%p0 ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r1+{1024 + i}];"
        f"@%p0 st.global.v4.b32 [%d9+{i}], {{%r20, %r21, %r22, %r23}};"
        for i in range(0, size, 16)
    )
    return "ld.param.u64 %d9, [out];" + moves


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("swizzle", "span"), [(0, 0), (1, 32), (2, 64), (3, 128)])
def test_swizzles_permute_chunks_by_the_row_of_the_address(swizzle, span, mode):
    """The tile lies where the XOR of chunk and row puts it; storing it back restores the order."""
    width = (span or 64) // 2
    data = np.arange(4096, dtype=np.uint16).reshape(-1, width)
    tmap = tensor_map(data, (width, 4096 // 2 // width), swizzle=swizzle)
    store = (
        "fence.proxy.async.shared::cta; bar.sync 0; mov.u64 %d0, map_y; cvta.param.u64 %d2, %d0;"
        "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {0, 0}], [%r1+1024];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    )
    result, memory = launch(
        INIT + _load(2, 4096, "0, 0") + WAIT + DUMP + store,
        {"x": data, "out": 4096, "y": 8192},
        {"map_x": ("x", tmap), "map_y": ("y", tmap)},
        mode=mode,
    )
    assert result.ok, findings(result)
    linear = _box(data, (0, 0), tmap.box).tobytes()
    assert memory.read("out", np.uint8, (4096,)).tobytes() == _swizzle(linear, 1024, span)
    assert memory.read("y", np.uint8, (4096,)).tobytes() == linear
    assert (memory.read("y", np.uint8, (8192,))[4096:] == 0xFF).all()
    assert result.counters.tma == {
        "x": {"read": {"bytes": 4096, "sectors": 128}},
        "y": {"write": {"bytes": 4096, "sectors": 128}},
    }


def test_swizzles_of_wider_atoms():
    """128-byte swizzle with atoms of 32 and 64 bytes: bits 7-8 onto 5-6, and bit 7 onto 6."""
    linear = np.arange(0, 1024, 16)
    for atom, moved in ((1, linear ^ ((linear >> 2) & 0x60)), (3, linear ^ ((linear >> 1) & 0x40))):
        tmap = TensorMap(address=0, element=7, extents=(32, 8), strides=(128,), box=(32, 8), swizzle=3, atom=atom)
        tmap.check()
        assert np.array_equal(tmap.swizzled(linear), moved)


def test_tensor_maps_parse_and_print_themselves():
    """A descriptor as the DSL's host code writes it is read, and encodes to the same bytes."""
    words = [0x7F00_0000_1000, 0x2000046512, 0, 0, 0x5F000000FF, 0, 0x3F00000000000000, 0xF]
    raw = b"".join(w.to_bytes(8, "little") for w in words)
    tmap = TensorMap.decode(raw)
    assert (tmap.extents, tmap.strides, tmap.box) == ((256, 96), (512,), (64, 16))
    assert (tmap.element_bytes, tmap.swizzle, tmap.promotion) == (2, 3, 2)
    assert tmap.encode()[:64] == raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (4, 8)}, "multiple of 16"),
        ({"swizzle": 1}, "exceed"),
        ({"address": 8}, "multiple of 16"),
        ({"interleave": 1}, "interleave"),
        ({"box": (32, 257)}, "256"),
    ],
)
def test_bad_tensor_maps_are_findings(change, message):
    """What the driver's encoder refuses is a finding that names the field."""
    data = np.zeros((512, 64), np.uint16)
    tmap = tensor_map(data, (32, 16), **{k: v for k, v in change.items() if k != "box"})
    tmap = TensorMap(**{**vars(tmap), **change})
    with pytest.raises(TensorMapError, match=message):
        tmap.check()
    if max(tmap.box) > 256:
        return  # its field has 8 bits
    result, _ = launch(INIT + _load(2, 1024, "0, 0"), {"x": data}, {"map_x": ("x", tmap)})
    assert kinds(result) == {"bad-tensor-map"}
    assert message in result.findings[0].message


def test_faults_of_tensor_copies_are_findings():
    """A map of another rank, a tile that is not aligned, one past the end of shared memory, extents past a buffer."""
    data = np.zeros((64, 64), np.uint16)
    tmap = tensor_map(data, (32, 16))
    good = _load(2, 1024, "0, 0")
    big = TensorMap(**{**vars(tmap), "extents": (64, 256)})
    for body, which, kind in (
        (_load(3, 1024, "0, 0, 0"), tmap, "bad-tensor-map"),
        (good.replace("%r1+1024", "%r1+1040"), tmap, "misaligned"),
        (good.replace("%r1+1024", "%r1+7680"), tmap, "out-of-bounds"),
        (_load(2, 1024, "0, 60") + WAIT, big, "out-of-bounds"),
    ):
        result, _ = launch(INIT + body, {"x": data}, {"map_x": ("x", which)})
        assert kinds(result) == {kind}, findings(result)


@pytest.mark.parametrize("mode", MODES)
def test_nan_fill_is_a_nan(mode):
    """With the NaN fill, what lies outside of the tensor is NaN."""
    data = np.ones((8, 16), np.float32)
    tmap = tensor_map(data, (16, 16), nan_fill=True)
    result, memory = launch(
        INIT + _load(2, 1024, "0, 4") + WAIT + _dump(1024), {"x": data, "out": 1024}, {"map_x": ("x", tmap)}, mode=mode
    )
    assert result.ok, findings(result)
    got = memory.read("out", np.float32, (16, 16))
    assert (got[:4] == 1).all() and np.isnan(got[4:]).all()


@pytest.mark.parametrize(
    ("op", "dtype", "formula"),
    [
        ("add", np.float32, lambda a, b: a + b),
        ("add", np.int32, lambda a, b: a + b),
        ("min", np.int32, np.minimum),
        ("max", np.uint32, np.maximum),
        ("and", np.uint32, np.bitwise_and),
        ("or", np.uint32, np.bitwise_or),
        ("xor", np.uint32, np.bitwise_xor),
        ("add", "bf16", None),
    ],
)
def test_tensor_reductions_combine_elements(op, dtype, formula):
    """cp.reduce.async.bulk.tensor combines the tile with what is in global memory."""
    rng = np.random.default_rng(3)
    bf16 = dtype == "bf16"
    if bf16:
        values = rng.integers(-50, 50, (2, 16, 32)).astype(np.float32)
        old, new = (values.view(np.uint32) >> 16).astype(np.uint16)
        want = ((values[0] + values[1]).view(np.uint32) >> 16).astype(np.uint16)
    else:
        old, new = rng.integers(0 if dtype == np.uint32 else -99, 99, (2, 16, 16)).astype(dtype)
        want = formula(old, new)
    tmap = tensor_map(old, old.shape[::-1], bf16=bf16)
    body = (
        INIT + _load(2, 1024, "0, 0") + WAIT + "mov.u64 %d0, map_y; cvta.param.u64 %d2, %d0;"
        f"@%p0 cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group [%d2, {{0, 0}}], [%r1+1024];"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
    result, memory = launch(body, {"x": new, "y": old}, {"map_x": ("x", tmap), "map_y": ("y", tmap)})
    assert result.ok, findings(result)
    assert np.array_equal(memory.read("y", old.dtype, old.shape), want)


@pytest.mark.parametrize("mode", MODES)
def test_plain_bulk_copies_move_bytes_both_ways(mode):
    """cp.async.bulk to shared memory on an mbarrier, and back in a bulk group; a reduction adds."""
    data = np.arange(256, dtype=np.float32)
    body = (
        INIT
        + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 1024; ld.param.u64 %d3, [x]; ld.param.u64 %d4, [y];"
        "ld.param.u64 %d5, [z];"
        "@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+1024], [%d3], 1024, [%r1];"
        + WAIT
        + "@%p0 cp.async.bulk.global.shared::cta.bulk_group [%d4], [%r1+1024], 512;"
        "@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d5], [%r1+1024], 1024;"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
    result, memory = launch(body, {"x": data, "y": 1024, "z": data}, mode=mode)
    assert result.ok, findings(result)
    assert np.array_equal(memory.read("y", np.float32, (128,)), data[:128])
    assert np.array_equal(memory.read("z", np.float32, (256,)), 2 * data)


@pytest.mark.parametrize("mode", MODES)
def test_a_tensor_map_edited_on_the_device_is_used(mode):
    """tensormap.replace of address, extents, strides, box, type and swizzle; then cp_fenceproxy and a load."""
    data = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    other = np.arange(4096, dtype=np.float32).reshape(32, 128)
    old = tensor_map(data, (64, 8))
    want = tensor_map(other, (32, 8), swizzle=3, nan_fill=True)
    edits = "".join(
        f"@%p0 tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [%r1+2048], {value};"
        for field, kind, value in (
            ("global_address", "b64", "%d5"), ("rank", "b32", 1), ("elemtype", "b32", 7), ("swizzle_mode", "b32", 3),
            ("global_dim", "b32", "0, 128"), ("global_dim", "b32", "1, 32"), ("global_stride", "b64", "0, 512"),
            ("box_dim", "b32", "0, 32"), ("box_dim", "b32", "1, 8"), ("fill_mode", "b32", 1),
            ("swizzle_atomicity", "b32", 0), ("interleave_layout", "b32", 0),
        )
    )  # fmt: skip
    body = (
        INIT + "ld.param.u64 %d5, [y]; ld.param.u64 %d6, [edited]; shl.b32 %r9, %r0, 2; add.s32 %r9, %r9, %r1;"
        "mov.u64 %d0, map_x; cvta.param.u64 %d2, %d0; mul.wide.u32 %d7, %r0, 4; add.s64 %d2, %d2, %d7;"
        "ld.b32 %r10, [%d2]; st.shared.b32 [%r9+2048], %r10; bar.warp.sync -1;" + edits + "bar.warp.sync -1;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d6], [%r1+2048], 128;"
        "fence.proxy.tensormap::generic.acquire.gpu [%d6], 128;"
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], 1024;"
        "@%p0 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[%r1+1024], [%d6, {64, 28}], [%r1];" + WAIT + _dump(1024)
    )
    result, memory = launch(body, {"x": data, "y": other, "edited": 128, "out": 1024}, {"map_x": ("x", old)}, mode=mode)
    assert result.ok, findings(result)
    whole = TensorMap(**{**vars(want), "address": memory.address("y")})
    assert memory.read("edited", np.uint8, (64,)).tobytes() == whole.encode()[:64]
    tile = _box(other, (64, 28), (32, 8))
    tile[4:] = np.nan
    got = memory.read("out", np.uint8, (1024,)).tobytes()
    assert np.array_equal(
        np.frombuffer(got, np.float32), np.frombuffer(_swizzle(tile.tobytes(), 1024, 128), np.float32), equal_nan=True
    )
