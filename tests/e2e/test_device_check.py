"""The device check on the emulated driver: what it writes is evidence, and it fails where no kernel runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_factory.evidence import read_many
from kernel_factory.pipeline import SelectionError, take_in
from tests.conftest import Small
from tests.e2e.conftest import ROOT


def _check(site: Path, small: Small, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "KF_STORE": str(small.selection.workspace.store_root)}
    command = [sys.executable, ROOT / "tools" / "device_check.py", "--out", out, "--emulated", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_evidence_of_one_cell(site: Path, small: Small, tmp_path: Path) -> None:
    """One cell: every input set compared, no time claimed, and `kf admit` refuses it as no real device's."""
    done = _check(site, small, tmp_path, "sm_90a", "--cell", "N64.C64")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = read_many(tmp_path / "evidence.json")
    assert set(found.numerics) >= {"random", "mean-1000", "gate-bias-20", "mask-zero-rows"}
    assert max(figures["model_norm"] for figures in found.numerics.values()) <= 1.5e-3
    assert found.timing == {}
    assert json.loads((tmp_path / "summary.json").read_text())["failed"] == {}
    with pytest.raises(SelectionError, match="real device"):
        take_in(small.selection.workspace, [tmp_path / "evidence.json"])


def test_no_cell_is_a_failure(site: Path, small: Small, tmp_path: Path) -> None:
    """An SM without entries is not a pass."""
    done = _check(site, small, tmp_path, "sm_120a")
    assert done.returncode == 1
