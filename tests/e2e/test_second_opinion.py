"""A static verifier that knows nothing of the emulator agrees with it, on right kernels and on broken ones."""

from __future__ import annotations

import pytest

from kernel_factory import mutants, second_opinion
from kernel_factory.built import BuiltCell
from kernel_factory.pipeline import Selection


def _texts(selection: Selection, built: BuiltCell) -> list[str]:
    return [selection.workspace.store.blob(artifact.ptx).decode() for artifact in built.artifacts]


@pytest.mark.parametrize("index", range(3), ids=("project", "contract", "finalize"))
def test_kernels_are_proved_race_free(selection: Selection, built: list[BuiltCell], index: int) -> None:
    """Every schedule of a kernel's first block is well synchronized and free of races."""
    cell = built[2]
    found = second_opinion.ask(cell.plan.launches[index], _texts(selection, cell)[index])
    assert (found.result, found.synchronization, found.memory) == ("race_free", "passed", "passed"), found.said


def test_a_dropped_barrier_is_a_race_there_too(selection: Selection, built: list[BuiltCell]) -> None:
    """The contraction without its mainloop barrier: the static proof fails where the emulator reports a race."""
    cell = built[2]
    ptx = _texts(selection, cell)[1]
    barrier = next(mutant for mutant in mutants.drops(ptx) if mutant.statement.startswith("bar.sync"))
    found = second_opinion.ask(cell.plan.launches[1], mutants.broken(ptx, barrier))
    assert found.result != "race_free"
