"""Family: one kernel design that implements an op, and how the factory reaches it.

A family is a folder under ``families/`` that exports ``FAMILY``. ``plan`` is pure and imports
no compiler; ``kernels`` (the folder's ``kernel.py``) is imported only by the stages that
compile or capture.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kf_runtime.cell import Cell
from kf_runtime.plan import Buffer

import kernel_factory.families as families
from kernel_factory.cells import read_cells
from kernel_factory.toolchain import SMS

_EXPECTATION = ("model", "Staged", "owned", "WRITES", "ROW_AXES")


class FamilyError(ValueError):
    """A family that cannot be used as it stands: its folder, or what it plans for a cell."""


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
    """What a family plans for one cell: the buffer table and the steps in order.

    Raises ValueError for what no launch could be made of: buffers of one name, other than one output, or one that no
    step has; no step, or one with an operand that is no buffer or an integer that is no Int32.
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        names = [buffer.name for buffer in self.buffers]
        outputs = [buffer.name for buffer in self.buffers if buffer.role == "output"]
        used = {name for step in self.steps for name in step.operands}
        _expect(len(set(names)) == len(names), "buffers: expected every name once", ", ".join(names))
        _expect(len(outputs) == 1, "buffers: expected one of role output", ", ".join(outputs) or "none")
        _expect(bool(self.steps), "steps: expected at least one", "none")
        unknown = ", ".join(sorted(used - set(names)))
        _expect(not unknown, f"operands: expected buffers among {', '.join(names)}", unknown)
        _expect(set(outputs) <= used, f"operands: expected a step that has {outputs[0]}", "none")
        for step in self.steps:
            fit = all(type(value) is int and -(2**31) <= value < 2**31 for value in step.scalars)
            _expect(fit, f"{step.spec.kernel}: scalars: expected Int32 values", str(step.scalars))


def _expect(condition: bool, what: str, found: str) -> None:
    if not condition:
        raise ValueError(f"{what}; found {found}")


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

    def planned(self, cell: Cell) -> CellPlan:
        """``plan(cell)``. Raises FamilyError where there is none, or it is none that could be launched."""
        if cell.op != self.op or cell.sm not in SMS:
            expected = f"a cell of {self.op} on one of {', '.join(SMS)}"
            raise FamilyError(f"{self.name}: expected {expected}; found {cell}")
        try:
            found: object = self.plan(cell)
        except Exception as error:  # the author's own code, which may be anything
            raise FamilyError(f"{self.name}: no plan for {cell}: {_told(error)}") from error
        if not isinstance(found, CellPlan):
            raise FamilyError(f"{self.name}: plan: expected a CellPlan; found {type(found).__name__}")
        foreign = [step.spec.key for step in found.steps if step.spec.family != self.name]
        if foreign:
            raise FamilyError(f"{self.name}: plan: expected kernels of its own family; found {foreign[0]}")
        return found

    @property
    def kernels(self) -> ModuleType:
        """The module with ``host_entry(spec) -> HostEntry``; importing it loads the CuTe DSL."""
        return importlib.import_module(f"{self.package}.kernel")

    @property
    def expectation(self) -> ModuleType:
        """The module with ``model``, ``owned``, ``WRITES`` and ``ROW_AXES``: what the kernels should compute.

        Raises FamilyError where it does not import, or lacks one of them.
        """
        try:
            found = importlib.import_module(f"{self.package}.model")
        except Exception as error:  # the author's own code, which may be anything
            raise FamilyError(f"{self.name}: model.py does not import: {_told(error)}") from error
        missing = [name for name in _EXPECTATION if not hasattr(found, name)]
        if missing:
            raise FamilyError(f"{self.name}: model.py: expected {', '.join(_EXPECTATION)}; found no {missing[0]}")
        return found

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


def discover() -> dict[str, Family]:
    """Every family by name, found by looking at the folders under ``families/``. Raises FamilyError."""
    names = sorted(m.name for m in pkgutil.iter_modules(families.__path__) if m.ispkg)
    return {name: _imported(name) for name in names}


def _imported(name: str) -> Family:
    try:
        module = importlib.import_module(f"{families.__name__}.{name}")
    except Exception as error:  # the author's own code, which may be anything
        raise FamilyError(f"families/{name}: does not import: {_told(error)}; mend it or move it away") from error
    found: object = getattr(module, "FAMILY", None)
    if not isinstance(found, Family) or found.name != name:
        what = f"one named {found.name!r}" if isinstance(found, Family) else "none"
        raise FamilyError(f"families/{name}/__init__.py: expected FAMILY, a Family named {name!r}; found {what}")
    return found


def _told(error: Exception) -> str:
    """An error of an author's code, and where it was raised."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (raised at {Path(frame.filename).name}:{frame.lineno})"
