"""Policy: what an op demands of its evidence, read from allowlists/policy.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The bars of one op. Ratios and relative errors, except ``stack_bytes``.

    ``worst_row_of`` overrides ``model_worst_row`` for the input sets that it names.
    """

    modes: tuple[str, ...]
    model_norm: float
    model_worst_row: float
    worst_row_of: dict[str, float]
    oracle_over_model: float
    oracle_random: float
    stack_bytes: int
    wavefronts: float
    traffic: dict[str, float]
    timed: dict[str, float]


def read_policy(path: Path) -> dict[str, Policy]:
    """Every op's policy. Raises ValueError naming the op and the field."""
    policies = {}
    for op, table in tomllib.loads(path.read_text()).items():
        try:
            policies[op] = Policy(**{**table, "modes": tuple(table["modes"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name}: [{op}]: {error}") from error
    return policies
