"""Whole Blackwell GEMMs, compiled here from CuTe DSL sources without a GPU: exact on integers, in every mode."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kernel_factory.emulator import LaunchConfig, Memory, load, run

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from build import Built, build

# The m of a tile is that of both CTAs.
FIELDS = ("m", "n", "k", "tile_m", "tile_n", "tile_k", "stages", "ctas", "dtype")
SIZES = {
    "one CTA": (256, 128, 256, 128, 64, 64, 2, 1, "bf16"),
    "half the lanes": (64, 64, 128, 64, 32, 64, 2, 1, "f16"),
    "a pair": (512, 128, 256, 256, 128, 64, 2, 2, "bf16"),
}
GEMMS = {name: dict(zip(FIELDS, values, strict=True)) for name, values in SIZES.items()}
MODES = ("lockstep", "warp-serial", "race")


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    return {name: build("tcgen05_gemm", fields, ("a", "b", "d")) for name, fields in GEMMS.items()}


def bits(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(np.float16) if dtype == "f16" else (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def multiplied(kernel: Built, g: dict, mode: str, seed: int, ptx: str | None = None, by_the_manual: bool = False):
    """Run a GEMM on small integers; the result, the product it should be, and the run."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-4, 5, (g["m"], g["k"])), rng.integers(-4, 5, (g["n"], g["k"]))
    memory = Memory(seed)
    addresses = {
        "a": memory.add("a", bits(a, g["dtype"]), writable=False),
        "b": memory.add("b", bits(b, g["dtype"]), writable=False),
        "d": memory.poison("d", g["m"] * g["n"] * 4),
    }
    launch = kernel.launch
    config = LaunchConfig(
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        dynamic_shared=launch.shared_bytes,
        params=launch.images_at(addresses),
        by_the_manual=by_the_manual,
    )
    result = run(load(ptx or kernel.ptx).kernels[kernel.symbol], config, memory, mode=mode, seed=seed)
    return memory.read("d", np.float32, (g["m"], g["n"])), a @ b.T, result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GEMMS)
def test_a_compiled_gemm_is_exact_and_clean(built, name, mode):
    """TMA, tcgen05 and an epilogue through TMEM give the exact product and no finding, whatever the seed."""
    for seed in range(2):
        got, want, result = multiplied(built[name], GEMMS[name], mode, seed)
        assert result.ok, [str(f) for f in result.findings]
        assert np.array_equal(got, want)


def test_the_counters_tell_the_tensor_work(built):
    """Products by shape and type, bytes through TMEM and TMA: those of the formula, in every mode."""
    for name, g in GEMMS.items():
        for mode in MODES:
            counters = multiplied(built[name], g, mode, 0)[2].counters
            steps = g["m"] // g["tile_m"] * (g["n"] // g["tile_n"]) * g["k"] // 16
            assert counters.mma == {f"tcgen05.m{g['tile_m']}n{g['tile_n']}k16.{g['dtype']}": steps}
            assert counters.tmem_bytes["ld"] == g["m"] * g["n"] * 4


def test_the_manual_is_stricter_than_what_cutlass_relies_on(built):
    """Without wait::ld the assembler still tracks the registers; by the manual they are poison, and fences miss."""
    name, g = "one CTA", GEMMS["one CTA"]
    bare = built[name].ptx.replace("tcgen05.wait::ld.sync.aligned;", "")
    for mode in MODES:
        got, want, result = multiplied(built[name], g, mode, 0, bare)
        assert result.ok and np.array_equal(got, want), [str(f) for f in result.findings]
        got, _, result = multiplied(built[name], g, mode, 0, bare, by_the_manual=True)
        assert np.isnan(got).all()
    assert {"tcgen05-ld-not-waited", "tcgen05-missing-fence"} <= {f.kind for f in result.findings}


def without_a_wait(ptx: str) -> list[tuple[str, str]]:
    """Each wait loop of a kernel (try_wait and its two branches), and the text without it."""
    lines, out = ptx.splitlines(), []
    for i, line in enumerate(lines):
        if "mbarrier.try_wait" in line and "LAB_WAIT" in lines[i - 1]:
            out.append((line.strip(), "\n".join([*lines[:i], "", "", "", *lines[i + 3 :]])))
    return out


@pytest.mark.parametrize(("name", "redundant"), [("one CTA", 3), ("a pair", 4)])
def test_a_dropped_wait_is_found(built, name, redundant):
    """In some mode and order; but for waits on a phase that is over from the start, and those of a drained pipeline."""
    survivors, waits = [], without_a_wait(built[name].ptx)
    for what, text in waits:
        for mode, seed in (("race", 0), *(("warp-serial", seed) for seed in range(4))):
            got, want, result = multiplied(built[name], GEMMS[name], mode, seed, text)
            if result.findings or not np.array_equal(got, want):
                break
        else:
            survivors.append(what)
    assert len(waits) > 6 and len(survivors) <= redundant, survivors
