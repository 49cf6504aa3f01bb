"""The roofline estimate: plain arithmetic on counters, scaled from the sample."""

from __future__ import annotations

import pytest

from kernel_factory.roofline import PARTS, estimate

LAUNCH = {
    "fraction": 0.5,
    "counters": {
        "memory": {"x": {"read": {"unique": 1_000_000, "sectors": 9, "bytes": 9}}},
        "mma": {"m16n8k16.bf16": 1_000_000},
        "shared": {"wavefronts": 1_000_000},
        "thread_instructions": 32_000_000,
    },
}


def test_each_resource_by_hand() -> None:
    """An H200 at its ceilings: 64 MB at 4.8 TB/s, 8.192 GFLOP at 989 TFLOP/s, wavefronts and issue over 132 SMs."""
    found = estimate(LAUNCH, "sm_90a")
    assert found.memory_us == pytest.approx(64 / 4.8)
    assert found.tensor_us == pytest.approx(8192 / 989)
    assert found.shared_us == pytest.approx(2e6 / (132 * 1.98e3))
    assert found.issue_us == pytest.approx(2e6 / 4 / (132 * 1.98e3))
    assert found.binding == "memory"
    assert found.microseconds == found.memory_us


@pytest.mark.parametrize("sm", PARTS)
def test_a_whole_run_is_not_scaled(sm: str) -> None:
    """Half the fraction is twice the time, on every part."""
    whole = estimate({**LAUNCH, "fraction": 1.0}, sm)
    assert estimate(LAUNCH, sm).memory_us == pytest.approx(2 * whole.memory_us)
