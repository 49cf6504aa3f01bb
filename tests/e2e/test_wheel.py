"""The built wheel through the emulated driver: right numbers where admitted, a reason everywhere else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Small
from tests.e2e.conftest import Run

CALL = """
import kf_runtime
driver = install_driver("{sm}", driver_version={version})
args, named = operands(cell(sm="{sm}"))
answer = dict(launches=0, error="", reason="")
with torch.no_grad():
    try:
        out = kf_runtime.triangle_multiplicative_update(*args, **named)
        again = kf_runtime.triangle_multiplicative_update(*args, **named)
        oracle = trimul_oracle(cell(sm="{sm}"), dict(named, x=args[0], mask=args[2]))
        answer |= dict(norm=relative_error(out, oracle), same=torch.equal(out, again))
    except kf_runtime.KfError as error:
        answer["error"] = f"{{type(error).__name__}}: {{error}}"
    answer["route"] = str(kf_runtime.explain("triangle_multiplicative_update", *args, **named))
answer |= dict(launches=driver.launches, status=kf_runtime.status().to_json())
print(json.dumps(answer))
"""


def call(sm: str = "sm_90a", version: int = 13030) -> str:
    """Code that makes one admitted call twice on an emulated SM and tells what happened."""
    return CALL.format(sm=sm, version=version)


@pytest.fixture
def broken(site: Path, tmp_path: Path) -> Path:
    """A copy of the wheel's folder that a test may damage."""
    return Path(shutil.copytree(site, tmp_path / "site"))


def test_small_set_is_admitted(small: Small) -> None:
    """Every cell of the small set meets every bar of the committed policy, that of float32 parameters too."""
    from kernel_factory.admit import Admitted

    good = Admitted(parameter_dtypes=("bf16", "f32"))
    assert [(e.cell.key, v) for e, v in small.admission.verdicts if v != good] == []
    assert len(small.admission.verdicts) == 3


@pytest.mark.parametrize("mode", [None, "force", "preview"])
def test_admitted_call_runs_its_cubins(run_wheel: Run, mode: str | None) -> None:
    """Three launches a call, BF16-near the float64 oracle, the same bits twice, in every mode that is on."""
    answer = run_wheel(call(), mode)
    assert answer["launches"] == 6
    assert answer["norm"] <= 6e-3
    assert answer["same"]
    assert "cubin path" in answer["route"]


def test_every_small_cell_through_the_wheel(run_wheel: Run) -> None:
    """Odd N, both directions, no mask and C = D = 64 are as right as the first cell."""
    answer = run_wheel(
        """
        import kf_runtime
        driver = install_driver("sm_90a")
        answer = {}
        with torch.no_grad():
            for one in (cell(), cell(100, "incoming", False), cell(64, "incoming", True, 64)):
                args, named = operands(one)
                out = kf_runtime.triangle_multiplicative_update(*args, **named)
                inputs = dict(named, x=args[0]) | ({} if args[2] is None else {"mask": args[2]})
                answer[one.key] = relative_error(out, trimul_oracle(one, inputs))
        print(json.dumps({"norms": answer, "launches": driver.launches}))
        """
    )
    assert answer["launches"] == 9
    assert max(answer["norms"].values()) <= 6e-3


def test_off_touches_nothing(run_wheel: Run) -> None:
    """Mode off makes no driver call at all, and the result is the generic one."""
    answer = run_wheel(call(), "off")
    assert answer["launches"] == 0
    assert answer["norm"] <= 2e-2
    assert "off" in answer["route"]


def test_another_sm_is_generic(run_wheel: Run) -> None:
    """A product whose SM has no entry runs the generic path and says so."""
    answer = run_wheel(call("sm_120a"))
    assert answer["launches"] == 0
    assert "sm_120a" in answer["route"]


def test_old_driver_is_generic_with_one_warning(run_wheel: Run) -> None:
    """A driver older than the cubins need: generic, one warning with the cure, counted."""
    answer = run_wheel(call(version=12040))
    assert answer["launches"] == 0
    assert answer["stderr"].count("Warning") == 1
    assert "driver" in answer["route"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _flip_cubins(folder: Path) -> None:
    for path in (folder / "kf_runtime" / "data" / "cubins").iterdir():
        _flip(path)


def _drop_cubins(folder: Path) -> None:
    shutil.rmtree(folder / "kf_runtime" / "data" / "cubins")


def _flip_manifest(folder: Path) -> None:
    _flip(folder / "kf_runtime" / "data" / "manifest.json")


def _drop_manifest(folder: Path) -> None:
    (folder / "kf_runtime" / "data" / "manifest.json").unlink()


def _other_schema(folder: Path) -> None:
    from kf_runtime.manifest import sidecar

    path = folder / "kf_runtime" / "data" / "manifest.json"
    tree = json.loads(path.read_bytes())
    data = json.dumps({**tree, "schema": 99}).encode()
    path.write_bytes(data)
    path.with_name("manifest.sha256").write_bytes(sidecar(data))


DAMAGE = [_flip_cubins, _drop_cubins, _flip_manifest, _drop_manifest, _other_schema]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_wheel_runs_generic_with_one_warning(run_wheel: Run, broken: Path, damage) -> None:
    """A damaged or missing cubin or manifest: the generic result, one warning, a count; never a launch."""
    damage(broken)
    answer = run_wheel(call(), folder=broken)
    assert answer["launches"] == 0
    assert answer["norm"] <= 2e-2
    assert answer["stderr"].count("Warning") == 1


@pytest.mark.parametrize("damage", DAMAGE[:2], ids=lambda f: f.__name__)
def test_damaged_wheel_raises_under_force(run_wheel: Run, broken: Path, damage) -> None:
    """Under force the same damage is an error that names its cause."""
    damage(broken)
    answer = run_wheel(call(), "force", broken)
    assert answer["launches"] == 0
    assert "cubin" in answer["error"].lower()


def test_unknown_cubin_is_refused_by_the_driver(run_wheel: Run) -> None:
    """A driver that has no code for a cubin: the reason names the driver's own error."""
    code = call().replace("driver_version=13030", "lookup=lambda cubin: None")
    answer = run_wheel(code)
    assert answer["launches"] == 0
    assert "NO_BINARY" in answer["stderr"]


def test_list_and_verify(site: Path) -> None:
    """`list --json` has every cell with hashes and evidence; `verify` passes, and fails after one flipped bit."""

    def module(*arguments: str, folder: Path = site) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kf_runtime", *arguments]
        return subprocess.run(
            command, env={"PYTHONPATH": str(folder), "PATH": ""}, capture_output=True, text=True, check=False
        )

    rows = json.loads(module("list", "--json").stdout)
    rows = rows["cells"] if isinstance(rows, dict) else rows
    assert len(rows) == 3
    assert all(len(row["cubins"]) == 3 and len(row["evidence"]) == 64 for row in rows)
    assert module("verify").returncode == 0


def test_wheel_is_small_and_pure(wheel: Path) -> None:
    """One py3-none-any wheel, well under 15 MB."""
    assert wheel.name.endswith("py3-none-any.whl")
    assert wheel.stat().st_size < 15 * 2**20
