"""`kf run`: what an author sees of one cell, and an exit code that tells right from wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_factory import pipeline
from kernel_factory.built import BuiltCell
from kernel_factory.cli import main
from kernel_factory.occupancy import of

KEY = "triangle_multiplicative_update/inference/bf16.bf16/B1.N65.C64.D64/outgoing/mask/nobias/sm_90a"


def test_right_cell(tmp_path: Path) -> None:
    """A cell that is in no cells.toml runs in three modes and is right; figures are marked as estimates."""
    page = tmp_path / "run.html"
    done = CliRunner().invoke(main, ["run", "trimul_mma", "--cell", KEY, "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert done.output.count("race ") >= 3
    assert done.output.count("ESTIMATE") == 3
    assert done.output.rstrip().endswith("right")
    assert "finalize" in page.read_text()


def test_wrong_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error past the bar is shown with its place, and the exit code is 1."""
    honest = pipeline.try_cell

    def spoiled(*args: object) -> list[object]:
        launches = honest(*args)  # type: ignore[arg-type]
        return [replace(launches[0], figures={"lockstep": {"model_norm": 0.5, "model_worst_row": 2.0}}), *launches[1:]]

    monkeypatch.setattr(pipeline, "try_cell", spoiled)
    done = CliRunner().invoke(main, ["run", "trimul_mma", "--cell", KEY])
    assert done.exit_code == 1
    assert "WRONG" in done.output


@pytest.mark.parametrize(
    ("family", "key", "said"), [("no_such", KEY, "expected one of"), ("trimul_mma", "x", "cell key")]
)
def test_bad_arguments(family: str, key: str, said: str) -> None:
    """An unknown family or a broken key is a clear error, not a traceback."""
    done = CliRunner().invoke(main, ["run", family, "--cell", key])
    assert done.exit_code == 1
    assert said in done.output


def test_occupancy_by_hand(built: list[BuiltCell]) -> None:
    """168 registers and 128 threads on sm_90a: 65536 / (168 * 32 * 4) is 3 blocks of 4 warps."""
    facts = replace(built[0].facts[0], registers=168, threads=128, static_shared=0, dynamic_shared=32768)
    found = of(facts, "sm_90a")
    assert (found.blocks, found.limit) == (3, "registers")
    assert found.share == 3 * 128 / 2048
    assert of(replace(facts, dynamic_shared=98304), "sm_89").limit == "shared memory"
