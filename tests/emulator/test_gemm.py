"""A whole pipelined GEMM: exact in every mode, and each dropped piece of synchronisation is found."""

from __future__ import annotations

import gemm_ptx
import numpy as np
import pytest
from ptx_lab import kinds

M, N, K = 128, 192, 160


@pytest.mark.parametrize("mode", ["lockstep", "warp-serial", "race"])
def test_the_gemm_is_exact_and_free_of_findings(mode):
    """Integer inputs give the exact product; counts follow from the shape."""
    for seed in range(2):
        result, got, want = gemm_ptx.execute(gemm_ptx.text(M, N, K), M, N, K, mode, seed)
        assert result.ok, [str(f) for f in result.findings]
        assert np.array_equal(got, want)
    counters = result.counters
    tiles, steps = (M // 64) * (N // 64), K // 32
    assert counters.mma == {"m16n8k16.bf16": 4 * 16 * tiles * steps}
    assert counters.cp_async_bytes == 8192 * tiles * steps
    assert counters.memory["a"]["read"] == {
        "sectors": M * K // 16 * (N // 64),
        "unique": M * K // 16,
        "bytes": 2 * M * K * (N // 64),
    }
    assert counters.memory["c"]["write"]["sectors"] == M * N // 8
    assert counters.shared["wavefronts"] == counters.shared["ideal"]


@pytest.mark.parametrize(
    ("dropped", "which", "kind"),
    [
        ("cp.async.wait_group 1;", 0, "async-in-flight"),
        ("cp.async.commit_group;", 0, "async-in-flight"),
        ("cp.async.commit_group;", 1, "async-in-flight"),
        ("bar.sync 0;", 0, "race-read-after-write"),
        ("bar.sync 0;", 1, "race-write-after-read"),
    ],
)
def test_every_dropped_synchronisation_is_found(dropped, which, kind):
    """Without one wait, commit or barrier the race checker names the fault.

    A missing wait also shows in the numbers, a missing barrier before the read under warp-serial order. A missing
    barrier before the next copy shows in neither: late landing hides it, so the checker is the only witness.
    """
    parts = gemm_ptx.text(M, N, K).split(dropped)
    mutant = dropped.join(parts[: which + 1]) + dropped.join(["", *parts[which + 1 :]])[len(dropped) :]
    result, got, want = gemm_ptx.execute(mutant, M, N, K, "race")
    assert kind in kinds(result)
    if dropped.startswith("cp.async"):
        assert not np.array_equal(got, want)
    elif which == 0:
        assert np.array_equal(got, want)  # lockstep order hides a barrier; warp-serial order shows it
        wrong = [gemm_ptx.execute(mutant, M, N, K, "warp-serial", seed)[1:] for seed in range(4)]
        assert any(not np.array_equal(*pair) for pair in wrong)
