"""Allow-list: the admitted cells of one op on one SM, written by the machine and reviewed as a diff."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from kf_runtime.cell import Cell
from kf_runtime.manifest import BF16_ALONE

from kernel_factory.store import write_atomically

_HEADER = "# Written by `kf admit`. Review it as a diff; do not edit it.\n"


class AllowlistError(ValueError):
    """A file that is no allow-list."""


@dataclass(frozen=True, kw_only=True)
class Proved:
    """One piece of evidence behind a row: the product it names, its level and its digest."""

    product: str
    level: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One admitted cell: the cubins of its launches in order, the evidence for them, the dtypes of parameters."""

    cell: Cell
    cubins: tuple[str, ...]
    proofs: tuple[Proved, ...]
    parameter_dtypes: tuple[str, ...] = BF16_ALONE


def path_of(folder: Path, op: str, sm: str) -> Path:
    """The file of an op's allow-list on an SM."""
    return folder / op / f"{sm}.toml"


def to_bytes(rows: list[Row]) -> bytes:
    """The file's bytes: rows in key order, so that equal lists are equal bytes."""
    tables = [
        {
            "key": row.cell.key,
            "parameter_dtypes": list(row.parameter_dtypes),
            "cubins": list(row.cubins),
            "proofs": [dict(vars(proof)) for proof in row.proofs],
        }
        for row in sorted(rows, key=lambda row: row.cell)
    ]
    return (_HEADER + tomli_w.dumps({"cell": tables})).encode()


def write(folder: Path, op: str, sm: str, rows: list[Row]) -> bool:
    """Write an allow-list; whether its bytes changed."""
    path, data = path_of(folder, op, sm), to_bytes(rows)
    if path.exists() and path.read_bytes() == data:
        return False
    write_atomically(path, data)
    return True


def read(folder: Path, op: str, sm: str) -> list[Row]:
    """The rows of an allow-list, none where there is no file. Raises AllowlistError naming the file."""
    path = path_of(folder, op, sm)
    if not path.exists():
        return []
    try:
        tables = tomllib.loads(path.read_text()).get("cell", [])
        return [
            Row(
                cell=Cell.parse(table["key"]),
                cubins=tuple(table["cubins"]),
                proofs=tuple(Proved(**proof) for proof in table["proofs"]),
                parameter_dtypes=tuple(table.get("parameter_dtypes", BF16_ALONE)),
            )
            for table in tables
        ]
    except (KeyError, TypeError, ValueError) as error:
        told = f"{path}: expected an allow-list written by `kf admit`; {error}; restore it (`git checkout`)"
        raise AllowlistError(told) from error
