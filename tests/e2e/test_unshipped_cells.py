"""What the family serves beyond the shipped cells: projection biases, C and D that differ, batches, tiny and odd N."""

from __future__ import annotations

import pytest
from kf_runtime.cell import Cell

from kernel_factory import pipeline
from kernel_factory.pipeline import Selection

HEAD = "triangle_multiplicative_update/inference/bf16.bf16"
KEYS = [
    f"{HEAD}/B1.N33.C64.D64/outgoing/mask/bias/sm_90a",
    f"{HEAD}/B2.N40.C64.D128/incoming/nomask/bias/sm_100a",
    f"{HEAD}/B1.N1.C128.D64/outgoing/mask/nobias/sm_80",
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.removeprefix(HEAD))
def test_cell_is_right_in_every_mode(selection: Selection, key: str) -> None:
    """Every launch agrees with the rounding model, and no mode finds anything."""
    launches = pipeline.try_cell(selection.workspace, "trimul_mma", Cell.parse(key))
    assert [(launch.kernel, launch.figures, launch.findings) for launch in launches if not launch.right] == []
    assert {launch.facts.stack_bytes for launch in launches} == {0}
