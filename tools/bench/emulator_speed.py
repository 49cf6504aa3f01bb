"""The emulator's speed on GEMMs of each generation, counters on, and a whole TriMul cell in every mode.

    python tools/bench/emulator_speed.py

Million thread-instructions a second of wall time on one core. Figures of this CPU; nothing here is a GPU time.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parents[2] / "tests" / "emulator"
sys.path[:0] = [str(TESTS), str(TESTS / "kernels")]

import gemm_ptx
import test_hopper_kernels as hopper
import torch

from build import build
from kernel_factory import pipeline
from kernel_factory.bench import MODES, Bench, run_chain
from kernel_factory.workspace import find

HOPPER = dict(zip(hopper.FIELDS, (1024, 1024, 1024, 2, 128, 64, 3, 1, "bf16", "k"), strict=True))
CELL = "/B1.N128.C128.D128/outgoing/mask/"


def sm80(size: int = 1024) -> None:
    """A cp.async, ldmatrix, mma.sync GEMM written in PTX by hand."""
    source = gemm_ptx.text(size, size, size)
    gemm_ptx.execute(source, size, size, size, MODES[0])
    for mode in MODES:
        result, _, _ = gemm_ptx.execute(source, size, size, size, mode)
        rate(f"sm_80 GEMM {size}^3, {mode}", result.thread_instructions, result.seconds)


def sm90() -> None:
    """A warp-specialised TMA and wgmma GEMM in the CuTe DSL."""
    kernel = build("hopper_gemm", HOPPER, ("a", "b", "d"), sm="sm_90a")
    hopper.multiplied(kernel, HOPPER, MODES[0])
    for mode in MODES:
        _, _, result = hopper.multiplied(kernel, HOPPER, mode)
        rate(f"sm_90a TMA + wgmma GEMM 1024^3, {mode}", result.thread_instructions, result.seconds)


def trimul() -> None:
    """The three launches of one cell, whole, in all three modes."""
    selection = pipeline.select(find(), ("trimul_mma",), ("sm_90a",), (CELL,))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        (built,) = pipeline.build(selection, pool, lambda *_: None, lambda *_: None)
    texts = tuple(selection.workspace.store.blob(artifact.ptx).decode() for artifact in built.artifacts)
    bench = Bench.of(built, texts, 0)
    torch.set_num_threads(1)
    inputs = bench.reference.inputs(built.cell, "random", 0)
    start = time.perf_counter()
    for mode in MODES:
        _, results = run_chain(bench, inputs, mode)
        rate(f"TriMul N=128, {mode}", sum(r.thread_instructions for r in results), sum(r.seconds for r in results))
    print(f"TriMul N=128, C=D=128 in all three modes: {time.perf_counter() - start:.1f} s")


def rate(name: str, instructions: int, seconds: float) -> None:
    """Print one figure."""
    print(
        f"{name:40} {instructions / seconds / 1e6:7.1f} M/s  ({instructions / 1e6:.0f} M in {seconds:.2f} s)",
        flush=True,
    )


def main() -> None:
    """Print every figure."""
    sm80()
    sm90()
    trimul()


if __name__ == "__main__":
    main()
