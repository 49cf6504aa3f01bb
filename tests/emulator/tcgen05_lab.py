"""PTX of small tcgen05 kernels for tests: one warpgroup, a shared-memory image, TMEM in, products, TMEM out."""

from __future__ import annotations

import re

import numpy as np

from kernel_factory.emulator import LaunchConfig, Memory, Result, load, run

HEAD = ".version 9.3\n.target sm_100a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
REGISTERS = ".reg .pred %p<32>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<64>; .reg .b32 %x<1024>;"
WAIT = (
    "{{ .reg .pred P; AGAIN: mbarrier.try_wait.parity.shared.b64 P, [{where}], {parity}; "
    "@P bra.uni DONE; bra.uni AGAIN; DONE: }}"
)


def wait_for(where: str, parity: int = 0) -> str:
    """Wait for a phase of an mbarrier."""
    return WAIT.format(where=where, parity=parity)


def kernel(
    steps: list[tuple[str, str]], params: tuple[str, ...], drop: tuple[str, ...] = (), threads: int = 128
) -> str:
    """A kernel ``k`` of named steps, without those in ``drop``; one statement a line."""
    body = "\n".join(text for name, text in steps if name not in drop)
    plist = ", ".join(f".param .u64 {p}" for p in params)
    lines = re.sub(r";(?!\n)", ";\n", REGISTERS + "\n" + body + "\nret;")
    return f"{HEAD}.visible .entry k({plist})\n.reqntid {threads}, 1, 1\n{{\n{lines}\n}}\n"


def start(columns: int, image: int = 0, group: int = 1) -> list[tuple[str, str]]:
    """Thread and warp numbers; the image into shared memory; TMEM; an mbarrier (behind the image) of one arrival.

    %r1 thread, %r2 warp, %r3 shared memory, %r4 mbarrier, %r5 slot of the TMEM address, %r6 TMEM, %p1 warp 0,
    %r7 TMEM with the lanes of this warp, %r15 CTA. Each CTA has its own image.
    """
    copy = (
        f"ld.param.u64 %d1, [image]; mul.wide.u32 %d2, %r15, {image}; add.s64 %d1, %d1, %d2; "
        f"shl.b32 %r8, %r1, 4; LOOP: setp.ge.u32 %p2, %r8, {image}; @%p2 bra FILLED; "
        "cvt.u64.u32 %d2, %r8; add.s64 %d2, %d1, %d2; ld.global.v4.b32 {%r9, %r10, %r11, %r12}, [%d2]; "
        "add.s32 %r13, %r3, %r8; st.shared.v4.b32 [%r13], {%r9, %r10, %r11, %r12}; add.s32 %r8, %r8, 2048; "
        "bra LOOP; FILLED:"
    )
    cta = f"cta_group::{group}"
    return [
        ("who", "mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mov.u32 %r3, smem; setp.eq.u32 %p1, %r2, 0; "
         "mov.u32 %r15, %ctaid.x;"),
        ("places", f"add.s32 %r4, %r3, {image}; add.s32 %r5, %r3, {image + 16};"),
        *([("image", copy)] if image else []),
        ("init", "setp.eq.u32 %p3, %r1, 0; @%p3 mbarrier.init.shared.b64 [%r4], 1;"),
        ("initfence", "fence.mbarrier_init.release.cluster;"),
        ("proxy", "fence.proxy.async.shared::cta;"),
        ("alloc", f"@!%p1 bra NOALLOC; mov.b32 %r14, {columns}; "
         f"tcgen05.alloc.{cta}.sync.aligned.shared::cta.b32 [%r5], %r14; NOALLOC:"),
        ("before0", "tcgen05.fence::before_thread_sync;"),
        ("barrier0", "bar.sync 0;"),
        *([("cluster0", "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")] if group == 2 else []),
        ("after0", "tcgen05.fence::after_thread_sync;"),
        ("address", "ld.shared.b32 %r6, [%r5]; shl.b32 %r7, %r2, 21; add.s32 %r7, %r6, %r7;"),
    ]  # fmt: skip


def multiply(
    kind: str,
    pairs: list[tuple[int, int]],
    word: int,
    *,
    group: int = 1,
    masks: tuple[int, ...] | None = None,
    use: bool = False,
    scale: int | None = None,
    a_in_tmem: int | None = None,
) -> list[tuple[str, str]]:
    """One elected thread multiplies pairs of matrix descriptors (relative to shared memory) and commits; all wait."""
    lanes = f"{{{', '.join(map(str, masks))}}}, " if masks else ""
    lines = ["cvt.u64.u32 %d20, %r3; shr.u64 %d20, %d20, 4; and.b64 %d20, %d20, 16383;"]
    for i, (a, b) in enumerate(pairs):
        left = "%d21" if a_in_tmem is None else "[%r40]"
        lines.append(f"setp.ne.u32 %p5, {int(use or i > 0)}, 0; add.s64 %d21, %d20, {a}; add.s64 %d22, %d20, {b};")
        lines.append(f"add.s32 %r40, %r6, {a_in_tmem or 0}; mov.b32 %r41, {word};")
        tail = "" if scale is None else f", {scale}"
        lines.append(f"tcgen05.mma.cta_group::{group}.kind::{kind} [%r6], {left}, %d22, %r41, {lanes}%p5{tail};")
    many, mask = (".multicast::cluster", ", %h1") if group == 2 else ("", "")
    commit = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{many}.b64 [%r4]{mask};"
    return [
        ("who1", "setp.ne.u32 %p4, %r2, 0; setp.ne.u32 %p6, %r15, 0; mov.b16 %h1, 3;"),
        ("elect", "@%p4 bra NOMMA; @%p6 bra NOMMA; elect.sync %r17|%p7, -1; @!%p7 bra NOMMA;"),
        ("mma", " ".join(lines)),
        ("commit", commit),
        ("end", "NOMMA:"),
        ("wait", wait_for("%r4")),
        ("after1", "tcgen05.fence::after_thread_sync;"),
    ]


def finish(columns: int, group: int = 1) -> list[tuple[str, str]]:
    """All warps have read; warp 0 frees."""
    cta = f"cta_group::{group}"
    return [
        ("before9", "tcgen05.fence::before_thread_sync;"),
        *([("cluster9", "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")] if group == 2 else []),
        ("barrier9", "bar.sync 0;"),
        ("after9", "tcgen05.fence::after_thread_sync;"),
        ("dealloc", f"@!%p1 bra NOFREE; tcgen05.relinquish_alloc_permit.{cta}.sync.aligned; "
         f"tcgen05.dealloc.{cta}.sync.aligned.b32 %r6, {columns}; NOFREE:"),
    ]  # fmt: skip


def registers(count: int, first: int = 0) -> str:
    """A vector operand of %x registers."""
    return "{" + ", ".join(f"%x{first + i}" for i in range(count)) + "}"


def _row(name: str, count: int) -> str:
    return (
        f"ld.param.u64 %d8, [{name}]; shl.b32 %r16, %r15, 7; add.s32 %r16, %r16, %r1; "
        f"mul.wide.u32 %d9, %r16, {4 * count}; add.s64 %d8, %d8, %d9;"
    )


def to_global(name: str, count: int, first: int = 0) -> str:
    """Each thread writes its %x registers to its row of ``count`` words."""
    lines = [_row(name, count)]
    lines += [f"st.global.b32 [%d8+{4 * i}], %x{first + i};" for i in range(count)]
    return " ".join(lines)


def from_global(name: str, count: int, first: int = 0, only: range | None = None) -> str:
    """Each thread reads its row of ``count`` words (or ``only`` some) into %x registers."""
    lines = [_row(name, count)]
    lines += [f"ld.global.b32 %x{first + i}, [%d8+{4 * i}];" for i in only or range(count)]
    return " ".join(lines)


def go(
    text: str,
    buffers: dict[str, np.ndarray | int],
    *,
    mode: str = "lockstep",
    seed: int = 0,
    dynamic: int = 0,
    threads: int = 128,
    grid: int = 1,
    cluster: int = 1,
) -> tuple[Result, Memory]:
    """Launch kernel ``k`` with a pointer for each buffer (an int: that many poisoned bytes)."""
    memory, params = Memory(seed), []
    for name, content in buffers.items():
        address = memory.poison(name, content) if isinstance(content, int) else memory.add(name, content)
        params.append(address.to_bytes(8, "little"))
    extra = {"cluster": (cluster, 1, 1)} if cluster > 1 else {}
    config = LaunchConfig(
        grid=(grid, 1, 1), block=(threads, 1, 1), dynamic_shared=dynamic, params=tuple(params), **extra
    )
    return run(load(text).kernels["k"], config, memory, mode=mode, seed=seed), memory
