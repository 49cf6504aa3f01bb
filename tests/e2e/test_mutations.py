"""Mutations: every synchronisation dropped and indices shifted in each kernel; each meaningful mutant is caught."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kernel_factory import mutate, pipeline, sample
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


def _trial(selection: Selection, built: BuiltCell, index: int) -> tuple[Trial, str]:
    store = selection.workspace.store
    texts = tuple(store.blob(artifact.ptx).decode() for artifact in built.artifacts)
    bench = Bench.of(built, texts, seed=7)
    inputs = bench.reference.inputs(built.cell, "random", 7)
    staged = bench.expectation.Staged(built.cell, inputs, torch.float64)
    target = Target(bench=bench, index=index, blocks=sample.choose(built.plan.launches[index].grid, 4, 7))
    return Trial(target=target, inputs=inputs, staged=staged), texts[index]


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_the_kernel_itself_survives(selection: Selection, odd: BuiltCell, index: int) -> None:
    """The unbroken kernel passes in every mode: a kill below is the mutation's doing."""
    trial, ptx = _trial(selection, odd, index)
    assert trial.fate(mutate.Mutant(kind="none", lines=(), statement="", ptx=ptx)) == Survived()


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_dropped_synchronisation_is_caught(selection: Selection, odd: BuiltCell, index: int) -> None:
    """Each barrier and each asynchronous wait is needed, or covered by another that is needed in its stead."""
    trial, ptx = _trial(selection, odd, index)
    mutants = list(mutate.drops(ptx))
    assert mutants
    survivors = [mutant for mutant in mutants if trial.fate(mutant) == Survived()]
    covered = mutate.covering(trial, ptx, survivors)
    assert [f"{m.lines[0]}: {m.statement}" for m in survivors if m.lines[0] not in covered] == []


@pytest.mark.parametrize("index", range(3), ids=KERNELS)
def test_shifted_index_is_caught(selection: Selection, odd: BuiltCell, index: int) -> None:
    """An access that is 16 bytes off is wrong numbers or a finding, whatever it accesses."""
    trial, ptx = _trial(selection, odd, index)
    mutants = list(mutate.shifts(ptx))
    assert len(mutants) >= 4
    assert [m.statement for m in mutants if not isinstance(trial.fate(m), Killed)] == []
