"""The wheel with the small set of cells, installed in a folder of its own, and processes that use it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="session")
def clean_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with torch and a wheel of ours. Who uses it installs the wheel that it means over that."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    version = f"torch=={torch.__version__.split('+')[0]}"
    command = [folder / "bin" / "python", "-I", "-m", "pip", "install", "-q", version, wheel]
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
        return answer_of(PRELUDE + textwrap.dedent(code), environment)

    return run


def answer_of(code: str, environment: dict[str, str]) -> dict[str, Any]:
    """What a process that runs ``code`` says: its last line on stdout, as JSON, and its stderr."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    answer["stderr"] = done.stderr
    return answer


@dataclass(frozen=True)
class Checkout:
    """A copy of the sources in a folder of its own."""

    root: Path

    def python(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join((str(self.root), str(self.root / "runtime")))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KF_")} | {"PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=self.root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    def kf(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "kernel_factory.cli", *arguments, check=check)

    def files(self) -> dict[str, str]:
        """Every file's hash, but those of the store and of Python's caches."""
        found = (path for path in self.root.rglob("*") if path.is_file())
        names = {str(path.relative_to(self.root)): path for path in found}
        kept = {n: p for n, p in names.items() if ".store" not in n and "__pycache__" not in n}
        return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in kept.items()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    root = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.cubin", "manifest.json", "build")
    for name in ("kernel_factory", "runtime", "cubins"):
        shutil.copytree(ROOT / name, root / name, ignore=skip)
    (root / "allowlists").mkdir()
    shutil.copy(ROOT / "allowlists" / "policy.toml", root / "allowlists")
    shutil.copy(ROOT / "pyproject.toml", root)
    return Checkout(root)
