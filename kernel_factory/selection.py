"""Selection: the cells that a command works on, and the family that serves each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from kf_runtime.cell import Cell

from kernel_factory.family import Family, KernelSpec, discover
from kernel_factory.reference import REFERENCES
from kernel_factory.workspace import Workspace


class SelectionError(Exception):
    """The options name no family, SM or cell that exists."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The cells that a command works on."""

    workspace: Workspace
    rows: tuple[tuple[Family, Cell], ...]

    def specs(self) -> list[tuple[KernelSpec, str]]:
        """Every distinct (kernel, SM) of the cells, in a fixed order."""
        return sorted({(step.spec, cell.sm) for family, cell in self.rows for step in family.planned(cell).steps})


def select(
    workspace: Workspace, families: tuple[str, ...], sms: tuple[str, ...], patterns: tuple[str, ...]
) -> Selection:
    """The cells that match every filter that is given; a pattern is a glob within a key."""
    known = discover()
    rows = tuple((family, cell) for family in known.values() for cell in family.cells())
    require("family", families, known)
    require("SM", sms, {cell.sm for _, cell in rows})
    kept = tuple(
        (family, cell)
        for family, cell in rows
        if (not families or family.name in families) and (not sms or cell.sm in sms) and matches(cell, patterns)
    )
    for cell in {(cell.op, cell.direction): cell for _, cell in kept}.values():
        require_reference(cell)
    kept = _one_family_each(kept)
    if not kept:
        raise SelectionError(f"no cell matches {', '.join(patterns) or 'the filters'}; `kf cells` prints every key")
    return Selection(workspace=workspace, rows=kept)


def matches(cell: Cell, patterns: tuple[str, ...]) -> bool:
    """Whether a cell's key holds one of these texts or globs; any does where there are none."""
    return not patterns or any(fnmatch(cell.key, f"*{pattern}*") for pattern in patterns)


def _one_family_each(rows: tuple[tuple[Family, Cell], ...]) -> tuple[tuple[Family, Cell], ...]:
    """Without the cells of families that another of these supersedes. Raises SelectionError where two claim one."""
    claims: dict[Cell, list[Family]] = {}
    for family, cell in rows:
        claims.setdefault(cell, []).append(family)
    for cell, found in claims.items():
        beaten = {name for family in found for name in family.supersedes}
        claims[cell] = [family for family in found if family.name not in beaten]
        if len(claims[cell]) != 1:
            names = ", ".join(family.name for family in found)
            raise SelectionError(
                f"{cell}: expected one family to serve it; found {names}; name one with --family, "
                "or let one say `supersedes` in its __init__.py"
            )
    return tuple((family, cell) for family, cell in rows if claims[cell] == [family])


def require_reference(cell: Cell) -> None:
    """Raises SelectionError where the cell's op is not known, or is never called as the cell says."""
    require("op of a family", (cell.op,), REFERENCES)
    require(f"direction of {cell.op}", (cell.direction,), REFERENCES[cell.op].directions)


def require(what: str, asked: tuple[str, ...], known: Iterable[str]) -> None:
    """Raises SelectionError for the first name that is not a known one."""
    for name in asked:
        if name not in known:
            raise SelectionError(f"{what}: expected one of {', '.join(sorted(known))}; found {name!r}")
