"""Processes that run the wheel's code on the emulated driver, one driver a process, with the small set of cells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Small

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import json, os, sys, torch, warnings
from pathlib import Path
from kernel_factory.emulator import install_driver
from kernel_factory.reference import relative_error, trimul_inputs, trimul_oracle
import kf_runtime
from kf_runtime import campaign, dispatch
from kf_runtime.cell import Cell

update = kf_runtime.triangle_multiplicative_update

def start(launches="run", mode="auto", **options):
    driver = install_driver("sm_90a", launches=launches, **options)
    settings = campaign.Settings(mode=campaign.Mode(mode))
    dispatch.install(dispatch.Dispatcher(settings, Path(os.environ["KF_DATA"])))
    return driver

def cell(n=64, direction="incoming", mask=True, c=64):
    return Cell(op="triangle_multiplicative_update", B=1, N=n, C=c, D=c, direction=direction, mask=mask, sm="sm_90a")

SMALLEST = cell()
LARGER = cell(64, "outgoing", True, 128)
ODD = cell(100, "incoming", False, 128)

def named(cell, seed=11):
    return dict(trimul_inputs(cell, "random", seed), direction=cell.direction)

def oracle(cell, call):
    return trimul_oracle(cell, {k: v for k, v in call.items() if k != "direction" and v is not None})

def answer(**values):
    print(json.dumps(values))
"""

Emulated = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def emulated(small: Small) -> Emulated:
    """Run code after PRELUDE in a new process; what it hands to ``answer`` comes back, with stderr beside it."""

    def run(code: str, **variables: str) -> dict[str, Any]:
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "KF_DATA": str(small.data)}
        environment |= {"KF_STORE": str(small.selection.workspace.store_root), **variables}
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["stderr"] = done.stderr
        return found

    return run
