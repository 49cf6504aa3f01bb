"""``explain`` and ``status``: why a call runs where it does, and what happened so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from kf_runtime import dispatch
from kf_runtime.campaign import Mode
from kf_runtime.counters import Failure
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import ArgumentError, ForkedAfterUse, Unavailable
from kf_runtime.route import Route


@dataclass(frozen=True, kw_only=True)
class Status:
    """What this process did. ``product`` and ``sm`` are None where no driver answers or KF is off.

    ``cells_admitted`` counts the cells that run here in this mode, ``cells_shipped`` those of the
    manifest for this SM; ``hits`` are calls that ran a kernel, ``launches`` the kernels they launched;
    ``jit`` holds the families that answer in their JIT form, with their part of the hits;
    ``graphs`` are the calls that torch.compile traced: "kf", or why their graph holds the generic path.
    """

    mode: str
    product: str | None
    sm: str | None
    cells_admitted: int
    cells_shipped: int
    hits: int
    launches: int
    generic: dict[str, int]
    failures: tuple[Failure, ...]
    graphs: dict[str, int]
    jit: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def explain(op_name: str, *args: Any, **kwargs: Any) -> Route:
    """The Route that ``op_name(*args, **kwargs)`` would take; runs and loads nothing.

    ``str(route)`` is the reason with the nearest admitted cell, where there is one; then, on a line of its own, the
    gates that the call passed and the one that decided.
    Raises ArgumentError for an op that is not ours, and for arguments that the op itself refuses.
    """
    explainer = _explainers().get(op_name)
    if explainer is None:
        raise ArgumentError("op_name", expected=f"one of {', '.join(sorted(_explainers()))}", found=repr(op_name))
    return replace(explainer(*args, **kwargs), explained=True)


def status() -> Status:
    """The mode, the product, the cells admitted here, and the counters."""
    current = dispatch.current()
    product, sm, admitted, shipped = _coverage(current)
    executors = current.executors()
    return Status(
        mode=current.mode.value,
        product=product,
        sm=sm,
        cells_admitted=admitted,
        cells_shipped=shipped,
        hits=sum(executor.calls for executor in executors),
        launches=sum(executor.calls * executor.launches for executor in executors),
        generic=current.counters.generic_calls(),
        failures=current.counters.failures(),
        graphs=current.counters.graphs(),
        jit={name: sum(e.calls for e in executors if e.family == name) for name in current.jit_families()},
    )


def _coverage(current: Dispatcher) -> tuple[str | None, str | None, int, int]:
    """(product, sm, cells admitted, cells shipped) of device 0."""
    if current.mode is Mode.OFF:
        return None, None, 0, 0
    try:
        system = current.system(0)
    except (Unavailable, ForkedAfterUse):
        return None, None, 0, 0
    try:
        entries = current.manifest().on_sm(system.sm)
    except Unavailable:
        return system.product, system.sm, 0, 0
    admitted = [e for e in entries if current.mode is not Mode.AUTO or e.proved_on(system.product)]
    return system.product, system.sm, len(admitted), len(entries)


def _explainers() -> dict[str, Callable[..., Route]]:
    from kf_runtime.ops import residual_layer_norm, trimul_kf

    return {module.OP: module.explain for module in (trimul_kf, residual_layer_norm)}
