"""Trial: one cell run for its author: every launch alone, on the model's values, in every mode.

What `kf run` shows: errors and where the worst elements lie, findings, counters by buffer and by
PTX line, registers, shared memory, occupancy, and a roofline estimate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from kernel_factory import emulator, occupancy, roofline
from kernel_factory.artifact import Facts
from kernel_factory.bench import MODES, Bench, Target, affordable, compare, counted, launch_target, within_bars

Sources = dict[int, str]
BUDGET = 20_000_000  # thread-instructions a launch and mode
WORST = 5


@dataclass(frozen=True, kw_only=True)
class Bars:
    """What the op's policy allows beside errors: shared-memory wavefronts over ideal, sectors over distinct ones."""

    wavefronts: float
    traffic: dict[str, float]


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
    """One launch of the cell, as it ran. ``sources``: where PTX lines come from; ``complaints``: what policy bars."""

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
    complaints: tuple[str, ...] = ()
    sources: Sources = field(default_factory=dict)

    @property
    def accurate(self) -> bool:
        """Whether every figure is within the bars."""
        return all(within_bars(figures) for figures in self.figures.values())

    @property
    def right(self) -> bool:
        """Accurate, and no finding in any mode."""
        return self.accurate and not any(self.findings.values())

    @property
    def admissible(self) -> bool:
        """Right, and nothing of it that the policy bars."""
        return self.right and not self.complaints


def run(bench: Bench, ptx: tuple[str, ...], bars: Bars) -> list[LaunchTrial]:
    """Every launch of a cell in every mode; small grids whole, larger ones sampled."""
    cell = bench.built.cell
    inputs = bench.reference.inputs(cell, "random", bench.seed)
    staged = bench.expectation.Staged(cell, inputs, torch.float32)
    targets = [affordable(bench, index, inputs, staged, BUDGET) for index in range(len(bench.launches))]
    return [_launch(target, ptx[target.index], inputs, staged, bars) for target in targets]


def _launch(target: Target, ptx: str, inputs: Any, staged: Any, bars: Bars) -> LaunchTrial:
    bench, index = target.bench, target.index
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
        complaints=tuple(_complaints(target.launch.kernel, counters, bars)),
    )


def _complaints(kernel: str, counters: dict[str, Any], bars: Bars) -> Iterator[str]:
    """What the policy would reject for its counters."""
    if counters["wavefront_ratio"] > bars.wavefronts:
        yield (
            f"bank conflicts: shared memory takes {counters['wavefront_ratio']:.2f} times the ideal wavefronts, at "
            f"most {bars.wavefronts:g} is admitted (the lines are marked below)\n"
            "    next: let a swizzle spread the lanes of an access over the banks, the same where bytes are written "
            "and where they are read"
        )
    allowed = bars.traffic.get(kernel)
    if allowed is not None and counters["traffic_ratio"] > allowed:
        yield (
            f"global memory: {counters['traffic_ratio']:.3f} sectors requested for each distinct one, at most "
            f"{allowed:g} is admitted\n    next: read and write whole 32-byte sectors, each once (see the table)"
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
    """The PTX lines that touch memory, those that cost most first: sectors and wavefronts together."""
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
    return tuple(sorted(rows, key=lambda row: -(row.sectors + row.wavefronts)))
