"""The wheel with the small set of cells, installed in a folder of its own, and processes that use it."""

from __future__ import annotations

import json
import os
import shutil
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
import json, sys, torch, warnings
warnings.simplefilter("always")
from kernel_factory.emulator import install_driver
from kernel_factory.reference import relative_error, trimul_inputs, trimul_oracle
from kf_runtime.cell import Cell

def cell(n=64, direction="outgoing", mask=True, c=128, sm="sm_90a"):
    return Cell(op="triangle_multiplicative_update", B=1, N=n, C=c, D=c, direction=direction, mask=mask, sm=sm)

def operands(cell, seed=11, name="random"):
    inputs = trimul_inputs(cell, name, seed)
    return (inputs.pop("x"), cell.direction, inputs.pop("mask", None)), inputs
"""


@pytest.fixture(scope="session")
def wheel(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel file, holding the small set of cells."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "runtime"
    shutil.copytree(
        ROOT / "runtime", source, ignore=shutil.ignore_patterns("data", "*.egg-info", "build", "__pycache__")
    )
    shutil.copytree(small.data, source / "kf_runtime" / "data")
    command = [sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="session")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's contents, as pip lays them out."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_wheel(site: Path, small: Small) -> Run:
    """Run code in a process that sees the wheel first; its last line on stdout is its answer, as JSON."""

    def run(code: str, mode: str | None = None, folder: Path = site) -> dict[str, Any]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
        environment["KF_STORE"] = str(small.selection.workspace.store_root)
        if mode is not None:
            environment["CUEQ_TRIMUL_KF_CAMPAIGN"] = mode
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        answer["stderr"] = done.stderr
        return answer

    return run
