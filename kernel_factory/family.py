"""Family: one kernel design that implements an op, and how the factory reaches it.

A family is a folder under ``families/`` that exports ``FAMILY``. ``plan`` is pure and imports
no compiler; ``kernels`` (the folder's ``kernel.py``) is imported only by the stages that
compile or capture.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kf_runtime.cell import Cell
from kf_runtime.plan import Buffer

import kernel_factory.families as families


@dataclass(frozen=True, kw_only=True, order=True)
class KernelSpec:
    """One kernel to compile: everything that is fixed at compile time, and nothing else.

    Equal specs on one SM are one cubin, however many cells use it. ``constants`` are sorted
    (name, value) pairs.
    """

    family: str
    kernel: str
    constants: tuple[tuple[str, int | bool | str], ...]

    @classmethod
    def of(cls, family: str, kernel: str, **constants: int | bool | str) -> KernelSpec:
        """A spec from keyword constants."""
        return cls(family=family, kernel=kernel, constants=tuple(sorted(constants.items())))

    def __getitem__(self, name: str) -> Any:
        return dict(self.constants)[name]

    @property
    def key(self) -> str:
        """Readable identity, for example ``trimul_mma.project[C=128,D=128,mask=True]``."""
        return f"{self.family}.{self.kernel}[{','.join(f'{k}={v}' for k, v in self.constants)}]"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch of a cell before capture: a kernel, its pointer operands and run-time integers.

    ``operands`` name buffers in the order of the host function's pointers; ``scalars`` are its
    Int32 arguments after them (the stream comes last).
    """

    spec: KernelSpec
    operands: tuple[str, ...]
    scalars: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """What a family plans for one cell: the buffer table and the steps in order."""

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """What ``kernel.py`` gives for a spec: a ``cute.jit`` host function and its pointers' dtypes.

    The function takes one ``cute.Pointer`` per operand (global memory, aligned to 16 bytes),
    ``scalars`` Int32 values, and a stream.
    """

    function: Callable[..., None]
    pointer_dtypes: tuple[str, ...]
    scalars: int


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kernel design. ``package`` is its import path; ``plan`` maps a cell to steps.

    ``supersedes`` names families of the same op whose cells this one takes over where both list them.
    """

    name: str
    op: str
    package: str
    plan: Callable[[Cell], CellPlan]
    supersedes: tuple[str, ...] = ()

    @property
    def kernels(self) -> ModuleType:
        """The module with ``host_entry(spec) -> HostEntry``; importing it loads the CuTe DSL."""
        return importlib.import_module(f"{self.package}.kernel")

    @property
    def expectation(self) -> ModuleType:
        """The module with ``model``, ``owned``, ``WRITES`` and ``ROW_AXES``: what the kernels should compute."""
        return importlib.import_module(f"{self.package}.model")

    def source_digest(self) -> str:
        """sha256 over what decides the family's machine code: its kernel sources and the compiler driver."""
        sources = [path for path in sorted(self.folder.glob("*.py")) if path.name != "model.py"]
        state = hashlib.sha256()
        for source in [*sources, Path(__file__).with_name("compile.py")]:
            state.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return state.hexdigest()

    @property
    def folder(self) -> Path:
        """Where the family lives."""
        return Path(str(importlib.import_module(self.package).__file__)).parent

    def cells(self) -> tuple[Cell, ...]:
        """The cells that ``cells.toml`` lists, in file order."""
        return tuple(read_cells(self.folder / "cells.toml", self.op))


def read_cells(path: Path, op: str) -> Iterator[Cell]:
    """The product of every ``[[cells]]`` table in a cells.toml.

    A field holds a value or a list of values. Raises ValueError naming file, table and field.
    """
    for index, table in enumerate(tomllib.loads(path.read_text())["cells"]):
        rows: list[dict[str, Any]] = [{}]
        for name, values in table.items():
            if name not in Cell.__dataclass_fields__:
                known = ", ".join(Cell.__dataclass_fields__)
                raise ValueError(f"{path.name}: cells[{index}]: unknown field {name!r}; expected one of {known}")
            choices = values if isinstance(values, list) else [values]
            rows = [{**row, name: value} for value in choices for row in rows]
        yield from (Cell(op=op, **row) for row in rows)


def discover() -> dict[str, Family]:
    """Every family by name, found by looking at the folders under ``families/``."""
    names = sorted(m.name for m in pkgutil.iter_modules(families.__path__) if m.ispkg)
    modules = (importlib.import_module(f"{families.__name__}.{name}") for name in names)
    return {module.FAMILY.name: module.FAMILY for module in modules}
