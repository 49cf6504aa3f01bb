"""Whole Hopper GEMMs, compiled here from CuTe DSL sources without a GPU: exact in every mode, no finding."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from ptx_lab import kinds

from kernel_factory.emulator import LaunchConfig, Memory, load, run

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from build import Built, build

FIELDS = ("m", "n", "k", "groups", "tile_n", "tile_k", "stages", "cluster", "dtype", "b_major")
SIZES = {
    "one warpgroup": (128, 128, 256, 1, 64, 64, 2, 1, "bf16", "k"),
    "two warpgroups": (256, 128, 320, 2, 128, 64, 3, 1, "f16", "n"),
    "a cluster": (256, 128, 256, 1, 64, 64, 2, 2, "bf16", "k"),
}
GEMMS = {name: dict(zip(FIELDS, values, strict=True)) for name, values in SIZES.items()}
MODES = ("lockstep", "warp-serial", "race")


@pytest.fixture(scope="module")
def built() -> dict[str, Built]:
    return {name: build("hopper_gemm", fields, ("a", "b", "d"), sm="sm_90a") for name, fields in GEMMS.items()}


def bits(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(np.float16) if dtype == "f16" else (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def multiplied(kernel: Built, g: dict, mode: str, seed: int = 0, ptx: str = ""):
    """Run a GEMM on small integers; the result, the product it should be, and the run."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-4, 5, (g["m"], g["k"])), rng.integers(-4, 5, (g["n"], g["k"]))
    memory = Memory(seed)
    addresses = {
        "a": memory.add("a", bits(a, g["dtype"]), writable=False),
        "b": memory.add("b", bits(b if g["b_major"] == "k" else b.T.copy(), g["dtype"]), writable=False),
        "d": memory.poison("d", g["m"] * g["n"] * 4),
    }
    launch = kernel.launch
    config = LaunchConfig(
        grid=launch.grid,
        block=launch.block,
        cluster=launch.cluster,
        dynamic_shared=launch.shared_bytes,
        params=launch.images_at(addresses),
    )
    result = run(load(ptx or kernel.ptx).kernels[kernel.symbol], config, memory, mode=mode, seed=seed)
    return memory.read("d", np.float32, (g["m"], g["n"])), a @ b.T, result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GEMMS)
def test_a_compiled_gemm_is_exact_and_clean(built, name, mode):
    """Integers give the exact product in each mode and seed; TMA bytes and products follow from the shape."""
    g = GEMMS[name]
    for seed in range(2):
        got, want, result = multiplied(built[name], g, mode, seed)
        assert result.ok, [str(f) for f in result.findings]
        assert np.array_equal(got, want)
    rows, columns = g["m"] // (64 * g["groups"]), g["n"] // g["tile_n"]
    counters = result.counters
    assert counters.tma["a"]["read"]["bytes"] == 2 * g["m"] * g["k"] * columns
    assert counters.tma["b"]["read"]["bytes"] == 2 * g["n"] * g["k"] * rows
    assert counters.tma["d"]["write"] == {"bytes": 4 * g["m"] * g["n"], "sectors": g["m"] * g["n"] // 8}
    assert sum(counters.mma.values()) == rows * g["groups"] * columns * g["k"] // 16


DROPS = {
    "fence.mbarrier_init": {"mbarrier-init-unfenced", "mbarrier-init-race"},
    "wgmma.fence": {"missing-wgmma-fence"},
    "wgmma.wait_group": {"async-read-in-flight", "wgmma-in-flight"},
    "wgmma.commit_group": {"async-read-in-flight", "wgmma-in-flight"},
    "fence.proxy.async": {"missing-proxy-fence"},
    "bar.sync 1": {"race-read-after-write"},
    "cp.async.bulk.wait_group": {"async-not-waited"},
    "mbarrier.arrive.expect_tx": {"deadlock"},
    "mbarrier.arrive.shared": {"deadlock"},
    "full wait": {"async-in-flight"},
    "empty wait": {"async-read-in-flight", "race-write-after-read", "mbarrier-arrivals"},
}


def without(ptx: str, what: str) -> str:
    """The kernel with one kind of synchronisation removed."""
    if what in ("full wait", "empty wait"):
        # The consumers' loop waits on full barriers, the producer's on the empty ones behind them.
        order = list(re.finditer(r"mbarrier\.try_wait[^\n]*?(\w+), \[[^\n]*", ptx))
        body = [m for m in order if _is_full(ptx, m) == (what == "full wait")]
        for match in reversed(body):
            ptx = f"{ptx[: match.start()]}setp.eq.u32 {match[1]}, 0, 0;{ptx[match.end() :]}"
        return ptx
    pattern = what.replace(" ", r"\s+").replace(".", r"\.")
    return re.sub(rf"^(\s*)(@\S+\s+)?{pattern}[^\n]*$", r"\1", ptx, flags=re.M)


def _is_full(ptx: str, match: re.Match) -> bool:
    """A wait is on a full barrier when the next thing after it is a wgmma, not a copy or another wait."""
    after = re.search(r"wgmma\.mma|cp\.async\.bulk\.tensor|mbarrier\.try_wait|\bret;", ptx[match.end() :])
    return bool(after) and after[0] == "wgmma.mma"


@pytest.mark.parametrize("what", DROPS)
def test_each_dropped_synchronisation_is_found(built, what):
    """Without a fence, a wait, an arrival or a barrier the race checker names the fault."""
    name = "one warpgroup"
    ptx = without(built[name].ptx, what)
    assert ptx != built[name].ptx
    _, _, result = multiplied(built[name], GEMMS[name], "race", ptx=ptx)
    assert DROPS[what] & kinds(result), [str(f) for f in result.findings]
