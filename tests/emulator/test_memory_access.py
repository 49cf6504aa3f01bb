"""Loads and stores: widths, spaces, bounds, alignment, poison and red zones."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from ptx_lab import HEAD, THREADS, kernel_text, kinds, launch

from kernel_factory.emulator import HostMemory, LaunchConfig, LaunchError, Memory, load, run

AT = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; ld.param.u64 %d1, [dst]; mul.wide.u32 %d2, %r0, {size};"
AT += "add.s64 %d0, %d0, %d2; add.s64 %d1, %d1, %d2;"
SMEM = ".extern .shared .align 1024 .b8 smem[];"
SHARED_AT = "mov.u32 %r9, smem; mad.lo.s32 %r9, %r0, {size}, %r9;"
WIDTHS = {
    1: ("b8", "%h1"), 2: ("b16", "%h1"), 4: ("b32", "%r1"), 8: ("v2.b32", "{%r1, %r2}"),
    16: ("v4.b32", "{%r1, %r2, %r3, %r4}"), 32: ("v4.b64", "{%d4, %d5, %d6, %d7}"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial", "race"])
@pytest.mark.parametrize("size", WIDTHS)
def test_global_copies_keep_every_byte(size, mode):
    """Loads and stores of 1 to 32 bytes a thread move the bytes as they are, caching hints or not."""
    kind, regs = WIDTHS[size]
    data = np.random.default_rng(size).integers(0, 256, THREADS * size).astype(np.uint8)
    hint = "nc.L1::no_allocate.L2::128B." if size <= 16 else ""
    body = AT.format(size=size) + f"ld.global.{hint}{kind} {regs}, [%d0]; st.global.{kind} [%d1], {regs};"
    result, memory = launch(body, {"src": data, "dst": data.size}, mode=mode, readonly=("src",))
    assert result.ok, result.findings
    assert np.array_equal(memory.read("dst", np.uint8, (data.size,)), data)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_shared_copies_keep_every_byte(size):
    """The same through shared memory, with a guard that leaves odd threads' registers alone."""
    kind, regs = WIDTHS[size]
    data = np.random.default_rng(size).integers(0, 256, THREADS * size).astype(np.uint8)
    body = (AT + SHARED_AT).format(size=size) + (
        f"ld.global.{kind} {regs}, [%d0]; st.shared.{kind} [%r9], {regs}; bar.sync 0;"
        "and.b32 %r8, %r0, 1; setp.eq.b32 %p1, %r8, 0;"
        f"@%p1 ld.shared.{kind} {regs}, [%r9]; st.global.{kind} [%d1], {regs};"
    )
    for mode in ("lockstep", "race"):
        result, memory = launch(body, {"src": data, "dst": data.size}, shared=SMEM, dynamic=data.size, mode=mode)
        assert result.ok, result.findings
        assert np.array_equal(memory.read("dst", np.uint8, (data.size,)), data)


def test_signed_loads_extend_into_wider_registers():
    """ld.s8 and ld.s16 extend the sign into a 32-bit register; unsigned ones extend with zeros."""
    data = np.arange(-32, 32, dtype=np.int8)
    body = (
        "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; cvt.u64.u32 %d2, %r0; add.s64 %d0, %d0, %d2;"
        "ld.global.s8 %r1, [%d0]; ld.global.u8 %r2, [%d0]; ld.param.u64 %d1, [dst]; mul.wide.u32 %d2, %r0, 8;"
        "add.s64 %d1, %d1, %d2; st.global.v2.b32 [%d1], {%r1, %r2};"
    )
    result, memory = launch(body, {"src": data, "dst": THREADS * 8})
    got = memory.read("dst", np.int32, (THREADS, 2))
    assert result.ok
    assert got[:, 0].tolist() == data.tolist() and got[:, 1].tolist() == data.view(np.uint8).tolist()


def test_local_arrays_are_private_and_reachable_by_generic_addresses():
    """Each thread has its own local bytes; cvta makes generic addresses of local, shared and global ones."""
    body = (
        AT.format(size=4)
        + """
    .local .align 16 .b8 depot[32];
    .shared .align 16 .b8 tile[512];
    mov.u64 %d4, depot; cvta.local.u64 %d5, %d4;
    ld.global.b32 %r1, [%d0];
    st.local.b32 [%d4+4], %r1; ld.b32 %r2, [%d5+4]; add.s32 %r2, %r2, 1; st.b32 [%d5+8], %r2; ld.local.b32 %r3, [%d4+8];
    mov.u64 %d6, tile; cvta.shared.u64 %d7, %d6; mul.wide.u32 %d2, %r0, 4; add.s64 %d7, %d7, %d2;
    st.b32 [%d7], %r3; ld.b32 %r4, [%d7]; cvta.to.shared.u64 %d8, %d7; cvt.u32.u64 %r5, %d8; ld.shared.b32 %r5, [%r5];
    add.s32 %r4, %r4, %r5; cvta.to.global.u64 %d1, %d1; st.b32 [%d1], %r4;
    """
    )
    data = np.arange(THREADS, dtype=np.uint32) * 3
    for mode in ("lockstep", "race"):
        result, memory = launch(body, {"src": data, "dst": THREADS * 4}, mode=mode)
        assert result.ok, result.findings
        assert memory.read("dst", np.uint32, (THREADS,)).tolist() == (2 * (data + 1)).tolist()


def test_an_access_outside_names_the_buffer_the_offset_and_the_thread():
    """One element past the end is out-of-bounds with CTA, warp, lane, line, the nearest buffer and the cure."""
    body = AT.format(size=4) + "ld.global.b32 %r1, [%d0+4]; st.global.b32 [%d1], %r1;"
    result, _ = launch(body, {"src": np.zeros(2 * THREADS, np.uint32)[:THREADS], "dst": THREADS * 4})
    (finding,) = result.findings
    assert (finding.kind, finding.warp, finding.lane, finding.kernel) == ("out-of-bounds", 1, 31, "k")
    assert "offset 256 of buffer 'src' (256 bytes)" in finding.message
    assert finding.text.startswith("ld.global.b32") and finding.line > 0 and finding.cure


def test_a_guarded_off_access_may_point_anywhere():
    """Lanes whose guard is off are not checked."""
    body = AT.format(size=4) + (
        "setp.lt.u32 %p1, %r0, 63; mov.b32 %r1, 7; @%p1 ld.global.b32 %r1, [%d0+4]; st.global.b32 [%d1], %r1;"
    )
    result, memory = launch(body, {"src": np.arange(THREADS, dtype=np.uint32), "dst": THREADS * 4})
    assert result.ok
    assert memory.read("dst", np.uint32, (THREADS,)).tolist() == [*range(1, THREADS), 7]


@pytest.mark.parametrize("space", ["global", "shared"])
def test_misaligned_vectors_are_findings(space):
    """A 16-byte access at a multiple of 8 stops the run, though each word lies inside."""
    body = (AT + SHARED_AT).format(size=4) + (
        "ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];"
        if space == "global"
        else "st.shared.v4.b32 [%r9+8], {%r0, %r0, %r0, %r0};"
    )
    result, _ = launch(body, {"src": np.zeros(4 * THREADS, np.uint32), "dst": 4}, shared=SMEM, dynamic=2048)
    assert kinds(result) == {"misaligned"}


def test_shared_bounds_hold_for_each_cta():
    """A write past the CTA's shared memory is a finding, not a write into the next CTA's."""
    body = "mov.u32 %r0, %tid.x; mov.u32 %r9, smem; mad.lo.s32 %r9, %r0, 4, %r9; st.shared.b32 [%r9+4], %r0;"
    result, _ = launch(body, {}, shared=SMEM, dynamic=THREADS * 4, grid=4)
    (finding,) = result.findings
    assert finding.kind == "out-of-bounds" and "offset 256 of 256 bytes of shared memory" in finding.message


def test_writes_to_read_only_buffers_are_findings():
    """An input registered as not writable stays as it was."""
    body = AT.format(size=4) + "st.global.b32 [%d0], %r0;"
    result, memory = launch(body, {"src": np.full(THREADS, 5, np.uint32), "dst": 4}, readonly=("src",))
    assert kinds(result) == {"write-to-read-only"}
    assert (memory.read("src", np.uint32, (THREADS,)) == 5).all()


def test_accesses_of_one_instruction_may_mix_buffers():
    """Threads that pick one of two buffers read and write the right one."""
    body = AT.format(size=4) + (
        "and.b32 %r3, %r0, 1; setp.eq.b32 %p1, %r3, 0; selp.b64 %d3, %d0, %d1, %p1;"
        "ld.global.b32 %r1, [%d3]; add.s32 %r1, %r1, 1; st.global.b32 [%d3], %r1;"
    )
    result, memory = launch(body, {"src": np.arange(THREADS, dtype=np.uint32), "dst": np.zeros(THREADS, np.uint32)})
    assert result.ok
    even = np.arange(THREADS) % 2 == 0
    assert np.array_equal(memory.read("src", np.uint32, (THREADS,)), np.arange(THREADS) + even)
    assert np.array_equal(memory.read("dst", np.uint32, (THREADS,)), (~even).astype(np.uint32))


def test_poison_is_nan_and_shared_memory_starts_poisoned_at_a_seeded_base():
    """poison fills with 0xFF; fresh shared memory reads 0xFF; its base moves with the seed and stays aligned."""
    memory = Memory()
    memory.poison("out", 64)
    assert np.isnan(memory.read("out", np.float32, (16,))).all()
    body = (
        AT.format(size=4)
        + "mov.u32 %r1, smem; st.global.b32 [%d1], %r1; ld.shared.b32 %r2, [%r1]; st.global.b32 [%d0], %r2;"
    )
    bases = set()
    for seed in range(4):
        result, memory = launch(body, {"src": THREADS * 4, "dst": THREADS * 4}, shared=SMEM, dynamic=64, seed=seed)
        assert result.ok and (memory.read("src", np.uint32, (THREADS,)) == 0xFFFFFFFF).all()
        bases.add(int(memory.read("dst", np.uint32, (1,))[0]))
    assert len(bases) > 1 and all(base % 1024 == 0 and base > 0 for base in bases)


def test_a_broken_red_zone_is_reported():
    """If anything writes past a buffer unseen, the run says so."""
    memory = Memory()
    address = memory.add("a", np.zeros(4, np.uint8))
    assert address % 256 == 0
    memory["a"].whole[100] = 0
    kernel = load(kernel_text("")).kernels["k"]
    result = run(kernel, LaunchConfig(grid=(1, 1, 1), block=(THREADS, 1, 1)), memory)
    assert kinds(result) == {"red-zone"}


def test_uninitialised_shared_memory_and_registers_are_race_mode_findings():
    """Race mode reports reads of shared bytes and registers that nothing wrote."""
    result, _ = launch("mov.u32 %r9, smem; ld.shared.b32 %r2, [%r9];", {}, shared=SMEM, dynamic=64, mode="race")
    assert kinds(result) == {"uninitialised-shared"}
    body = AT.format(size=4) + (
        "setp.lt.u32 %p1, %r0, 5; @%p1 bra L; mov.b32 %r7, 1; L: st.global.b32 [%d1], %r7; ld.global.b32 %r8, [%d0];"
    )
    result, _ = launch(body, {"src": np.zeros(THREADS, np.uint32), "dst": THREADS * 4}, mode="race")
    (finding,) = result.findings
    assert (finding.kind, finding.lane) == ("uninitialised-register", 0) and "%r7" in finding.message


def test_host_memory_reads_and_writes_this_process():
    """HostMemory takes plain process addresses."""
    data, out = (ctypes.c_uint32 * THREADS)(*range(THREADS)), (ctypes.c_uint32 * THREADS)()
    body = AT.format(size=4) + "ld.global.b32 %r1, [%d0]; add.s32 %r1, %r1, 100; st.global.b32 [%d1], %r1;"
    params = tuple(ctypes.addressof(x).to_bytes(8, "little") for x in (data, out))
    kernel = load(kernel_text(body, ("src", "dst"))).kernels["k"]
    result = run(kernel, LaunchConfig(grid=(1, 1, 1), block=(THREADS, 1, 1), params=params), HostMemory())
    assert result.ok and list(out) == [x + 100 for x in range(THREADS)]


def test_launches_that_no_device_takes_are_refused():
    """Wrong block, parameter sizes, shared memory, mode or CTA numbers raise LaunchError with both values."""
    kernel = load(kernel_text("", ("a",))).kernels["k"]
    good = {"grid": (2, 1, 1), "block": (THREADS, 1, 1), "params": (bytes(8),)}
    run(kernel, LaunchConfig(**good), Memory())
    for change, text in (
        ({"block": (32, 1, 1)}, "requires blocks"), ({"params": ()}, "takes parameters"),
        ({"params": (bytes(4),)}, "takes parameters"),
        ({"dynamic_shared": 300000}, "the limit is 232448"), ({"grid": (0, 1, 1)}, "positive"),
    ):  # fmt: skip
        with pytest.raises(LaunchError, match=text):
            run(kernel, LaunchConfig(**{**good, **change}), Memory())
    with pytest.raises(LaunchError, match="mode"):
        run(kernel, LaunchConfig(**good), Memory(), mode="fast")
    with pytest.raises(LaunchError, match="CTA numbers"):
        run(kernel, LaunchConfig(**good), Memory(), ctas=[2])


def test_struct_parameters_and_sampled_ctas():
    """By-value structs keep their layout; ``ctas`` runs only the named CTAs."""
    text = HEAD + (
        ".visible .entry k(.param .align 8 .b8 s[24], .param .u32 x)\n.reqntid 32, 1, 1\n{\n"
        ".reg .b32 %r<9>; .reg .b64 %d<9>;\n"
        "ld.param.b64 %d0, [s]; ld.param.v2.b32 {%r1, %r2}, [s+8]; ld.param.b64 %d3, [s+16]; ld.param.u32 %r3, [x];"
        "cvt.u32.u64 %r4, %d3; add.s32 %r1, %r1, %r2; add.s32 %r1, %r1, %r3; add.s32 %r1, %r1, %r4;"
        "mov.u32 %r5, %ctaid.y;"
        "mul.wide.u32 %d1, %r5, 4; add.s64 %d0, %d0, %d1; st.global.b32 [%d0], %r1; ret;\n}\n"
    )
    kernel = load(text).kernels["k"]
    assert [(p.size, p.align, p.offset) for p in kernel.params] == [(24, 8, 0), (4, 4, 24)]
    memory = Memory()
    address = memory.add("out", np.zeros(4, np.uint32))
    struct = (
        address.to_bytes(8, "little")
        + (1).to_bytes(4, "little")
        + (10).to_bytes(4, "little")
        + (100).to_bytes(8, "little")
    )
    config = LaunchConfig(grid=(1, 4, 1), block=(32, 1, 1), params=(struct, (1000).to_bytes(4, "little")))
    result = run(kernel, config, memory, ctas=[1, 3])
    assert result.ok and result.ctas == 2
    assert memory.read("out", np.uint32, (4,)).tolist() == [0, 1111, 0, 1111]
