"""Report: per SM what was admitted, the worst figures, and the size of the cubins. Figures come from evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kernel_factory.admit import Admitted, Verdict
from kernel_factory.built import BuiltCell
from kernel_factory.evidence import Evidence

SECTOR: Final = 32  # bytes


@dataclass(frozen=True, kw_only=True)
class Reread:
    """How many times one launch reads one operand, at one N."""

    kernel: str
    operand: str
    n: int
    times: float


@dataclass(frozen=True, kw_only=True)
class SmSummary:
    """One row of the table. Errors are relative norms; ``cubin_bytes`` counts each cubin once."""

    sm: str
    admitted: int
    cells: int
    worst_error: float
    worst_error_set: str
    worst_row: float
    traffic: dict[str, float]
    rereads: Reread
    wavefronts: float
    spilled: int
    registers: int
    cubins: int
    cubin_bytes: int


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One cell with its evidence and the verdict on it."""

    built: BuiltCell
    evidence: Evidence
    verdict: Verdict


def summarise(rows: Iterable[Judged], sizes: dict[str, int]) -> list[SmSummary]:
    """One summary per SM. ``sizes`` maps a cubin's sha256 to its bytes."""
    by_sm: dict[str, list[Judged]] = {}
    for row in rows:
        by_sm.setdefault(row.built.cell.sm, []).append(row)
    return [_summary(sm, group, sizes) for sm, group in by_sm.items()]


def _summary(sm: str, group: list[Judged], sizes: dict[str, int]) -> SmSummary:
    figures = [(f, name) for row in group for name, f in row.evidence.numerics.items()]
    launches = [launch for row in group for launch in row.evidence.launches]
    cubins = {launch["cubin"] for launch in launches}
    worst, name = max((f["model_norm"], name) for f, name in figures)
    return SmSummary(
        sm=sm,
        admitted=sum(isinstance(row.verdict, Admitted) for row in group),
        cells=len(group),
        worst_error=worst,
        worst_error_set=name,
        worst_row=max(f["model_worst_row"] for f, _ in figures),
        traffic=_worst_traffic(launches),
        rereads=max((found for row in group for found in rereads(row)), key=lambda found: found.times),
        wavefronts=max(launch["counters"]["wavefront_ratio"] for launch in launches),
        spilled=max(launch["facts"]["stack_bytes"] for launch in launches),
        registers=max(launch["facts"]["registers"] for launch in launches),
        cubins=len(cubins),
        cubin_bytes=sum(sizes[cubin] for cubin in cubins),
    )


def _worst_traffic(launches: list[dict[str, Any]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for launch in launches:
        kernel, ratio = launch["kernel"], launch["counters"]["traffic_ratio"]
        worst[kernel] = max(worst.get(kernel, 0.0), ratio)
    return worst


def rereads(row: Judged) -> Iterator[Reread]:
    """How often a whole launch reads each data operand: sectors, scaled up from the sample, over the operand's own.

    A tiled contraction reads each operand once per tile across the other: ceil(N / tile) times.
    """
    for launch in row.evidence.launches:
        for name, ways in launch["counters"]["memory"].items():
            if "read" in ways and not name.endswith(("weight", "bias")):
                own = row.built.plan.buffer(name).nbytes / SECTOR
                times = ways["read"]["sectors"] / launch["fraction"] / own
                yield Reread(kernel=launch["kernel"], operand=name, n=row.built.cell.N, times=round(times, 2))
