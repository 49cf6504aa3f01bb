"""Trial: one cell run for its author: every launch alone, on the model's values, in every mode.

What `kf run` shows: errors and where the worst elements lie, findings, counters by buffer and by
PTX line, registers, shared memory, occupancy, and a roofline estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kernel_factory import emulator, occupancy, roofline
from kernel_factory.artifact import Facts
from kernel_factory.bench import MODES, Bench, Target, affordable, compare, counted, launch_target, within_bars
from kernel_factory.built import BuiltCell

BUDGET = 20_000_000  # thread-instructions a launch and mode
WORST = 5
LINES = 8


@dataclass(frozen=True, kw_only=True)
class Worst:
    """One element of a launch's output: where, what came and what the model expects."""

    buffer: str
    index: tuple[int, ...]
    found: float
    expected: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """One PTX line that touches memory: its text and what it asked for."""

    number: int
    text: str
    sectors: int
    wavefronts: int
    ideal: int


@dataclass(frozen=True, kw_only=True)
class LaunchTrial:
    """One launch of the cell, as it ran."""

    kernel: str
    fraction: float
    figures: dict[str, dict[str, float]]
    findings: dict[str, tuple[emulator.Finding, ...]]
    worst: tuple[Worst, ...]
    counters: dict[str, Any]
    lines: tuple[Line, ...]
    facts: Facts
    occupancy: occupancy.Occupancy
    estimate: roofline.Estimate

    @property
    def right(self) -> bool:
        """No finding in any mode, and every figure within the bars."""
        clean = not any(self.findings.values())
        return clean and all(within_bars(figures) for figures in self.figures.values())


def run(built: BuiltCell, ptx: tuple[str, ...], seed: int) -> list[LaunchTrial]:
    """Every launch of a cell in every mode; small grids whole, larger ones sampled."""
    bench = Bench.of(built, ptx, seed)
    inputs = bench.reference.inputs(built.cell, "random", seed)
    staged = bench.expectation.Staged(built.cell, inputs, torch.float32)
    return [_launch(bench, index, ptx[index], inputs, staged) for index in range(len(bench.launches))]


def _launch(bench: Bench, index: int, ptx: str, inputs: Any, staged: Any) -> LaunchTrial:
    target = affordable(bench, index, inputs, staged, BUDGET)
    runs = {mode: launch_target(target, inputs, staged, mode) for mode in MODES}
    found, result = runs[MODES[0]]
    facts, sm = bench.built.facts[index], bench.built.cell.sm
    fraction = len(target.blocks) / prod(target.launch.grid)
    counters = counted(result)
    return LaunchTrial(
        kernel=target.launch.kernel,
        fraction=fraction,
        figures={mode: compare(target, out, staged) for mode, (out, _) in runs.items()},
        findings={mode: seen.findings for mode, (_, seen) in runs.items()},
        worst=_worst(target, found, staged),
        counters=counters,
        lines=_lines(result, ptx),
        facts=facts,
        occupancy=occupancy.of(facts, sm),
        estimate=roofline.estimate({"counters": counters, "fraction": fraction}, sm),
    )


def _worst(target: Target, found: torch.Tensor, staged: Any) -> tuple[Worst, ...]:
    """The elements that are farthest from the model; an unwritten one (NaN) is farther than any."""
    rows = []
    for name, region in target.regions:
        got, want = found[region].double(), staged.expected(target.bench.built.cell, (name, region)).double()
        gap = (got - want).abs().nan_to_num(nan=torch.inf)
        flat = int(gap.argmax())
        inner = list(torch.unravel_index(torch.tensor(flat), gap.shape))
        place = tuple(i if isinstance(i, int) else i.start + int(inner.pop(0)) for i in region)
        rows.append((float(gap.flatten()[flat]), name, place, float(got.flatten()[flat]), float(want.flatten()[flat])))
    rows.sort(key=lambda row: -row[0])
    return tuple(Worst(buffer=n, index=p, found=g, expected=w) for _, n, p, g, w in rows[:WORST])


def _lines(result: emulator.Result, ptx: str) -> tuple[Line, ...]:
    """The PTX lines that cost most: sectors and wavefronts together."""
    texts = ptx.splitlines()
    rows = []
    for number, line in result.counters.lines.items():
        shared: dict[str, Any] = line.get("shared", {})  # type: ignore[assignment]
        spots: dict[str, dict[str, int]] = line.get("global", {})  # type: ignore[assignment]
        sectors = sum(spot["sectors"] for spot in spots.values())
        cost = (shared.get("wavefronts", 0), shared.get("ideal", 0))
        rows.append(
            Line(number=number, text=texts[number - 1].strip(), sectors=sectors, wavefronts=cost[0], ideal=cost[1])
        )
    return tuple(sorted(rows, key=lambda row: -(row.sectors + row.wavefronts))[:LINES])
