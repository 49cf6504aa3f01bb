"""Report: per SM what was admitted, the worst figures, and the size of the cubins. Figures come from evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kernel_factory.admit import Admitted, Verdict
from kernel_factory.evidence import Evidence


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
    wavefronts: float
    spilled: int
    registers: int
    cubins: int
    cubin_bytes: int


def summarise(rows: Iterable[tuple[Evidence, Verdict]], sizes: dict[str, int]) -> list[SmSummary]:
    """One summary per SM. ``sizes`` maps a cubin's sha256 to its bytes."""
    by_sm: dict[str, list[tuple[Evidence, Verdict]]] = {}
    for evidence, verdict in rows:
        by_sm.setdefault(evidence.cell.sm, []).append((evidence, verdict))
    return [_summary(sm, group, sizes) for sm, group in by_sm.items()]


def _summary(sm: str, group: list[tuple[Evidence, Verdict]], sizes: dict[str, int]) -> SmSummary:
    figures = [(f, name) for evidence, _ in group for name, f in evidence.numerics.items()]
    launches = [launch for evidence, _ in group for launch in evidence.launches]
    cubins = {launch["cubin"] for launch in launches}
    worst, name = max((f["model_norm"], name) for f, name in figures)
    return SmSummary(
        sm=sm,
        admitted=sum(isinstance(verdict, Admitted) for _, verdict in group),
        cells=len(group),
        worst_error=worst,
        worst_error_set=name,
        worst_row=max(f["model_worst_row"] for f, _ in figures),
        traffic=_worst_traffic(launches),
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
