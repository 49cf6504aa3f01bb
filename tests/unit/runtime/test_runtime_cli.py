"""``python -m kf_runtime``: doctor, list, explain and verify, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kf_runtime.__main__ import main
from kf_runtime.campaign import Mode
from kf_runtime.dispatch import Dispatcher
from runtime_fakes import SHA, FakeDriver, small_manifest, trimul_cell, write_wheel

Install = Callable[..., Dispatcher]


@pytest.fixture
def wheel(tmp_path: Path, install: Install, fake: FakeDriver) -> Path:
    folder = write_wheel(tmp_path / "data", small_manifest(trimul_cell(), trimul_cell(N=9)))
    install(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--json")[1])


def test_doctors_first_line(wheel: Path, fake: FakeDriver, install: Install, capsys: Any) -> None:
    """The first line says what a user most needs on this product, driver and mode."""
    assert run(capsys, "doctor")[1].startswith("2 of 2 sm_90a cells are proved on KF Emulated sm_90a\n")
    fake.product = "NVIDIA H200"
    install(wheel)
    first = run(capsys, "doctor")[1].splitlines()[0]
    assert first == (
        "0 of 2 sm_90a cells are proved on NVIDIA H200; set CUEQ_TRIMUL_KF_CAMPAIGN=preview, or run the device check"
    )
    fake.capability = (8, 6)
    install(wheel)
    assert "NVIDIA H200 is sm_86; this wheel has kernels for sm_90a" in run(capsys, "doctor")[1]
    install(wheel, Mode.OFF)
    assert run(capsys, "doctor")[1].startswith("KF is off")
    install(wheel / "nowhere")
    code, text = run(capsys, "doctor")
    assert code == 1 and text.startswith("no kernels: ")


def test_list(wheel: Path, capsys: Any) -> None:
    """list prints each cell with cubins, evidence and products; --sm filters."""
    data = run_json(capsys, "list")
    assert [row["cell"] for row in data["cells"]] == [trimul_cell().key, trimul_cell(N=9).key]
    assert data["cells"][0]["cubins"] == [SHA] and data["cells"][0]["evidence"] == "e" * 64
    assert run_json(capsys, "list", "--sm", "sm_80")["cells"] == []
    assert run(capsys, "list")[1].count("KF Emulated sm_90a (emulated)") == 2


def test_verify(wheel: Path, capsys: Any) -> None:
    """verify passes on a sound wheel and names the file that is not what was proved."""
    assert run(capsys, "verify") == (0, "1 cubins, 2 plans, 2 cells: every hash agrees\n")
    (wheel / "cubins" / f"{SHA}.cubin").write_bytes(b"x")
    code, text = run(capsys, "verify")
    assert code == 1 and f"{SHA}.cubin" in text
    (wheel / "manifest.json").write_bytes(b"{}")
    assert run(capsys, "verify")[0] == 1


def test_explain(wheel: Path, fake: FakeDriver, install: Install, capsys: Any) -> None:
    """explain takes a key or a shape and prints the route, or the nearest cell."""
    assert "cubin path" in run(capsys, "explain", trimul_cell().key)[1]
    assert "cubin path" in run(capsys, "explain", "--shape", "1,8,8,16")[1]
    text = run(capsys, "explain", "--shape", "1,20,20,16")[1]
    assert "generic path" in text and f"nearest admitted cell is {trimul_cell(N=9)}" in text
    assert "this machine is sm_90a" in run(capsys, "explain", trimul_cell(sm="sm_80").key)[1]
    assert run(capsys, "explain", "--shape", "1,8,9,16")[0] == 1
    assert run(capsys, "explain", "nonsense") == (1, run(capsys, "explain", "nonsense")[1])
    fake.product = "NVIDIA H200"
    install(wheel)
    assert "preview" in run(capsys, "explain", trimul_cell().key)[1]
