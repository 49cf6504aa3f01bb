"""A two-stage bf16 GEMM in PTX text: cp.async, swizzled shared memory, ldmatrix, mma. For tests and for speed.

    OPENBLAS_NUM_THREADS=1 PYTHONPATH=. python tests/emulator/gemm_ptx.py [size]

prints thread-instructions a CPU second of every mode.

C[M, N] (f32) = A[M, K] B[N, K]^T; tiles of 64 x 64 x 32, four warps of 32 x 32 each.
"""

from __future__ import annotations

import sys
import time

import numpy as np

STAGE = 8192


def _load(stage: str, k: str) -> list[str]:
    """Copy the A and B tiles at k offset register ``k`` (elements) to the stage whose byte offset is in ``stage``."""
    out = [f"mul.wide.u32 %d8, {k}, 2;"]
    for operand, base in (("a", 0), ("b", 4096)):
        for part in (0, 1):
            out.append(f"add.s64 %d9, %{operand}{part}, %d8; add.s32 %r40, %to, {stage};")
            out.append(f"cp.async.cg.shared.global [%r40+{base + 2048 * part}], [%d9], 16;")
    return out


def text(m: int, n: int, k: int) -> str:
    """The module; kernel ``gemm`` takes pointers a, b and c; grid (N/64, M/64), block 128, two stages."""
    lines = [
        ".version 9.3\n.target sm_80\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];",
        ".visible .entry gemm(.param .u64 a, .param .u64 b, .param .u64 c)\n.reqntid 128, 1, 1\n{",
        ".reg .pred %p<4>; .reg .b32 %r<64>; .reg .b64 %d<16>; .reg .b64 %a<2>; .reg .b64 %b<2>; .reg .b32 %to;",
        ".reg .b32 %x<16>; .reg .b32 %y<16>; .reg .b32 %acc<64>; .reg .b32 %new<64>; .reg .b32 %next<64>;",
        "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, smem;",
        "and.b32 %r4, %r0, 31; shr.u32 %r5, %r0, 5; shr.u32 %r6, %r5, 1; and.b32 %r7, %r5, 1;",
        # Where this thread copies from and to: row tid/4, 16-byte chunk tid%4, chunk swizzled by row/2.
        "shr.u32 %r8, %r0, 2; and.b32 %r9, %r0, 3; shr.u32 %r10, %r8, 1; and.b32 %r10, %r10, 3;",
        "xor.b32 %r10, %r10, %r9;",
        "shl.b32 %r10, %r10, 4; mad.lo.s32 %to, %r8, 64, %r10; add.s32 %to, %to, %r3; shl.b32 %r9, %r9, 3;",
    ]
    for operand, tile in (("a", "%r2"), ("b", "%r1")):
        lines.append(
            f"ld.param.u64 %d0, [{operand}]; mad.lo.s32 %r11, {tile}, 64, %r8; mad.lo.s32 %r11, %r11, {k}, %r9;"
        )
        lines.append(
            f"mul.wide.u32 %d1, %r11, 2; add.s64 %{operand}0, %d0, %d1; add.s64 %{operand}1, %{operand}0, {64 * k};"
        )
    # Where this lane's ldmatrix rows are: A rows (lane%16), chunk lane/16; B rows lane%8 + 8*(lane/16), chunk lane/8%2.
    lines += [
        "and.b32 %r12, %r4, 15; shr.u32 %r13, %r4, 4; shr.u32 %r14, %r12, 1; and.b32 %r14, %r14, 3;",
        "mad.lo.s32 %r15, %r6, 32, %r12; mad.lo.s32 %r15, %r15, 64, %r3;",
        "and.b32 %r16, %r4, 7; mad.lo.s32 %r16, %r13, 8, %r16; shr.u32 %r17, %r4, 3; and.b32 %r17, %r17, 1;",
        "shr.u32 %r18, %r16, 1; and.b32 %r18, %r18, 3; mad.lo.s32 %r19, %r7, 32, %r16; mad.lo.s32 %r19, %r19, 64, %r3;",
        *(f"mov.b32 %acc{i}, 0f00000000;" for i in range(32)),
        "mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0;",
        *_load("%r21", "%r20"),
        "cp.async.commit_group;",
        "LOOP:",
        f"add.s32 %r23, %r20, 32; xor.b32 %r24, %r21, {STAGE}; setp.ge.s32 %p1, %r23, {k}; @%p1 bra LAST;",
        *_load("%r24", "%r23"),
        "LAST:",
        "cp.async.commit_group;",
        "cp.async.wait_group 1;",
        "bar.sync 0;",
    ]
    for step in (0, 1):
        source, target = ("acc", "new") if step == 0 else ("new", "next")
        lines.append(f"xor.b32 %r25, %r13, {2 * step}; xor.b32 %r25, %r25, %r14; shl.b32 %r25, %r25, 4;")
        lines.append(f"add.s32 %r25, %r25, %r15; add.s32 %r25, %r25, %r21; xor.b32 %r26, %r17, {2 * step};")
        lines.append(
            "xor.b32 %r26, %r26, %r18; shl.b32 %r26, %r26, 4; add.s32 %r26, %r26, %r19; add.s32 %r26, %r26, %r21;"
        )
        for i in (0, 1):
            regs = ", ".join(f"%x{4 * i + r}" for r in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{regs}}}, [%r25+{1024 * i}];")
            regs = ", ".join(f"%y{4 * i + r}" for r in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{regs}}}, [%r26+{4096 + 1024 * i}];")
        for i in range(2):
            for j in range(4):
                d, c = (", ".join(f"%{w}{16 * i + 4 * j + r}" for r in range(4)) for w in (target, source))
                x, y = ", ".join(f"%x{4 * i + r}" for r in range(4)), f"%y{2 * j}, %y{2 * j + 1}"
                lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{{x}}}, {{{y}}}, {{{c}}};")
    lines += [
        "bar.sync 0;",
        *(f"mov.b32 %acc{i}, %next{i};" for i in range(32)),
        f"mov.b32 %r20, %r23; mov.b32 %r21, %r24; setp.lt.s32 %p1, %r20, {k}; @%p1 bra LOOP;",
        "shr.u32 %r30, %r4, 2; and.b32 %r31, %r4, 3; mad.lo.s32 %r30, %r6, 32, %r30; mad.lo.s32 %r30, %r2, 64, %r30;",
        "shl.b32 %r31, %r31, 1; mad.lo.s32 %r31, %r7, 32, %r31; mad.lo.s32 %r31, %r1, 64, %r31;",
        f"mad.lo.s32 %r30, %r30, {n}, %r31; ld.param.u64 %d0, [c]; mul.wide.u32 %d1, %r30, 4; add.s64 %d0, %d0, %d1;",
    ]
    for i in range(2):
        for j in range(4):
            for half in range(2):
                at, first = 4 * ((16 * i + 8 * half) * n + 8 * j), 16 * i + 4 * j + 2 * half
                lines.append(f"st.global.v2.b32 [%d0+{at}], {{%acc{first}, %acc{first + 1}}};")
    return "\n".join([*lines, "ret;\n}\n"]).replace("; ", ";\n")


def problem(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integer A and B as bf16 bits, and the exact C."""
    rng = np.random.default_rng(m + n + k)
    a, b = rng.integers(-2, 3, (m, k)).astype(np.float32), rng.integers(-2, 3, (n, k)).astype(np.float32)
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    return bits[0], bits[1], a @ b.T


def execute(source: str, m: int, n: int, k: int, mode: str, seed: int = 0, counters: bool = True):
    """Run the kernel; returns the result, C, and the exact C."""
    from kernel_factory.emulator import LaunchConfig, Memory, load, run

    a, b, want = problem(m, n, k)
    memory = Memory(seed)
    addresses = memory.add("a", a, writable=False), memory.add("b", b, writable=False), memory.poison("c", 4 * m * n)
    config = LaunchConfig(
        grid=(n // 64, m // 64, 1),
        block=(128, 1, 1),
        dynamic_shared=2 * STAGE,
        params=tuple(x.to_bytes(8, "little") for x in addresses),
    )
    result = run(load(source).kernels["gemm"], config, memory, mode=mode, seed=seed, counters=counters)
    return result, memory.read("c", np.float32, (m, n)), want


def main() -> None:
    """Print the speed of every mode on this machine, in CPU seconds of one thread."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    source = text(size, size, size)
    execute(source, size, size, size, "lockstep")
    for mode in ("lockstep", "warp-serial", "race"):
        for counters in (False, True):
            started = time.process_time()
            result, got, want = execute(source, size, size, size, mode, counters=counters)
            seconds = time.process_time() - started
            assert result.ok and np.array_equal(got, want)
            rate = result.thread_instructions / seconds / 1e6
            print(f"{mode:12} counters {counters!s:5} {rate:6.1f} M thread-instructions/s")


if __name__ == "__main__":
    main()
