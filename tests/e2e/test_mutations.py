"""Mutations: every synchronisation dropped and indices shifted in each kernel; each meaningful mutant is caught."""

from __future__ import annotations

import pytest
import torch

from kernel_factory import mutate, sample
from kernel_factory.bench import Bench, Target
from kernel_factory.built import BuiltCell
from kernel_factory.mutate import Killed, Survived, Trial
from kernel_factory.pipeline import Selection

KERNELS = ("project", "contract", "finalize")


def _trial(selection: Selection, built: BuiltCell, index: int) -> tuple[Trial, str]:
    store = selection.workspace.store
    texts = tuple(store.blob(artifact.ptx).decode() for artifact in built.artifacts)
    bench = Bench.of(built, texts, seed=7)
    inputs = bench.reference.inputs(built.cell, "random", 7)
    staged = bench.expectation.Staged(built.cell, inputs, torch.float64)
    target = Target(bench=bench, index=index, blocks=sample.choose(built.plan.launches[index].grid, 4, 7))
    return Trial(target=target, inputs=inputs, staged=staged), texts[index]


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
@pytest.mark.parametrize("cell", [0, 1, 2], ids=["n64", "n100", "d64"])
def test_the_kernel_itself_survives(selection: Selection, built: list[BuiltCell], cell: int, index: int) -> None:
    """The unbroken kernel passes in every mode: a kill below is the mutation's doing."""
    trial, ptx = _trial(selection, built[cell], index)
    assert trial.fate(mutate.Mutant(kind="none", lines=(), statement="", ptx=ptx)) == Survived()


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_dropped_synchronisation_is_caught(selection: Selection, built: list[BuiltCell], index: int) -> None:
    """Each barrier and each asynchronous wait is needed, or covered by another that is needed in its stead."""
    trial, ptx = _trial(selection, built[1], index)
    mutants = list(mutate.drops(ptx))
    assert mutants
    survivors = [mutant for mutant in mutants if trial.fate(mutant) == Survived()]
    covered = mutate.covering(trial, ptx, survivors)
    assert [f"{m.lines[0]}: {m.statement}" for m in survivors if m.lines[0] not in covered] == []


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_shifted_index_is_caught(selection: Selection, built: list[BuiltCell], index: int) -> None:
    """An access that is 16 bytes off is wrong numbers or a finding, whatever it accesses."""
    trial, ptx = _trial(selection, built[1], index)
    mutants = list(mutate.shifts(ptx))
    assert len(mutants) >= 4
    assert [m.statement for m in mutants if not isinstance(trial.fate(m), Killed)] == []
