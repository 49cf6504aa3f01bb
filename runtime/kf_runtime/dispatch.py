"""Dispatch: from a Call to a Route, and from a Route to an executor that is ready to launch.

This is where deciding (``route``) meets doing (``driver``, ``loader``, ``execute``). The first
call of a signature resolves and loads; ops keep the answer in ``Dispatcher.table``, so that each
later call is one dictionary hit.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kf_runtime import campaign, driver, rounding, route
from kf_runtime.counters import Counters
from kf_runtime.errors import ForkedAfterUse, ManifestError, Unavailable
from kf_runtime.execute import Executor, PlanExecutor
from kf_runtime.jit import Form, Forms
from kf_runtime.loader import Loader
from kf_runtime.route import Call, Generic, Reason, Route, UseCubin, UseJit
from kf_runtime.system import System

if TYPE_CHECKING:
    from kf_runtime.cell import Cell
    from kf_runtime.manifest import Manifest

log: Final = logging.getLogger("kf_runtime")
DATA: Final = Path(__file__).parent / "data"
#: Keys of a process that ops remember at most.
TABLE_LIMIT: Final = 4096
OFF: Final = Generic(reason=Reason(code="off", text="KF is disabled by CUEQ_TRIMUL_KF_CAMPAIGN"))
HOST: Final = Generic(reason=Reason(code="cpu", text="the tensors are on the CPU; KF kernels run on CUDA tensors"))
CAPTURING: Final = Generic(
    reason=Reason(
        code="capturing",
        text="the first call of this signature came while a CUDA graph was being captured, when no kernel may be "
        "loaded; call the op once before capturing",
        binding=True,
    )
)


class Dispatcher:
    """One process's mode, JIT forms, manifest, systems, loaders, executors and counters.

    ``table`` belongs to the ops: signature to whatever they resolved it to.
    """

    def __init__(self, settings: campaign.Settings = campaign.SETTINGS, folder: Path = DATA) -> None:
        self.settings = settings
        self.mode = settings.mode
        self.forms = Forms(settings.jit)
        self.folder = folder
        self.counters = Counters()
        self.table: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self._manifest: Manifest | ManifestError | None = None
        self._systems: dict[int, System] = {}
        self._loaders: dict[int, Loader] = {}
        self._executors: dict[tuple[str, torch.device], Executor | Unavailable] = {}
        self.forked: bool | None = None

    def manifest(self) -> Manifest:
        """The verified manifest, read once. Raises ManifestError, the same one each time."""
        from kf_runtime.manifest import load  # here: its records would be a third of this package's import time

        with self._lock:
            if self._manifest is None:
                try:
                    self._manifest = load(self.folder)
                except ManifestError as error:
                    self._manifest = error
            if isinstance(self._manifest, ManifestError):
                raise self._manifest
            return self._manifest

    def system(self, ordinal: int = 0) -> System:
        """The System of a device, asked once. Raises Unavailable; ForkedAfterUse in a child of a process that did."""
        if self.forked is not None:
            raise ForkedAfterUse
        with self._lock:
            if ordinal not in self._systems:
                self._systems[ordinal] = driver.detect(ordinal)
            return self._systems[ordinal]

    def system_of(self, device: torch.device) -> System | Generic:
        """The System that owns tensors of ``device``, or why none does. Raises Unavailable.

        Host tensors are looked at only where some libcuda is already in the process, and count
        only on an emulated driver (see ``system``).
        """
        if device.type == "cuda" and torch.version.hip is None:
            return self.system(device.index or 0)
        if device.type == "cpu":
            return self._emulated() or HOST
        text = f"the tensors are on {device}; KF kernels run on CUDA tensors of NVIDIA GPUs"
        return Generic(reason=Reason(code="device", text=text))

    def refuses_host(self) -> bool:
        """Whether host tensors are certainly no device's memory here: a real driver answered, or none is mapped."""
        if 0 in self._systems:
            return not self._systems[0].host_is_device
        return self.forked is None and not driver.is_mapped()

    def _emulated(self) -> System | None:
        if self.forked is False:  # the parent's driver was a real one: host tensors are nothing to it
            return None
        if 0 not in self._systems and not driver.is_mapped():
            return None
        try:
            system = self.system(0)
        except Unavailable:
            return None
        return system if system.host_is_device else None

    def decide(self, device: torch.device, describe: Callable[[System], Call]) -> Route:
        """The route of a call on ``device``; loads nothing, never raises for a declined call."""
        if self.mode is campaign.Mode.OFF:
            return OFF
        try:
            system = self.system_of(device)
            if isinstance(system, Generic):
                return system
            call = describe(system)
            return self.forms.decide(call) or route.decide(call, self.manifest(), system, self.mode)
        except Unavailable as error:
            return route.unavailable(error)

    def decide_cell(self, cell: Cell, system: System) -> Route:
        """The route of a well-formed eager call of this cell on ``system``. Raises Unavailable."""
        if self.mode is campaign.Mode.OFF:
            return OFF
        return self.forms.decide_cell(cell) or route.decide_cell(cell, self.manifest(), system, self.mode)

    def register(self, form: Form) -> None:
        """Let a JIT form answer for its cells from now on; what was resolved before is resolved anew."""
        self.forms.register(form)
        with self._lock:
            self._executors = {k: v for k, v in self._executors.items() if not k[0].startswith(f"{form.name}/")}
            self.table.clear()

    def jit_families(self) -> tuple[str, ...]:
        """The families that answer in their JIT form here."""
        return () if self.mode is campaign.Mode.OFF else self.forms.names()

    def resolve(self, device: torch.device, describe: Callable[[System], Call]) -> Executor | Generic:
        """An executor ready to launch, or the generic path and why. Under force, raises instead where it must."""
        decided = self.decide(device, describe)
        if not isinstance(decided, Generic):
            try:
                ready = (_identity(decided), device) in self._executors
                if ready or not _capturing(device, self):
                    return self.executor(decided, device)
                decided = CAPTURING
            except Unavailable as error:
                decided = route.unavailable(error)
        route.enforce(decided, self.mode)
        if decided.error is not None:
            self.counters.failure(decided.reason.code, decided.reason.text)
        return decided

    def executor(self, decided: UseCubin | UseJit, device: torch.device) -> Executor:
        """The executor of a route on one device, built and loaded once. Raises Unavailable, each time the same."""
        key = (_identity(decided), device)
        with self._lock:
            if key not in self._executors:
                self._executors[key] = self._build(decided, device)
                log.info("route: %s on %s", decided, device)
            found = self._executors[key]
        if isinstance(found, Unavailable):
            raise found
        return found

    def _build(self, decided: UseCubin | UseJit, device: torch.device) -> Executor | Unavailable:
        """A new executor, or why there is none; either way the cubins are read, or the JIT form is built, once."""
        try:
            with _on(device):
                rounding.load(device)
                if isinstance(decided, UseJit):
                    return self.forms.form(decided.family).build(decided.cell, device)
                return PlanExecutor(decided.plan, self._loader(device.index or 0).functions(decided.plan), device)
        except Unavailable as error:
            return error

    def remember(self, key: Any, resolved: object) -> None:
        """Keep a decision under its key; the table starts afresh where callers' metadata has no end."""
        if len(self.table) >= TABLE_LIMIT:
            self.table.clear()
        self.table[key] = resolved

    def executors(self) -> tuple[Executor, ...]:
        """Every executor built so far."""
        with self._lock:
            return tuple(found for found in self._executors.values() if not isinstance(found, Unavailable))

    def _loader(self, ordinal: int) -> Loader:
        if ordinal not in self._loaders:
            self._loaders[ordinal] = Loader(self.manifest(), self.folder, ordinal)
        return self._loaders[ordinal]


def _identity(decided: UseCubin | UseJit) -> str:
    """What an executor is kept under: the plan's digest, or family and cell."""
    return f"{decided.family}/{decided.cell.key}" if isinstance(decided, UseJit) else decided.entry.plan


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """The device's context as the current one, where it has one of torch's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _capturing(device: torch.device, owner: Dispatcher) -> bool:
    """Whether the stream that a call on this device would launch on is being captured."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return owner.system(0).host_is_device and driver.is_capturing()


def place(device: torch.device | str | int | None) -> torch.device:
    """The device that a caller names: a CUDA device by its number; None is the current one, the host where none is."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(device, int):
        return torch.device("cuda", device)
    named = torch.device(device)
    return torch.device("cuda", named.index or 0) if named.type == "cuda" else named


class Process:
    """The dispatcher of this process. A forked child starts afresh: handles and locks do not survive a fork."""

    current = Dispatcher()


def current() -> Dispatcher:
    """The process's dispatcher."""
    return Process.current


def install(dispatcher: Dispatcher) -> Dispatcher:
    """Put another dispatcher in place (tests, and tools that read a folder of their own); returns the one before."""
    before, Process.current = Process.current, dispatcher
    return before


def _fresh() -> None:
    """In a forked child: nothing of the parent's driver is kept, and using it again is an error that says so."""
    before = Process.current
    Process.current = Dispatcher(before.settings, before.folder)
    Process.current.forms = before.forms.copy()
    if before.forked is not None or before._systems:
        emulated = any(system.host_is_device for system in before._systems.values())
        Process.current.forked = before.forked if before.forked is not None else emulated


os.register_at_fork(after_in_child=_fresh)
