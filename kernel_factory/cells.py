"""Cells of a family: the cells.toml beside its sources, which lists exactly the calls that it serves."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from kf_runtime.cell import Cell

from kernel_factory.toolchain import SMS

_FIELDS: Final = {field.name: field for field in fields(Cell) if field.name != "op"}
_NEEDED: Final = {name for name, field in _FIELDS.items() if field.default is MISSING}
_TYPES: Final[dict[str, type]] = {**dict.fromkeys("BNCD", int), "mask": bool, "biases": bool}


class CellsError(ValueError):
    """A cells.toml that lists no cells, or something else."""


def read_cells(path: Path, op: str) -> list[Cell]:
    """The product of every ``[[cells]]`` table, in file order.

    A field holds a value or a list of values. Raises CellsError naming file, table and field.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CellsError(f"{name}: expected TOML with [[cells]] tables; found {error}") from error
    tables = found.get("cells")
    if set(found) != {"cells"} or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise CellsError(f"{name}: expected [[cells]] tables alone; found {', '.join(found) or 'nothing'}")
    cells: dict[Cell, None] = {}
    for index, table in enumerate(tables):
        for cell in _cells(f"{name}: cells[{index}]", table, op):
            if cell in cells:
                raise CellsError(f"{name}: cells[{index}]: expected every cell once; found {cell} again")
            cells[cell] = None
    return list(cells)


def _cells(where: str, table: dict[str, Any], op: str) -> Iterator[Cell]:
    for name in sorted(_NEEDED - set(table)):
        raise CellsError(f"{where}: expected a field {name}; found {', '.join(table)}")
    rows: list[dict[str, Any]] = [{}]
    for name, values in table.items():
        choices = values if isinstance(values, list) else [values]
        _check(where, name, choices)
        rows = [{**row, name: value} for value in choices for row in rows]
    for row in rows:
        try:
            yield Cell(op=op, **row)
        except ValueError as error:
            raise CellsError(f"{where}: {error}") from error


def _check(where: str, name: str, values: list[Any]) -> None:
    if name not in _FIELDS:
        raise CellsError(f"{where}: unknown field {name!r}; expected one of {', '.join(_FIELDS)}")
    kind = _TYPES.get(name, str)
    for value in values:
        if type(value) is not kind:
            raise CellsError(f"{where}: {name}: expected {kind.__name__}; found {value!r}")
        if name == "sm" and value not in SMS:
            raise CellsError(f"{where}: sm: expected one of {', '.join(SMS)}; found {value!r}")
