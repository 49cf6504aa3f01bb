"""Families that an author has broken: one sentence that says what, expected, found and where; never a traceback."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kf_runtime.plan import Buffer

from kernel_factory import families, scaffold, validate
from kernel_factory.built import BuiltCell
from kernel_factory.cli import main
from kernel_factory.emulator.errors import PtxError
from kernel_factory.family import CellPlan, FamilyError, KernelSpec, Step, discover
from kernel_factory.pipeline import Selection

NAME = "spoiled"
KEY = "residual_layer_norm/inference/bf16.bf16/B1.N65.C128.D128/none/nomask/nobias/sm_90a"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scaffolded family in a folder that the factory finds beside its own."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    made = scaffold.create(tmp_path, NAME, "residual_layer_norm")
    yield made
    for module in [name for name in sys.modules if f"families.{NAME}" in name]:
        del sys.modules[module]
    vars(families).pop(NAME, None)


def said(*arguments: str) -> str:
    """What `kf` says as it fails with exit code 1, without a traceback."""
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), done.output
    assert done.output.startswith("Error: ")
    return done.output


def spoil(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


CELLS = (
    ("N = [64, 65]", "NN = [64, 65]", "expected a field N"),
    ("N = [64, 65]", "N = 65\nNN = 2", "unknown field 'NN'; expected one of phase"),
    ("N = [64, 65]", "N = [[64, 65]", "expected TOML with [[cells]] tables"),
    ("N = [64, 65]", "N = 64.0", "N: expected int; found 64.0"),
    ("N = [64, 65]", "N = true", "N: expected int; found True"),
    ("N = [64, 65]", "N = [64, 64]", "expected every cell once; found residual_layer_norm"),
    ("N = [64, 65]", "N = 0", "Cell.N: expected at least 1; found 0"),
    ("mask = false", 'mask = "no"', "mask: expected bool; found 'no'"),
    ('= "none"', '= "nonne"', "Cell.direction: expected one of outgoing, incoming, none; found 'nonne'"),
    ('"sm_80"', '"sm80"', "sm: expected one of sm_80, sm_89"),
    ("[[cells]]", "[[cell]]", "expected [[cells]] tables alone; found cell"),
    ("[[cells]]", "[cells]", "expected [[cells]] tables alone"),
)


@pytest.mark.parametrize(("old", "new", "expected"), CELLS)
def test_a_typo_in_cells_toml_is_named(folder: Path, old: str, new: str, expected: str) -> None:
    """File, table and field; nothing is listed that no kernel could serve."""
    spoil(folder / "cells.toml", old, new)
    found = said("cells", "--family", NAME)
    assert f"{NAME}/cells.toml" in found and expected in found


FOLDERS: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
    ("gone", lambda f: (f / "cells.toml").unlink(), "expected TOML with [[cells]] tables; found [Errno 2]"),
    ("raises", lambda f: (f / "plan.py").write_text("{}['x']"), "does not import: KeyError: 'x' (raised at plan.py:1)"),
    ("syntax", lambda f: (f / "plan.py").write_text("x = = 1"), "SyntaxError: invalid syntax (plan.py, line 1)"),
    ("none", lambda f: (f / "__init__.py").write_text(""), "expected FAMILY, a Family named 'spoiled'; found none"),
    ("other", lambda f: spoil(f / "__init__.py", f'name="{NAME}"', 'name="b"'), "found one named 'b'"),
    ("op", lambda f: spoil(f / "__init__.py", 'op="residual', 'op="residue'), "op of a family: expected one of"),
    (
        "direction",
        lambda f: spoil(f / "cells.toml", '= "none"', '= "incoming"'),
        "direction of residual_layer_norm: expected one of none; found 'incoming'",
    ),
)


@pytest.mark.parametrize(("harm", "expected"), [case[1:] for case in FOLDERS], ids=[case[0] for case in FOLDERS])
def test_a_broken_folder_is_named(folder: Path, harm: Callable[[Path], Any], expected: str) -> None:
    """A family that does not import, or is not what its folder says; `kf new` beside it says so too."""
    harm(folder)
    assert expected in said("cells", "--family", NAME)
    if "families/" in expected:
        assert expected in said("new", "another", "--op", "residual_layer_norm")


def test_plans_that_no_launch_could_be_made_of() -> None:
    """A CellPlan says which field is wrong as it is made, before anything is compiled."""
    buffers = (Buffer.contiguous("x", "input", "bf16", (8,)), Buffer.contiguous("out", "output", "bf16", (8,)))
    step = Step(spec=KernelSpec.of(NAME, "k"), operands=("x", "out"), scalars=(1,))
    good = CellPlan(buffers=buffers, steps=(step,))
    for change, expected in (
        ({"steps": ()}, "steps: expected at least one"),
        ({"buffers": (*buffers, buffers[0])}, "expected every name once"),
        ({"buffers": (buffers[0], replace(buffers[1], role="scratch"))}, "expected one of role output; found none"),
        ({"steps": (replace(step, operands=("x", "oat")),)}, "expected buffers among x, out; found oat"),
        ({"steps": (replace(step, operands=("x",)),)}, "expected a step that has out"),
        ({"steps": (replace(step, scalars=(2**40,)),)}, "scalars: expected Int32 values"),
        ({"steps": (replace(step, scalars=("1",)),)}, "scalars: expected Int32 values"),
    ):
        with pytest.raises(ValueError, match=expected):
            replace(good, **change)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("return None", "plan: expected a CellPlan; found NoneType"),
        ("return 1 // 0", "no plan for residual_layer_norm/"),
        ("raise ValueError('C: expected 32')", "C: expected 32"),
    ],
)
def test_a_plan_that_is_none(folder: Path, plan: str, expected: str) -> None:
    """`kf build` and `kf run` name the family, the cell and what its plan did."""
    spoil(folder / "plan.py", "    if cell.C not in", f"    {plan}\n    if cell.C not in")
    assert expected in said("build", "--family", NAME, "--sm", "sm_90a")
    assert expected in said("run", NAME, "--cell", KEY)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (KEY.replace("sm_90a", "sm_90"), "on one of sm_80, sm_89, sm_90a"),
        (KEY.replace("residual_layer_norm", "triangle"), "expected a cell of residual_layer_norm on one of"),
        (KEY.replace("none", "outgoing"), f"spoiled: expected {KEY}; found"),
        (KEY.replace("nomask", "mask"), f"spoiled: expected {KEY}; found"),
        (KEY.replace("D128", "D64"), f"spoiled: expected {KEY}; found"),
        (KEY.replace("inference", "forward"), f"spoiled: expected {KEY}; found"),
    ],
)
def test_a_key_that_the_family_cannot_serve(folder: Path, key: str, expected: str) -> None:
    """Another op's cell, an SM that no kernel is built for, a call that the op does not have."""
    assert expected in said("run", NAME, "--cell", key)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda file: file.unlink(), "model.py does not import: ModuleNotFoundError"),
        (lambda file: spoil(file, "WRITES =", "WRITE ="), "expected model, Staged, owned, WRITES.*; found no WRITES"),
    ],
)
def test_a_model_that_is_not_there(folder: Path, harm: Callable[[Path], Any], expected: str) -> None:
    """The module that says what kernels should compute is asked for by name."""
    harm(folder / "model.py")
    with pytest.raises(FamilyError, match=expected):
        _ = discover()[NAME].expectation


def test_ptx_that_the_emulator_lacks(
    selection: Selection, built: list[BuiltCell], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kf validate` hears of it from a worker's process: the cell, the line and the reason, not a broken pool."""

    def lacking(benches: object) -> None:
        raise PtxError(7, "frobnicate.b32 %r1;", "no such opcode")

    monkeypatch.setattr(validate, "chained", lacking)
    monkeypatch.setattr(validate, "_measure_parameters", lambda store, task: None)
    small = [cell for cell in built if validate.is_chained(cell)][:1]
    (task,) = validate.tasks(selection.workspace.store_root, small, reroll=123456)
    with pytest.raises(validate.Unrunnable) as caught:
        validate.run_task(task)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert str(again).startswith(str(small[0].cell)) and "PTX line 7: no such opcode" in str(again)


def test_no_word_of_python_is_a_family(tmp_path: Path) -> None:
    """The error says that keywords are not names."""
    with pytest.raises(scaffold.ScaffoldError, match="no Python keyword; found 'class'"):
        scaffold.create(tmp_path, "class", "residual_layer_norm")


def test_the_shipped_families_are_whole() -> None:
    """The checks hold for what is shipped."""
    for family in discover().values():
        assert all(family.planned(cell).steps for cell in family.cells())
