"""`kf build` killed at odd moments, and twice at once: no corruption, no double work, and a warm one builds nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT

CELL = "/B1.N64.C64.D64/outgoing/nomask/"


def _build(store: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "KF_STORE": str(store),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime"))),
    }
    command = [sys.executable, "-m", "kernel_factory.cli", "build", "--sm", "sm_90a", "--cell", CELL, "--json"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _answer(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate()
    assert process.returncode == 0
    answer: dict[str, int] = json.loads(out.splitlines()[-1])
    return answer


def _hashes(store: Path) -> set[str]:
    records = [json.loads(path.read_bytes())["body"] for path in (store / "records" / "artifact").glob("*.json")]
    return {record["cubin"] for record in records}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The cubins of an undisturbed build, by two builds at once: each kernel is compiled by one of them."""
    store = tmp_path_factory.mktemp("together")
    one, two = (_answer(process) for process in (_build(store), _build(store)))
    assert one["compiled"] + two["compiled"] == one["kernels"] == 3
    return _hashes(store)


@pytest.mark.parametrize("seconds", [0.4, 1.5, 2.5, 3.5])
def test_killed_build_is_completed_by_the_next(reference: set[str], tmp_path: Path, seconds: float) -> None:
    """SIGKILL to the build and its compilers at some moment: the next build completes, with the same bytes."""
    process = _build(tmp_path)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = _answer(_build(tmp_path))
    assert again["cells"] == 1
    assert _hashes(tmp_path) == reference
    assert _answer(_build(tmp_path))["compiled"] == 0
