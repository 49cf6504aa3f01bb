"""An author's first day in a copy of the checkout: `kf new`, a call through the wheel, and the usual mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Checkout

KEY = "residual_layer_norm/inference/bf16.bf16/B1.N65.C128.D128/none/nomask/nobias/sm_90a"
CALL = """
import json, torch
from kernel_factory.emulator import install_driver
install_driver("sm_90a")
import kf_runtime
x, residual, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((1, 65, 65, 128),) * 2 + ((128,),) * 2)
with torch.no_grad():
    out = kf_runtime.residual_layer_norm(x, residual, weight, bias)
wide = torch.nn.functional.layer_norm(x.double() + residual.double(), (128,), weight.double(), bias.double(), 1e-5)
print(json.dumps({
    "error": float((out.double() - wide).norm() / wide.norm()),
    "hits": kf_runtime.status().hits,
    "route": str(kf_runtime.explain("residual_layer_norm", x, residual, weight, bias)),
    "other": str(kf_runtime.explain("residual_layer_norm", x[:, :9, :9], residual[:, :9, :9], weight, bias)),
}))
"""


@pytest.fixture(scope="module")
def family(checkout: Checkout) -> Path:
    """The scaffolded family, proved and packaged for one SM."""
    before = checkout.files()
    checkout.kf("new", "my_norm", "--op", "residual_layer_norm")
    chosen = ("--family", "my_norm", "--sm", "sm_90a")
    for stage in ("build", "validate", "admit", "package"):
        checkout.kf(stage, *chosen)
    after = checkout.files()
    changed = {name for name in before if after.get(name) != before[name]}
    assert not changed, "a file outside the new folder was touched"
    homes = ("kernel_factory/families/my_norm/", "allowlists/residual_layer_norm/", "runtime/kf_runtime/data/")
    evidence = "allowlists/evidence/residual_layer_norm/"
    assert all(name.startswith((*homes, evidence)) for name in after.keys() - before.keys())
    return checkout.root / "kernel_factory" / "families" / "my_norm"


def test_scaffold_reaches_the_wheel(checkout: Checkout, family: Path) -> None:
    """Built, proved, admitted and packaged as it stands, the scaffold answers calls through the runtime."""
    answer = json.loads(checkout.python("-c", CALL).stdout.splitlines()[-1])
    assert answer["error"] < 4e-3
    assert answer["hits"] == 1
    assert answer["route"].startswith("cubin path")
    assert "nearest admitted cell is residual_layer_norm" in answer["other"] and "no admitted cell" in answer["other"]


def test_scaffold_keeps_the_style(checkout: Checkout, family: Path) -> None:
    """What `kf new` writes passes the checks that the rest of the code passes."""
    for tool in (("ruff", "check"), ("ruff", "format", "--check")):
        done = subprocess.run([sys.executable, "-m", *tool, str(family)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


MISTAKES = {
    "missing barrier": (
        "        cute.arch.sync_threads()  # and everybody else's\n",
        "",
        ("race-read-after-write at kernel.py:", "against kernel.py:", "cute.arch.sync_threads()"),
    ),
    "stale cp.async wait": (
        "cp_async_wait_group(0)",
        "cp_async_wait_group(1)",
        ("async-in-flight at kernel.py:", "cute.arch.cp_async_wait_group(0)"),
    ),
    "no swizzle": (
        "return chunk ^ ((row & 1) << 2)",
        "return chunk",
        ("bank conflicts", "kernel.py:", "swizzle", "right, and the policy would reject it"),
    ),
    "another swizzle where it is read": (
        "at = self.bank(4 * t + q, row)",
        "at = 4 * t + q",
        ("values are wrong", "kernel.py:", "one swizzle"),
    ),
    "no predicate at the tail's store": (
        "if first + row < rows:",
        "if first + row < rows + ROWS:",
        ("out-of-bounds at kernel.py:", "buffer 'out'", "predicate"),
    ),
    "no clamp at the tail's load": (
        "source = cutlass.min(first + row, rows - 1)",
        "source = first + row",
        ("out-of-bounds at kernel.py:", "buffer 'x'", "predicate"),
    ),
    "too much shared memory": (
        "smem=2 * ROWS * self.C * 2,",
        "smem=300 * 1024,",
        ("307200 bytes", "sm_90a allows 232448", "kernel.py:", "smaller tile"),
    ),
    "too little shared memory": (
        "smem=2 * ROWS * self.C * 2,",
        "smem=ROWS * self.C * 2,",
        ("out-of-bounds at kernel.py:", "8192 bytes of shared memory", "dynamic shared memory"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_run_names_a_mistake(checkout: Checkout, family: Path, mistake: str) -> None:
    """Each usual mistake makes `kf run` fail, with its kind, its line in the author's file, and a cure."""
    right, wrong, said = MISTAKES[mistake]
    kernel = family / "kernel.py"
    source = kernel.read_text()
    assert source.count(right) == 1
    try:
        kernel.write_text(source.replace(right, wrong))
        done = checkout.kf("run", "my_norm", "--cell", KEY, check=False)
    finally:
        kernel.write_text(source)
    assert done.returncode == 1, done.stdout
    shown = done.stdout + done.stderr
    assert [text for text in said if text not in " ".join(shown.split())] == [], shown


def test_a_right_kernel_is_right(checkout: Checkout, family: Path) -> None:
    """The scaffold itself, at the same cell, is right in both forms; so that the mistakes above are what fails."""
    shown = checkout.kf("run", "my_norm", "--cell", KEY, "--jit").stdout
    assert shown.startswith("JIT form: the cubin's bits")
    assert shown.rstrip().endswith("right")


def test_a_second_design_takes_over(checkout: Checkout) -> None:
    """A family started for an op that has one begins from it, and takes over the cells that it lists."""
    checkout.kf("new", "second", "--op", "triangle_multiplicative_update")
    try:
        rows = json.loads(checkout.kf("cells", "--json", "--sm", "sm_90a", "--cell", "/B1.N64.C64.D64/").stdout)
        owners = {row["cell"].split("/")[5]: row["family"] for row in rows if "/outgoing/" in row["cell"]}
        assert owners == {"mask": "second", "nomask": "trimul_mma"}
        chosen = ("--family", "second", "--sm", "sm_90a", "--cell", "N64.C64.D64/outgoing/mask")
        for stage in ("build", "validate"):
            checkout.kf(stage, *chosen)
        assert "1 of 1 cells admitted" in checkout.kf("admit", *chosen).stdout
        init = checkout.root / "kernel_factory" / "families" / "second" / "__init__.py"
        init.write_text(init.read_text().replace('supersedes=("trimul_mma",),', ""))
        refused = checkout.kf("cells", check=False)
        assert refused.returncode == 1 and "second, trimul_mma" in refused.stderr
    finally:
        shutil.rmtree(checkout.root / "kernel_factory" / "families" / "second")


@pytest.mark.parametrize(
    ("name", "op", "said"),
    [
        ("My-Norm", "residual_layer_norm", "lower-case"),
        ("class", "residual_layer_norm", "lower-case"),
        ("trimul_mma", "residual_layer_norm", "another name"),
        ("fresh", "no_such_op", "expected one of residual_layer_norm, triangle_multiplicative_update"),
    ],
)
def test_new_refuses(checkout: Checkout, name: str, op: str, said: str) -> None:
    """A bad name or op is a clear error, and nothing is written."""
    before = checkout.files()
    done = checkout.kf("new", name, "--op", op, check=False)
    assert done.returncode == 1 and said in done.stderr
    assert checkout.files() == before
