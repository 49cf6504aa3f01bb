"""The graph budget of torch.compile: which shapes get a graph with a kernel, and how one graph serves the rest.

At most ``recompile_limit - 2`` distinct admitted pair shapes of a process get KF under
torch.compile; every other shape is served by one shared dynamic graph of the formula. That graph
must refuse the shapes that have, or may still get, a graph of their own, and must accept the
others once the budget is spent, without being compiled again. So its guards compare the pair's
shape with the sizes of one empty tensor of ours, the *slots*: a slot holds the code of an admitted
shape, and is moved out of reach when the budget closes without that shape. Dynamo guards the
comparison, never a Python value of ours.

Functions marked ``_constant`` run while Dynamo traces; compiled code never reaches them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from kf_runtime import dispatch
from kf_runtime.campaign import Mode
from kf_runtime.cell import Cell
from kf_runtime.errors import Unavailable
from kf_runtime.route import Generic, UseCubin, decide_cell, unavailable

#: The code of a shape is ``OPEN + B * STRIDE + N``; codes from CLOSED on match no shape.
STRIDE: Final = 2**24
OPEN: Final = 2**44
CLOSED: Final = 2**54
#: Graphs of the calling function that are not a kernel's: a first static one, and the shared dynamic one.
RESERVED: Final = 2

log = logging.getLogger("kf_runtime")


F = TypeVar("F", bound=Callable[..., Any])


def _constant(function: F) -> F:
    """Runs while Dynamo traces; the answer is a constant of the graph."""
    marked_function: F = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return marked_function


class Slots:
    """The slot tensors, one attribute a key. Dynamo reads them as ``slots.<key>.shape[i + 1]``."""


slots: Final = Slots()


class Budget:
    """Shapes of this process that have KF graphs, and the admitted shapes by key."""

    def __init__(self, owner: dispatch.Dispatcher) -> None:
        self.owner = owner
        self.granted: set[tuple[int, int, int]] = set()
        self.shapes: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {}
        self.announced = False


_lock: Final = threading.RLock()
_budgets: Final[list[Budget]] = []


def budget() -> Budget:
    """The budget of the process's present dispatcher."""
    with _lock:
        current = dispatch.current()
        if not _budgets or _budgets[0].owner is not current:
            _budgets[:] = [Budget(current)]
        return _budgets[0]


def limit() -> int:
    """How many shapes may have KF graphs."""
    return max(0, int(torch._dynamo.config.recompile_limit) - RESERVED)


def variant(direction: str, mask: bool, biases: bool, param_dtype: str) -> str:
    """What tells cells of one SM apart beside their sizes, as part of a slot's name. Dynamo traces this."""
    return f"{direction}_{'mask' if mask else 'nomask'}_{'bias' if biases else 'nobias'}_{param_dtype}"


def _cell(sm: str, sizes: tuple[int, int, int, int], kind: str) -> Cell:
    """The cell of a variant with sizes (B, N, C, D)."""
    B, N, C, D = sizes
    direction, mask, biases, param_dtype = kind.split("_")
    return Cell(
        op="triangle_multiplicative_update", param_dtype=param_dtype, B=B, N=N, C=C, D=D, direction=direction,
        mask=mask == "mask", biases=biases == "bias", sm=sm,
    )  # fmt: skip


@_constant
def admitted(device: str, C: int, D: int, kind: str) -> tuple[tuple[int, int], ...]:
    """(B, N) of every cell that would run here, sorted; their slots are in place afterwards. While tracing only."""
    with _lock:
        key = slot_name(device, C, D, kind)
        found = _admitted(torch.device(device), C, D, kind)
        budget().shapes[key] = (C, found)
        _place(key)
        return found


@_constant
def exporting() -> bool:
    """Whether torch.export traces. Asked outside of the trace: in one, Dynamo of torch 2.11 always says yes."""
    return torch.compiler.is_exporting()


@_constant
def jit_wanted() -> bool:
    """Whether JIT forms answer eager calls here: no graph holds a kernel then. While tracing only."""
    return dispatch.current().forms.wanted


def slot_name(device: str, C: int, D: int, kind: str) -> str:
    """The attribute of ``slots`` for calls that differ in B and N alone."""
    return f"{device.replace(':', '_')}_{C}_{D}_{kind}"


def _admitted(device: torch.device, C: int, D: int, kind: str) -> tuple[tuple[int, int], ...]:
    current = dispatch.current()
    if current.mode is Mode.OFF:
        return ()
    try:
        system = current.system_of(device)
        if isinstance(system, Generic):
            return ()
        found = current.manifest()
        asked = {(cell.B, cell.N): _cell(system.sm, (cell.B, cell.N, C, D), kind) for cell in found.entries}
        cells = [
            cell for cell in asked.values() if isinstance(decide_cell(cell, found, system, current.mode), UseCubin)
        ]  # fmt: skip
    except Unavailable as error:
        current.counters.failure(error.code, str(error))
        return ()
    return tuple(sorted((cell.B, cell.N) for cell in cells))


@_constant
def grant(device: str, sizes: tuple[int, int, int, int], kind: str, static: bool) -> bool:
    """Whether this admitted shape (B, N, C, D) gets a KF graph; its kernels are loaded then. While tracing only.

    ``static``: the sizes are plain numbers, as in the first graph of a function or with dynamic=False.
    """
    with _lock:
        mine = budget()
        B, N, C, _ = sizes
        shape = (B, N, C)
        unlimited = static and not torch._dynamo.config.automatic_dynamic_shapes
        if shape not in mine.granted and len(mine.granted) >= limit() and not unlimited:
            _announce(mine)
            return False
        if not _load(torch.device(device), sizes, kind):
            return False
        mine.granted.add(shape)
        for key in mine.shapes:
            _place(key)
        log.info("torch.compile: pair [%d, %d, %d, %d] gets a graph with KF kernels", B, N, N, C)
        dispatch.current().counters.graph("kf")
        return True


def _load(device: torch.device, sizes: tuple[int, int, int, int], kind: str) -> bool:
    """Load the kernels of a cell now, so that no graph loads them when it first runs."""
    current = dispatch.current()
    try:
        system = current.system_of(device)
        if isinstance(system, Generic):
            return False
        decided = decide_cell(_cell(system.sm, sizes, kind), current.manifest(), system, current.mode)
        if not isinstance(decided, UseCubin):
            return False
        current.executor(decided, device)
    except Unavailable as error:
        current.counters.failure(error.code, unavailable(error).reason.text)
        return False
    return True


def _place(key: str) -> None:
    """Write the slots of one key, where they differ from what is there."""
    mine = budget()
    C, found = mine.shapes[key]
    closed = len(mine.granted) >= limit()
    codes = [
        (CLOSED if closed and (B, N, C) not in mine.granted else OPEN) + B * STRIDE + N for B, N in found
    ]  # fmt: skip
    present = getattr(slots, key, None)
    if present is not None and list(present.shape[1:]) == codes:
        return
    if closed and max(codes, default=0) > CLOSED:
        _announce(mine)
    with torch.inference_mode(False):
        fresh = torch.empty_strided((0, *codes), (0,) * (len(codes) + 1), device="cpu")
    torch._dynamo.maybe_mark_dynamic(fresh, list(range(1, len(codes) + 1)))
    setattr(slots, key, fresh)


def _announce(mine: Budget) -> None:
    if mine.announced:
        return
    mine.announced = True
    log.warning(
        "torch.compile: %d pair shapes have graphs with KF kernels, the most that recompile_limit = %d leaves room "
        "for; further shapes run the generic path on one shared dynamic graph. Raise "
        "torch._dynamo.config.recompile_limit, or pad to fewer shapes",
        len(mine.granted), limit() + RESERVED,
    )  # fmt: skip


@_constant
def marked() -> bool:
    """Whether the caller marked some size as dynamic: giving one shape a graph of its own would be an error then."""
    mode = torch._guards.detect_fake_mode()
    for tracked in getattr(getattr(mode, "shape_env", None), "tracked_fakes", None) or ():
        for constraint in getattr(tracked.symbolic_context, "constraint_sizes", None) or ():
            if constraint is not None and not constraint.warn_only:
                return True
    return False


@_constant
def note(code: str) -> None:
    """Count a traced graph of the generic path by its reason. While tracing only."""
    dispatch.current().counters.graph(code)


def state() -> dict[str, Any]:
    """Granted shapes and the limit, for ``explain`` and ``status``."""
    with _lock:
        return {"granted": sorted(budget().granted), "limit": limit()}
