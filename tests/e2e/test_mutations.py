"""Mutations: every synchronisation dropped and indices shifted in each kernel; each meaningful mutant is caught."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kernel_factory import mutants, mutate, pipeline, sample
from kernel_factory.bench import Bench, Target
from kernel_factory.built import BuiltCell
from kernel_factory.family import discover
from kernel_factory.mutate import Killed, Survived, Trial
from kernel_factory.pipeline import Selection

KERNELS = ("project", "contract", "finalize")


@pytest.fixture(scope="module")
def odd(selection: Selection, built: list[BuiltCell]) -> BuiltCell:
    """A cell that is not shipped: an N that is no multiple of a tile, and more K tiles than stages."""
    family = discover()["trimul_mma"]
    cell = replace(built[1].cell, N=200)
    with ThreadPoolExecutor(2) as pool:
        rows = replace(selection, rows=((family, cell),))
        (found,) = pipeline.build(rows, pool, lambda *_: None, lambda *_: None)
    return found


def _trial(selection: Selection, built: BuiltCell, index: int) -> Trial:
    store = selection.workspace.store
    texts = tuple(store.blob(artifact.ptx).decode() for artifact in built.artifacts)
    bench = Bench.of(built, texts, seed=7)
    inputs = bench.reference.inputs(built.cell, "random", 7)
    staged = bench.expectation.Staged(built.cell, inputs, torch.float64)
    target = Target(bench=bench, index=index, blocks=sample.choose(built.plan.launches[index].grid, 4, 7))
    return Trial.of_target(target, inputs, staged, texts[index])


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_the_kernel_itself_survives(selection: Selection, odd: BuiltCell, index: int) -> None:
    """The unbroken kernel passes in every mode: a kill below is the mutation's doing."""
    trial = _trial(selection, odd, index)
    assert trial.fate() == Survived()


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_broken_synchronisation_is_caught(selection: Selection, odd: BuiltCell, index: int) -> None:
    """Each barrier, commit and wait, dropped or weakened, is needed, covered by others, or orders nothing."""
    trial = _trial(selection, odd, index)
    broken = [*mutants.drops(trial.ptx), *mutants.weakenings(trial.ptx)]
    assert {mutant.kind for mutant in broken} == {"drop", "weaken"}
    survivors = [mutant for mutant in broken if trial.fate(mutant) == Survived()]
    excused = mutate.excuses(trial, survivors)
    assert [f"{m.kind} {m.line}: {m.statement}" for m in survivors if excused[m] == Survived()] == []


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_shifted_index_is_caught(selection: Selection, odd: BuiltCell, index: int) -> None:
    """An access that is 16 bytes off is wrong numbers or a finding, whatever it accesses."""
    trial = _trial(selection, odd, index)
    broken = list(mutants.shifts(trial.ptx))
    assert len(broken) >= 4
    assert [m.statement for m in broken if not isinstance(trial.fate(m), Killed)] == []
