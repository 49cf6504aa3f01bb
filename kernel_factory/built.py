"""BuiltCell: a cell with its captured Plan, its artifacts and their facts: what later stages start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kf_runtime.cell import Cell
from kf_runtime.plan import Plan

from kernel_factory.artifact import Artifact, Facts


@dataclass(frozen=True, kw_only=True)
class BuiltCell:
    """One compiled and captured cell. ``artifacts`` and ``facts`` run in step with ``plan.launches``."""

    cell: Cell
    family: str
    plan: Plan
    artifacts: tuple[Artifact, ...]
    facts: tuple[Facts, ...]

    @property
    def product(self) -> str:
        """The product that emulated evidence of this cell names."""
        return f"KF Emulated {self.cell.sm}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "cell": self.cell.key,
            "family": self.family,
            "plan": self.plan.to_json(),
            "artifacts": [artifact.to_json() for artifact in self.artifacts],
            "facts": [facts.to_json() for facts in self.facts],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BuiltCell:
        """The inverse of ``to_json``."""
        return cls(
            cell=Cell.parse(data["cell"]),
            family=data["family"],
            plan=Plan.from_json(data["plan"]),
            artifacts=tuple(Artifact.from_json(a) for a in data["artifacts"]),
            facts=tuple(Facts.from_json(f) for f in data["facts"]),
        )
