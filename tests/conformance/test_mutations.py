"""The mutation suite on a foreign kernel: ``KF_LONG=1 pytest -m conformance tests/conformance/test_mutations.py``.

By hand for the others: ``python -m tests.conformance.mutations NAME``.
"""

from __future__ import annotations

import os

import pytest

from . import mutations
from .report import collect

NAME = "gemm-persistent2-sm_90a"

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(not os.environ.get("KF_LONG"), reason="takes minutes; set KF_LONG=1"),
]


def test_no_mutant_of_a_foreign_kernel_survives(request: pytest.FixtureRequest) -> None:
    """A warp-specialised GEMM in clusters: every mutant is caught, covered by name, or orders nothing."""
    if "conformance" not in (request.config.option.markexpr or ""):
        pytest.skip("run with -m conformance")
    found, missing = collect(("quack",))
    if missing:
        pytest.skip(missing["quack"])
    counts = mutations.run(next(case for case in found if case.name == NAME))
    assert counts["survived"] == 0
    assert counts["killed"] >= 30
