"""Allow-lists: written by the machine, read back exactly, refused where they do not match what was built."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from kf_runtime import manifest as manifests
from kf_runtime.cell import Cell

from kernel_factory import allowlist, package
from kernel_factory.allowlist import Proved, Row
from kernel_factory.built import BuiltCell
from kernel_factory.cli import main
from kernel_factory.pipeline import Selection
from tests.conftest import Small

CELL = Cell(op="triangle_multiplicative_update", B=1, N=64, C=128, D=128, direction="outgoing", mask=True, sm="sm_90a")
ROW = Row(
    cell=CELL,
    cubins=("a" * 64, "b" * 64, "c" * 64),
    proofs=(Proved(product="KF Emulated sm_90a", level="emulated", evidence="d" * 64),),
)


def _row_of(built: BuiltCell) -> Row:
    return replace(ROW, cell=built.cell, cubins=tuple(artifact.cubin for artifact in built.artifacts))


def test_round_trip_and_order(tmp_path: Path) -> None:
    """Rows come back equal and in key order, and writing the same rows again changes nothing."""
    wide = replace(ROW, cell=replace(CELL, N=100), parameter_dtypes=("bf16", "f32"))
    rows = [ROW, wide, replace(ROW, cell=replace(CELL, mask=False))]
    assert allowlist.write(tmp_path, CELL.op, "sm_90a", rows)
    assert allowlist.read(tmp_path, CELL.op, "sm_90a") == sorted(rows, key=lambda row: row.cell)
    assert not allowlist.write(tmp_path, CELL.op, "sm_90a", rows[::-1])


def test_a_row_that_says_nothing_of_parameters_is_for_bf16(tmp_path: Path) -> None:
    """Lists written before float32 parameters could be admitted admit BF16 ones alone."""
    allowlist.write(tmp_path, CELL.op, "sm_90a", [replace(ROW, parameter_dtypes=("bf16", "f32"))])
    path = allowlist.path_of(tmp_path, CELL.op, "sm_90a")
    path.write_text(re.sub(r"parameter_dtypes = \[.*?\]", "", path.read_text(), flags=re.DOTALL))
    assert allowlist.read(tmp_path, CELL.op, "sm_90a") == [ROW]


def test_absent_list_is_empty(tmp_path: Path) -> None:
    """No file means that no cell is admitted."""
    assert allowlist.read(tmp_path, CELL.op, "sm_80") == []


def test_edited_list_is_a_clear_error(tmp_path: Path) -> None:
    """A row without its cubins names the file and the command that writes it."""
    allowlist.write(tmp_path, CELL.op, "sm_90a", [ROW])
    path = allowlist.path_of(tmp_path, CELL.op, "sm_90a")
    path.write_text(path.read_text().replace("cubins", "cubin"))
    with pytest.raises(ValueError, match="kf admit"):
        allowlist.read(tmp_path, CELL.op, "sm_90a")


def test_row_of_other_cubins_is_not_packaged(selection: Selection, built: list[BuiltCell]) -> None:
    """A row that names other bytes than were built never reaches the wheel."""
    with pytest.raises(package.PackageError, match="built were"):
        package.build_manifest(selection.workspace.store, [(built[0], replace(ROW, cell=built[0].cell))])


def test_packaged_folder_holds_what_the_manifest_names(
    selection: Selection, built: list[BuiltCell], tmp_path: Path
) -> None:
    """Manifest, sidecar and cubins agree; a cubin that nothing names any more is removed."""
    store, admitted = selection.workspace.store, [(cell, _row_of(cell)) for cell in built]
    admitted[0] = (built[0], replace(admitted[0][1], parameter_dtypes=("bf16", "f32")))
    package.write(store, tmp_path, package.build_manifest(store, admitted))
    stray = tmp_path / "cubins" / "stray.cubin"
    stray.write_bytes(b"old")
    packaged = package.write(store, tmp_path, package.build_manifest(store, admitted[:1]))
    manifest = manifests.load(tmp_path)
    assert {f"cubins/{path.name}" for path in (tmp_path / "cubins").iterdir()} == {
        r.file for r in manifest.cubins.values()
    }
    assert (packaged.cells, packaged.cubins) == (1, 3)
    assert manifest.entries[built[0].cell].parameter_dtypes == ("bf16", "f32")
    assert manifest.plan_of(manifest.entries[built[0].cell]) == built[0].plan


def test_lock_lists_every_cubin_once(selection: Selection, built: list[BuiltCell]) -> None:
    """cubins.lock has hash, size, SM, kernel and toolchain of each distinct cubin, in a fixed order."""
    store, admitted = selection.workspace.store, [(cell, _row_of(cell)) for cell in built]
    data = package.lock(admitted, store)
    assert data == package.lock(admitted[::-1], store)
    for cell in built:
        for artifact in cell.artifacts:
            assert data.count(artifact.cubin.encode()) == 1


LIST = "triangle_multiplicative_update/sm_90a.toml"


@pytest.mark.parametrize(
    ("stage", "file", "text", "expected"),
    [
        ("admit", "policy.toml", None, "expected a table for every op; found [Errno 2]"),
        ("report", "policy.toml", "[x", "expected a table for every op; found Expected"),
        ("admit", "policy.toml", "", "expected a table [triangle_multiplicative_update]; found none"),
        ("admit", "policy.toml", "[triangle_multiplicative_update]\nmodes = []\n", "missing 9 required"),
        ("admit", LIST, "[[cell", "restore it (`git checkout`)"),
        ("package", LIST, "[[cell", "restore it (`git checkout`)"),
    ],
)
def test_a_damaged_committed_file_is_a_sentence(
    small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str, file: str, text: str | None,
    expected: str,
) -> None:  # fmt: skip
    """Policy and allow-lists that do not parse, or say nothing of the op: the stage that reads them names the file."""
    workspace = small.selection.workspace
    copy = tmp_path / "allowlists"
    shutil.copytree(workspace.allowlists, copy)
    (copy / file).unlink()
    if text is not None:
        (copy / file).write_text(text)
    monkeypatch.setenv("KF_ALLOWLISTS", str(copy))
    monkeypatch.setenv("KF_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KF_STORE", str(workspace.store_root))
    done = CliRunner().invoke(main, [stage, "--sm", "sm_90a", "--cell", "B1.N64.C64.D64/incoming/mask"])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert Path(file).name in done.output and expected in done.output
