"""Evidence: what was seen of one cell's exact bytes on one named product.

Plain data in, plain data out: the digest covers every byte of the canonical JSON, so an
evidence file cannot be edited without its allow-list row noticing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kf_runtime.cell import Cell

from kernel_factory.store import canonical, digest, write_atomically

LEVELS: Final = ("emulated", "device", "timed")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Facts, numerics, findings and counters of one cell on one product.

    ``launches``: per launch its kernel, cubin and PTX hashes, facts and counters.
    ``numerics``: per input set and mode, error figures.
    ``findings``: per mode, the texts of what the checks found; empty lists where they found nothing.
    ``timing``: microseconds, from a GPU only; empty otherwise.
    ``float32_parameters``: per input set, the rounding model's error against the oracle of float32 parameters that
    the call rounds; empty where it was not measured.
    """

    cell: Cell
    level: str
    product: str
    toolchain: str
    seed: int
    coverage: str
    launches: tuple[dict[str, Any], ...]
    numerics: dict[str, Any]
    findings: dict[str, list[str]]
    timing: dict[str, Any] = field(default_factory=dict)
    float32_parameters: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Evidence.level: expected one of {', '.join(LEVELS)}; found {self.level!r}")
        if self.timing and self.product.startswith("KF Emulated"):
            raise ValueError(f"Evidence.timing: a time counts only if it came from a GPU; product {self.product!r}")

    @property
    def cubins(self) -> tuple[str, ...]:
        """The sha256 of each launch's cubin, in order."""
        return tuple(launch["cubin"] for launch in self.launches)

    def to_json(self) -> dict[str, Any]:
        """Plain data; what was not measured is left out."""
        plain = {**vars(self), "cell": self.cell.key, "launches": list(self.launches)}
        return {name: value for name, value in plain.items() if value or name != "float32_parameters"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Evidence:
        """The inverse of ``to_json``."""
        return cls(**{**data, "cell": Cell.parse(data["cell"]), "launches": tuple(data["launches"])})

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON."""
        return digest(self.to_json())


def file_name(cell: Cell) -> str:
    """The name of a cell's evidence file: the key without its SM, slashes turned into ``_``."""
    return cell.key.rsplit("/", 1)[0].split("/", 1)[1].replace("/", "_") + ".json"


def path_of(folder: Path, cell: Cell, level: str) -> Path:
    """Where evidence of a cell is committed."""
    return folder / cell.op / level / cell.sm / file_name(cell)


def write(folder: Path, evidence: Evidence) -> Path:
    """Write an evidence file, atomically."""
    path = path_of(folder, evidence.cell, evidence.level)
    write_atomically(path, _readable(evidence.to_json()).encode())
    return path


def _readable(data: dict[str, Any]) -> str:
    """JSON with a line for every field and for every item of a field: a change reads as a small diff."""

    def field(name: str, value: Any) -> str:
        if isinstance(value, dict) and value:
            items = [f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(value.items())]
            return f" {json.dumps(name)}: {{\n" + ",\n".join(items) + "\n }"
        if isinstance(value, list) and value:
            return (
                f" {json.dumps(name)}: [\n" + ",\n".join("  " + json.dumps(v, sort_keys=True) for v in value) + "\n ]"
            )
        return f" {json.dumps(name)}: {json.dumps(value)}"

    return "{\n" + ",\n".join(field(name, data[name]) for name in sorted(data)) + "\n}\n"


class EvidenceError(ValueError):
    """A file that holds no evidence."""


def read(path: Path) -> Evidence:
    """Read an evidence file. Raises EvidenceError naming the file."""
    try:
        return Evidence.from_json(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{path}: expected an evidence file; {type(error).__name__}: {error}") from error


def read_many(path: Path) -> list[Evidence]:
    """Read a file that holds a list of evidence. Raises EvidenceError naming the file."""
    try:
        return [Evidence.from_json(item) for item in json.loads(path.read_text())]
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{path}: expected a list of evidence; {type(error).__name__}: {error}") from error


def same(a: Evidence, b: Evidence) -> bool:
    """Whether two pieces of evidence are equal to the byte."""
    return canonical(a.to_json()) == canonical(b.to_json())
