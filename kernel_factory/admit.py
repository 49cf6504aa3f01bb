"""Admit: Evidence × Policy -> Verdict. A pure function; a figure that is missing rejects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernel_factory.evidence import Evidence
from kernel_factory.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """The evidence meets every bar, for parameters of these dtypes; ``declined`` says why not of others."""

    parameter_dtypes: tuple[str, ...] = ("bf16",)
    declined: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """The evidence misses these bars; each reason says figure, bar and found."""

    reasons: tuple[str, ...]


Verdict = Admitted | Rejected


def admit(evidence: Evidence, policy: Policy) -> Verdict:
    """Whether a cell may run on the product that its evidence names."""
    reasons = (*_findings(evidence, policy), *_numerics(evidence, policy))
    if evidence.level == "emulated":
        reasons += (*_facts(evidence, policy), *_counters(evidence, policy))
    if reasons:
        return Rejected(reasons=reasons)
    declined = tuple(_float32_parameters(evidence, policy))
    return Admitted(parameter_dtypes=("bf16",) if declined else ("bf16", "f32"), declined=declined)


def _over(what: str, found: Any, bar: float) -> Iterator[str]:
    """A reason where a figure is absent, not a number, or above its bar."""
    if not isinstance(found, int | float) or math.isnan(found):
        yield f"{what}: expected a figure of at most {bar:g}; found {found!r}"
    elif found > bar:
        yield f"{what}: expected at most {bar:g}; found {found:.4g}"


def _findings(evidence: Evidence, policy: Policy) -> Iterator[str]:
    modes = policy.modes if evidence.level == "emulated" else ("device",)
    for mode in modes:
        if mode not in evidence.findings:
            yield f"mode {mode}: expected a run; found none"
        elif evidence.findings[mode]:
            yield f"mode {mode}: {len(evidence.findings[mode])} findings, the first: {evidence.findings[mode][0]}"


def _numerics(evidence: Evidence, policy: Policy) -> Iterator[str]:
    if "random" not in evidence.numerics:
        yield "numerics: expected the input set 'random'; found none"
    for name, figures in evidence.numerics.items():
        yield from _over(f"{name}: error against the rounding model", figures.get("model_norm"), policy.model_norm)
        row_bar = policy.worst_row_of.get(name, policy.model_worst_row)
        yield from _over(f"{name}: worst row", figures.get("model_worst_row"), row_bar)
        if evidence.coverage == "per-launch":
            continue  # each launch starts from the model's values: there is no chained output to hold to the oracle
        bar = policy.oracle_over_model * figures.get("model_to_oracle", math.nan)
        yield from _over(f"{name}: error against the oracle", figures.get("oracle_norm"), bar)
        if name == "random":
            yield from _over("random: error against the oracle", figures.get("oracle_norm"), policy.oracle_random)


def _float32_parameters(evidence: Evidence, policy: Policy) -> Iterator[str]:
    """Why a cell may not round float32 parameters. The kernel's own distance from the model counts in full."""
    bars = policy.float32_parameters
    if "oracle" not in bars:
        yield "float32 parameters: the policy has no bar for them"
        return
    for name in evidence.numerics:
        if " (" in name:
            continue  # another mode's run of a set
        found = evidence.float32_parameters.get(name, math.nan) + evidence.numerics[name].get("model_norm", math.nan)
        yield from _over(f"float32 parameters, {name}: error against the oracle", found, bars.get(name, bars["oracle"]))


def _facts(evidence: Evidence, policy: Policy) -> Iterator[str]:
    for launch in evidence.launches:
        facts, kernel = launch["facts"], launch["kernel"]
        yield from _over(f"{kernel}: stack bytes (spills)", facts.get("stack_bytes"), policy.stack_bytes)
        if facts.get("forbidden_opcodes"):
            yield f"{kernel}: expected none of the slow opcodes; found {', '.join(facts['forbidden_opcodes'])}"


def _counters(evidence: Evidence, policy: Policy) -> Iterator[str]:
    for launch in evidence.launches:
        counters, kernel = launch.get("counters", {}), launch["kernel"]
        if kernel in policy.traffic:
            yield from _over(f"{kernel}: traffic ratio", counters.get("traffic_ratio"), policy.traffic[kernel])
        yield from _over(f"{kernel}: wavefront ratio", counters.get("wavefront_ratio"), policy.wavefronts)
