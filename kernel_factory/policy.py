"""Policy: what an op demands of its evidence, read from allowlists/policy.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path


class PolicyError(ValueError):
    """A policy file that cannot be read, or says nothing of an op."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The bars of one op. Ratios and relative errors, except ``stack_bytes``.

    ``worst_row_of`` overrides ``model_worst_row`` for the input sets that it names. ``float32_parameters``: how far
    from the oracle a cell may be that rounds float32 parameters, for the sets that it names and, as ``oracle``, for
    the others; without it no cell admits them.
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
    float32_parameters: dict[str, float] = field(default_factory=dict)


def read_policy(path: Path) -> dict[str, Policy]:
    """Every op's policy. Raises PolicyError naming the file, the op and the field."""
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: expected a table for every op; found {error}") from error
    policies = {}
    for op, table in tables.items():
        try:
            policies[op] = Policy(**{**table, "modes": tuple(table["modes"])})
        except (KeyError, TypeError) as error:
            raise PolicyError(f"{path.name}: [{op}]: {error}") from error
    return policies


def policy_of(path: Path, op: str) -> Policy:
    """What the file says of one op. Raises PolicyError."""
    policies = read_policy(path)
    if op not in policies:
        raise PolicyError(f"{path}: expected a table [{op}]; found {', '.join(policies) or 'none'}")
    return policies[op]
