"""JIT forms: families that kernel authors run as compiled on this machine. No cubin, no evidence.

A form comes from ``Forms.register``, or from a provider: an entry point of the group
``kf_runtime.providers`` that is a function from nothing to the forms it has. Providers are read
only where ``KF_JIT`` names families, and at the first call, not at import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from kf_runtime.cell import Cell
from kf_runtime.errors import JitToolchain, JitUnknown, Unavailable
from kf_runtime.plan import Buffer
from kf_runtime.route import Call, Generic, Reason, Route, UseJit, check_operands, unavailable

if TYPE_CHECKING:
    import torch

    from kf_runtime.execute import Executor

GROUP: Final = "kf_runtime.providers"


class Form(Protocol):
    """One family in its JIT form: the cells that it answers for, and how to run one."""

    @property
    def name(self) -> str:
        """The family's name."""

    @property
    def cells(self) -> Collection[Cell]:
        """The cells that it answers for, on every SM."""

    @property
    def problem(self) -> str | None:
        """Why it cannot run with what is installed: the versions found and needed. None where it can."""

    def buffers(self, cell: Cell) -> tuple[Buffer, ...]:
        """The buffer table of a cell of ``cells``."""

    def build(self, cell: Cell, device: torch.device) -> Executor:
        """Compile the cell, or take it from a cache. Raises Unavailable."""


Provider = Callable[[], Iterable[Form]]


class Forms:
    """The JIT forms of a process: what ``KF_JIT`` asks for, and what was registered."""

    def __init__(self, asked: str = "") -> None:
        self._asked = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
        self._pending = bool(self._asked)
        self._unknown: Unavailable | None = None
        self._registered: dict[str, Form] = {}
        self._lock = threading.RLock()

    def register(self, form: Form) -> None:
        """Let ``form`` answer for its cells; it takes the place of one of the same name."""
        self._active()
        with self._lock:
            self._registered = {**self._registered, form.name: form}

    def copy(self) -> Forms:
        """The same forms with a lock of their own, for a forked child."""
        same = Forms(",".join(self._asked))
        same._pending, same._unknown, same._registered = self._pending, self._unknown, self._registered
        return same

    def names(self) -> tuple[str, ...]:
        """The families that answer in their JIT form, or would if their toolchain were here."""
        return tuple(self._active())

    def form(self, name: str) -> Form:
        """The form of that name; KeyError otherwise."""
        return self._active()[name]

    @property
    def wanted(self) -> bool:
        """Whether any JIT form was asked for or registered; reads no entry point."""
        return bool(self._asked or self._registered)

    def decide(self, call: Call) -> Route | None:
        """The route of a call that a form has the cell of, or that ``KF_JIT`` spoils; None: cubins decide."""
        if not self.wanted or call.cell is None:
            return None
        return self.decide_cell(call.cell, call)

    def decide_cell(self, cell: Cell, call: Call | None = None) -> Route | None:
        """As ``decide``; without a call, of well-formed operands."""
        for form in self._active().values():
            if cell in form.cells:
                return _route(form, cell, call)
        return None if self._unknown is None else unavailable(self._unknown)

    def _active(self) -> dict[str, Form]:
        """The forms by name; the first time that ``KF_JIT`` asks for some, the providers are read."""
        if self._pending:
            with self._lock:
                if self._pending:
                    self._read()
                    self._pending = False
        return self._registered

    def _read(self) -> None:
        found, broken = _provided()
        missing = [name for name in self._asked if name not in found]
        if missing:
            known = ", ".join([*sorted(found), *broken])
            self._unknown = JitUnknown(", ".join(missing), known)
        self._registered = {name: found[name] for name in self._asked if name in found}


def _route(form: Form, cell: Cell, call: Call | None) -> Route:
    if call is not None and call.declined is not None:
        return Generic(reason=call.declined)
    if form.problem is not None:
        return unavailable(JitToolchain(form.name, form.problem))
    buffers = form.buffers(cell)
    inputs = [buffer for buffer in buffers if buffer.role == "input"]
    refusal: Reason | None = check_operands(cell, None if call is None else call.operands, inputs)
    return UseJit(family=form.name, cell=cell, buffers=buffers) if refusal is None else Generic(reason=refusal)


def _provided() -> tuple[dict[str, Form], list[str]]:
    """Every form of every installed provider, by name; and what is wrong with providers that cannot be loaded."""
    from importlib.metadata import entry_points

    forms: dict[str, Form] = {}
    broken: list[str] = []
    for point in entry_points(group=GROUP):
        try:
            provider: Provider = point.load()
            forms.update({form.name: form for form in provider()})
        except Exception as error:  # code of kernel authors in the middle of their work; its reason is recorded
            broken.append(f"(provider {point.name!r} does not load: {type(error).__name__}: {error})")
    return forms, broken
