"""Route: does this call run a cubin, or the generic path, and why. Pure; no torch, no driver.

``decide`` looks at metadata alone: a Call (what came), a Manifest, a System and a Mode. Its
answer always carries the reason. ``enforce`` turns an answer into an error under ``force``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kf_runtime import gates
from kf_runtime.campaign import Mode
from kf_runtime.cell import Cell
from kf_runtime.errors import DriverTooOld, NotAdmitted, Unavailable
from kf_runtime.plan import Buffer, Plan
from kf_runtime.system import System

if TYPE_CHECKING:
    from kf_runtime.manifest import Entry, Manifest


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a call runs the generic path. ``code`` is what ``status()`` counts by.

    ``binding`` says that mode ``force`` raises: KF takes calls of this kind, but not this one.
    """

    code: str
    text: str
    nearest: Cell | None = None
    binding: bool = False

    def __str__(self) -> str:
        near = f"; the nearest admitted cell is {self.nearest}" if self.nearest else ""
        return f"{self.code}: {self.text}{near}"


def _told(text: str, explained: bool, code: str | None) -> str:
    """A route's text; of one that ``explain`` gave it goes on with the gates."""
    return f"{text}\n  {gates.walk(code)}" if explained else text


@dataclass(frozen=True, kw_only=True)
class Generic:
    """The plain-torch path, with the reason."""

    reason: Reason
    error: Unavailable | None = None
    explained: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        return _told(f"generic path ({self.reason})", self.explained, self.reason.code)


@dataclass(frozen=True, kw_only=True)
class UseCubin:
    """A proved kernel: the entry, its plan, and the cell that the call is."""

    entry: Entry
    plan: Plan
    cell: Cell
    explained: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        proofs = ", ".join(f"{p.product} ({p.level})" for p in self.entry.products)
        hashes = ", ".join(dict.fromkeys(launch.cubin[:12] for launch in self.plan.launches))
        text = f"cubin path ({self.cell}: {len(self.plan.launches)} launches, cubins {hashes}, proved on {proofs})"
        return _told(text, self.explained, None)


@dataclass(frozen=True, kw_only=True)
class UseJit:
    """A family's JIT form (see ``kf_runtime.jit``): compiled on this machine, proved nowhere."""

    family: str
    cell: Cell
    buffers: tuple[Buffer, ...]
    explained: bool = field(default=False, compare=False, repr=False)

    def __str__(self) -> str:
        text = f"JIT path ({self.cell}: family {self.family}, compiled on this machine, not proved)"
        return _told(text, self.explained, None)


Route = UseCubin | UseJit | Generic


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Metadata of one tensor, as Plan buffers spell it.

    ``address``: None for a tensor that is still to be allocated, 0 for one that has no memory.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of an op. ``cell`` carries the SM of the system; ``operands`` are keyed by buffer name.

    ``declined`` is a reason found before there is a cell (grad, tracing, dtype, device).
    """

    op: str
    cell: Cell | None
    operands: Mapping[str, Operand]
    declined: Reason | None = None


def decide(call: Call, manifest: Manifest, system: System, mode: Mode) -> Route:
    """The route of a call."""
    if mode is Mode.OFF:
        return Generic(reason=Reason(code="off", text="KF is disabled by CUEQ_TRIMUL_KF_CAMPAIGN"))
    if call.declined is not None:
        return Generic(reason=_with_nearest(call, manifest))
    assert call.cell is not None, "a Call without a cell carries the reason"
    return _admit(call.cell, call.operands, manifest, system, mode)


def enforce(route: Route, mode: Mode) -> Route:
    """``route`` itself. Under force, a typed error where KF should have run; the unavailable kernel's own first."""
    if mode is Mode.FORCE and isinstance(route, Generic):
        if route.error is not None:
            raise route.error
        if route.reason.binding:
            raise NotAdmitted(str(route.reason))
    return route


def unavailable(error: Unavailable) -> Generic:
    """The generic route for a kernel that should run here and cannot."""
    return Generic(reason=Reason(code=error.code, text=str(error), binding=True), error=error)


def decide_cell(cell: Cell, manifest: Manifest, system: System, mode: Mode) -> Route:
    """The route of a well-formed call of this cell: contiguous, aligned tensors on this system, no grad."""
    if mode is Mode.OFF:
        return Generic(reason=Reason(code="off", text="KF is disabled by CUEQ_TRIMUL_KF_CAMPAIGN"))
    return _admit(cell, None, manifest, system, mode)


def _admit(cell: Cell, operands: Mapping[str, Operand] | None, manifest: Manifest, system: System, mode: Mode) -> Route:
    on_sm = manifest.on_sm(cell.sm)
    if not on_sm:
        text = (
            f"{system.product} is {cell.sm} (compute capability {system.capability[0]}.{system.capability[1]}); "
            f"this wheel has kernels for {', '.join(manifest.sms) or 'no SM'}"
        )
        return Generic(reason=Reason(code="sm", text=text))
    required = manifest.required_driver.get(cell.sm, 0)
    if system.driver_version < required:
        return unavailable(DriverTooOld(sm=cell.sm, required=required, found=system.driver_version))
    entry = manifest.serving(cell)
    if entry is None:
        text = f"no admitted cell is {cell}"
        return Generic(reason=Reason(code="cell", text=text, nearest=manifest.nearest(cell), binding=True))
    plan = manifest.plan_of(entry)
    refusal = (
        _parameters(cell, entry)
        or check_operands(cell, operands, plan.named("input"))
        or _grid_barrier(plan)
        or _product(entry, system, mode)
    )
    if refusal is not None:
        return Generic(reason=refusal)
    return UseCubin(entry=entry, plan=plan, cell=cell)


def _parameters(cell: Cell, entry: Entry) -> Reason | None:
    if cell.param_dtype in entry.parameter_dtypes:
        return None
    text = (
        f"parameters: expected {' or '.join(entry.parameter_dtypes)}; found {cell.param_dtype}, for which the accuracy "
        f"of this cell is not admitted"
    )
    return Reason(code="parameter_dtype", text=text, nearest=entry.cell, binding=True)


def _product(entry: Entry, system: System, mode: Mode) -> Reason | None:
    if mode in (Mode.FORCE, Mode.PREVIEW) or entry.proved_on(system.product):
        return None
    proved = ", ".join(p.product for p in entry.products) or "no product"
    text = (
        f"proved on {proved}, not on {system.product}; set CUEQ_TRIMUL_KF_CAMPAIGN=preview to run it "
        "on that evidence, or run the device check"
    )
    return Reason(code="product", text=text)


def _grid_barrier(plan: Plan) -> Reason | None:
    """Blocks that wait for each other need all of them resident, which MPS may prevent; unknown means generic."""
    marked = [launch.kernel for launch in plan.launches if launch.grid_barrier]
    if not marked:
        return None
    text = f"{', '.join(marked)}: synchronises its blocks through global memory; not dispatched by this version"
    return Reason(code="grid_barrier", text=text, binding=True)


def check_operands(cell: Cell, operands: Mapping[str, Operand] | None, inputs: Sequence[Buffer]) -> Reason | None:
    """The first operand that is not what the buffer table says of it; None where all are, or none was given."""
    if operands is None:
        return None
    for buffer in inputs:
        found = operands.get(buffer.name)
        if found is None:
            return _mismatch(cell, buffer.name, "operands", "a tensor", "None")
        for name, want, have in (
            ("dtype", buffer.dtype, found.dtype),
            ("shape", buffer.shape, found.shape),
            ("strides", _live(buffer.shape, buffer.strides), _live(found.shape, found.strides)),
        ):
            if want != have:
                return _mismatch(cell, buffer.name, name, want, have)
        if found.address == 0:
            return _mismatch(cell, buffer.name, "memory", "an address", "none: a placeholder, or its storage was freed")
        if found.address is not None and found.address % buffer.alignment:
            want_text = f"a multiple of {buffer.alignment} bytes"
            return _mismatch(cell, buffer.name, "alignment", want_text, f"address {found.address:#x}")
    return None


def _live(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of the extents above 1; the others never reach an address."""
    return tuple(stride for extent, stride in zip(shape, strides, strict=True) if extent > 1)


def _mismatch(cell: Cell, buffer: str, code: str, want: object, have: object) -> Reason:
    return Reason(code=code, text=f"{buffer}: {code}: expected {want}; found {have}", nearest=cell, binding=True)


def _with_nearest(call: Call, manifest: Manifest) -> Reason:
    assert call.declined is not None
    if call.cell is None or call.declined.nearest is not None:
        return call.declined
    return replace(call.declined, nearest=manifest.nearest(call.cell))
