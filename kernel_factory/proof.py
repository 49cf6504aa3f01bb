"""Proof: emulated runs of built cells, as plain data.

Small cells run *chained*: whole, each launch on what the one before wrote. Larger ones run
*per-launch*: each launch on a seeded sample of its blocks that holds every corner and edge of the
grid, from the rounding model's values and against them. Every input set runs in lockstep; the
random set also runs warp-serial and under the race checker, which look at order, not at values.

Outputs and scratch are poisoned first: an element that a block leaves unwritten shows as a NaN.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Final

import torch

from kernel_factory import reference, sample
from kernel_factory.bench import MODES, Bench, Target, affordable, counted, label, modes_of, run_chain, run_target

CHAINED_UP_TO: Final = 128  # largest N that runs whole
BUDGET: Final = 60_000_000  # thread-instructions of a cell's sampled launches together, in one mode, random set
STRESS_SHARE: Final = 4  # the other sets run one in so many of those blocks, corners and edges included


def chained(benches: list[Bench]) -> list[dict[str, Any]]:
    """Proofs of one call on several variants of its code: inputs, model and oracle are shared."""
    first = benches[0]
    cell = first.built.cell
    proofs: list[dict[str, Any]] = [
        {"numerics": {}, "findings": {mode: [] for mode in MODES}, "counters": {}} for _ in benches
    ]
    for name in first.reference.input_sets(cell):
        inputs = first.reference.inputs(cell, name, first.seed)
        oracle = first.reference.oracle(cell, inputs)
        model = first.expectation.model(cell, inputs, torch.float64)["out"]
        for bench, proof in zip(benches, proofs, strict=True):
            for mode in modes_of(name):
                out, results = run_chain(bench, inputs, mode)
                for launch, result in zip(bench.launches, results, strict=True):
                    proof["findings"][mode] += [str(finding) for finding in result.findings]
                    if (name, mode) == ("random", MODES[0]):
                        proof["counters"][launch.kernel] = counted(result)
                proof["numerics"][label(name, mode)] = {
                    "model_norm": reference.relative_error(out, model),
                    "model_worst_row": reference.worst_row(out, model, bench.expectation.ROW_AXES["out"]),
                    "oracle_norm": reference.relative_error(out, oracle),
                    "model_to_oracle": reference.relative_error(model, oracle),
                }
    return proofs


def sampled(launches: list[tuple[Bench, int]]) -> list[dict[str, Any]]:
    """Proofs of single launches of calls that differ in direction and code alone; inputs and projection are shared."""
    bench = launches[0][0]
    proofs: list[dict[str, Any]] = [{"numerics": {}, "findings": {mode: [] for mode in MODES}} for _ in launches]
    targets: list[Target] = []
    for name in bench.reference.input_sets(bench.built.cell):
        inputs = bench.reference.inputs(bench.built.cell, name, bench.seed)
        staged = bench.expectation.Staged(bench.built.cell, inputs, torch.float32)
        if not targets:
            targets = [affordable(b, i, inputs, staged, BUDGET // len(b.launches)) for b, i in launches]
        for target, proof in zip(targets, proofs, strict=True):
            _add_set(proof, target if name == "random" else _fewer(target), name, inputs, staged)
    for target, proof in zip(targets, proofs, strict=True):
        proof["fraction"] = round(len(target.blocks) / prod(target.launch.grid), 4)
    return proofs


def _fewer(target: Target) -> Target:
    blocks = sample.choose(target.launch.grid, len(target.blocks) // STRESS_SHARE, target.bench.seed)
    return replace(target, blocks=blocks)


def _add_set(proof: dict[str, Any], target: Target, name: str, inputs: Any, staged: Any) -> None:
    for mode in modes_of(name):
        figures, result = run_target(target, inputs, staged, mode)
        proof["findings"][mode] += [str(finding) for finding in result.findings]
        proof["numerics"][label(name, mode)] = figures
        if (name, mode) == ("random", MODES[0]):
            proof["counters"] = counted(result)


def merge(kernels: list[str], proofs: list[dict[str, Any]]) -> dict[str, Any]:
    """A cell's proof from its launches' own: the worst figure of each set, every finding."""
    numerics: dict[str, dict[str, float]] = {}
    for proof in proofs:
        for name, figures in proof["numerics"].items():
            kept = numerics.setdefault(name, {})
            for figure, value in figures.items():
                kept[figure] = kept[figure] if kept.get(figure, -1.0) >= value else value  # a NaN is kept
    return {
        "numerics": numerics,
        "findings": {mode: [text for proof in proofs for text in proof["findings"][mode]] for mode in MODES},
        "counters": {kernel: proof["counters"] for kernel, proof in zip(kernels, proofs, strict=True)},
        "fraction": {kernel: proof["fraction"] for kernel, proof in zip(kernels, proofs, strict=True)},
    }
