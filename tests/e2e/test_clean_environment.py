"""A fresh environment with torch and the wheel alone: no DSL, no factory, no GPU, no driver."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

CODE = """
import importlib.util, json
import torch, kf_runtime
draw = torch.Generator().manual_seed(5)
normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)
C, D, N = 6, 4, 5
x, mask = normal(2, N, N, C), normal(2, N, N)
w = dict(norm_in_weight=normal(C), norm_in_bias=normal(C), p_in_weight=normal(2 * D, C), g_in_weight=normal(2 * D, C),
         norm_out_weight=normal(D), norm_out_bias=normal(D), p_out_weight=normal(C, D), g_out_weight=normal(C, C))
norm = lambda v, g, b: (v - v.mean(-1, keepdim=True)) / (v.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() * g + b
gate = lambda v: 1 / (1 + torch.exp(-v))
h = norm(x, w["norm_in_weight"], w["norm_in_bias"])
linear = lambda v, name: torch.einsum("bijc,dc->bijd", v, w[name])
ab = gate(linear(h, "g_in_weight")) * linear(h, "p_in_weight") * mask[..., None]
t = torch.einsum("bikd,bjkd->bijd", ab[..., :D], ab[..., D:])
y = gate(linear(h, "g_out_weight")) * linear(norm(t, w["norm_out_weight"], w["norm_out_bias"]), "p_out_weight")
out = kf_runtime.triangle_multiplicative_update(x, "outgoing", mask, **w)
bf = {k: v.bfloat16() for k, v in w.items()}
print(json.dumps(dict(
    error=((out - y).norm() / y.norm()).item(), size=y.norm().item(), file=kf_runtime.__file__,
    factory=importlib.util.find_spec("kernel_factory") is None, dsl=importlib.util.find_spec("cutlass") is None,
    route=str(kf_runtime.explain("triangle_multiplicative_update", x.bfloat16(), "outgoing", mask.bfloat16(), **bf)),
)))
"""


@pytest.fixture(scope="module")
def python(wheel: Path, clean_environment: Path) -> Path:
    """The interpreter of a virtual environment that holds torch and the wheel, and what those require."""
    python = clean_environment / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(pip, check=True, capture_output=True, env=_bare())
    return python


def _bare() -> dict[str, str]:
    """This environment without the variables that would let the checkout in."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KF_", "CUEQ_"))}


def test_import_call_and_reason(python: Path, tmp_path: Path) -> None:
    """The wheel imports, computes the formula on the CPU exactly, and says why no kernel ran."""
    done = subprocess.run([python, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, env=_bare(), check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["factory"] and answer["dsl"]
    assert answer["file"].startswith(str(python.parent.parent)) and "site-packages" in answer["file"]
    assert answer["size"] > 0
    assert answer["error"] < 1e-12
    assert "CPU" in answer["route"]


def test_import_needs_no_home(python: Path, tmp_path: Path) -> None:
    """No home folder, no writable place, no compiler on the path: importing and calling still work."""
    environment = {"HOME": "/nonexistent", "PATH": "", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/nonexistent"}
    code = "import torch, kf_runtime as k; x = torch.randn(3, 3, 8); print(k.triangle_multiplicative_update(x).shape)"
    done = subprocess.run([python, "-c", code], cwd="/", capture_output=True, text=True, env=environment, check=False)
    assert "[3, 3, 8]" in done.stdout, done.stderr


def test_doctor_first_line(python: Path, tmp_path: Path) -> None:
    """doctor's first line tells what a user most needs, here that there is no driver."""
    done = subprocess.run(
        [python, "-m", "kf_runtime", "doctor"], cwd=tmp_path, capture_output=True, text=True, env=_bare(), check=False
    )
    assert "driver" in done.stdout.splitlines()[0]
