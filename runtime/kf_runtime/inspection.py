"""Inspection: what the command line prints. Each function returns a Report; nothing is printed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kf_runtime import dispatch, manifest
from kf_runtime.cell import Cell
from kf_runtime.dispatch import Dispatcher
from kf_runtime.errors import ArgumentError, ManifestError, Unavailable, version_text
from kf_runtime.loader import read_cubin
from kf_runtime.manifest import Entry, Manifest, plan_digest
from kf_runtime.route import UseCubin
from kf_runtime.system import System

TRIMUL: Final = "triangle_multiplicative_update"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Text for people, data for programs, and whether all is well."""

    lines: tuple[str, ...]
    data: dict[str, Any]
    ok: bool = True


def doctor() -> Report:
    """This machine: the first line says what a user most needs."""
    current = dispatch.current()
    found = _manifest_or_error(current)
    system = _system_or_error(current)
    lines = [_headline(current, found, system), f"mode: {current.mode.value}", f"data: {current.folder}"]
    if isinstance(system, System):
        lines.append(f"device 0: {system.product}, {system.sm}, driver of CUDA {version_text(system.driver_version)}")
    if isinstance(found, Manifest):
        counts = ", ".join(f"{sm} {len(found.on_sm(sm))}" for sm in found.sms)
        lines.append(f"cells shipped: {counts or 'none'} (by {found.generator})")
    if current.jit_families():
        lines.append(f"JIT forms, before any cubin: {', '.join(current.jit_families())}")
    data = {
        "headline": lines[0],
        "mode": current.mode.value,
        "product": system.product if isinstance(system, System) else None,
        "sm": system.sm if isinstance(system, System) else None,
        "driver_version": system.driver_version if isinstance(system, System) else None,
        "cells": {sm: len(found.on_sm(sm)) for sm in found.sms} if isinstance(found, Manifest) else {},
        "jit": list(current.jit_families()),
        "errors": [str(e) for e in (found, system) if isinstance(e, Unavailable)],
    }
    return Report(lines=tuple(lines), data=data, ok=isinstance(found, Manifest))


def _headline(current: Dispatcher, found: Manifest | Unavailable, system: System | Unavailable) -> str:
    if current.mode.value == "off":
        return "KF is off (CUEQ_TRIMUL_KF_CAMPAIGN); every call runs the generic path"
    if isinstance(found, Unavailable):
        return f"no kernels: {found}"
    if isinstance(system, Unavailable):
        return f"no GPU for kernels, every call runs the generic path: {system}"
    shipped = found.on_sm(system.sm)
    if not shipped:
        return (
            f"{system.product} is {system.sm}; this wheel has kernels for {', '.join(found.sms) or 'no SM'}; "
            "every call runs the generic path"
        )
    required = found.required_driver.get(system.sm, 0)
    if system.driver_version < required:
        return (
            f"the driver is too old: the {system.sm} cells need CUDA {version_text(required)}, "
            f"found {version_text(system.driver_version)}; update the NVIDIA display driver"
        )
    proved = sum(entry.proved_on(system.product) for entry in shipped)
    text = f"{proved} of {len(shipped)} {system.sm} cells are proved on {system.product}"
    if proved == len(shipped):
        return text
    return f"{text}; set CUEQ_TRIMUL_KF_CAMPAIGN=preview, or run the device check"


def listing(found: Manifest, sm: str | None = None) -> Report:
    """Every admitted cell with its cubins, evidence and products."""
    entries = [e for name in found.sms if sm in (None, name) for e in found.on_sm(name)]
    rows = [_row(found, entry) for entry in entries]
    lines = [
        f"{row['cell']}  parameters {','.join(row['parameter_dtypes'])}  "
        f"cubins {','.join(sha[:12] for sha in row['cubins'])}  evidence {row['evidence'][:12]}  "
        + ", ".join(f"{p['product']} ({p['level']})" for p in row["products"])
        for row in rows
    ]
    return Report(lines=(*lines, f"{len(rows)} cells"), data={"generator": found.generator, "cells": rows})


def _row(found: Manifest, entry: Entry) -> dict[str, Any]:
    return {
        "cell": entry.cell.key,
        "sm": entry.cell.sm,
        "plan": entry.plan,
        "cubins": list(dict.fromkeys(launch.cubin for launch in found.plan_of(entry).launches)),
        "evidence": entry.evidence,
        "products": [{"product": p.product, "level": p.level} for p in entry.products],
        "parameter_dtypes": list(entry.parameter_dtypes),
    }


def verify() -> Report:
    """Re-hash the manifest, every plan and every cubin."""
    current = dispatch.current()
    found = manifest.load(current.folder)
    problems: list[str] = []
    for record in found.cubins.values():
        try:
            if len(read_cubin(current.folder, record)) != record.size:
                problems.append(f"{record.file}: size: expected {record.size}; the manifest and the file differ")
        except Unavailable as error:
            problems.append(str(error))
    for digest, plan in found.plans.items():
        if plan_digest(plan) != digest:
            problems.append(f"plan {digest}: its content has digest {plan_digest(plan)}")
    summary = f"{len(found.cubins)} cubins, {len(found.plans)} plans, {len(found.entries)} cells: " + (
        f"{len(problems)} problems" if problems else "every hash agrees"
    )
    data = {
        "cubins": len(found.cubins),
        "plans": len(found.plans),
        "cells": len(found.entries),
        "problems": problems,
    }
    return Report(lines=(summary, *problems), data=data, ok=not problems)


def explain_key(key: str) -> Report:
    """The route of a cell, on this machine where its SM is the cell's."""
    return _explain(Cell.parse(key))


def explain_shape(
    shape: str | None, hidden: int | None, direction: str, *, mask: bool, biases: bool, sm: str | None
) -> Report:
    """The route of a TriMul call of this pair shape."""
    B, N, C = _pair(shape)
    where = sm or dispatch.current().system(0).sm
    cell = Cell(op=TRIMUL, B=B, N=N, C=C, D=hidden or C, direction=direction, mask=mask, biases=biases, sm=where)
    return _explain(cell)


def _pair(shape: str | None) -> tuple[int, int, int]:
    try:
        B, N, M, C = (int(part) for part in (shape or "").split(","))
    except ValueError as cause:
        raise ArgumentError("--shape", expected="a cell key, or --shape B,N,N,C", found=repr(shape)) from cause
    if N != M:
        raise ArgumentError("--shape", expected="B,N,N,C with N twice", found=repr(shape))
    return B, N, C


def _explain(cell: Cell) -> Report:
    current = dispatch.current()
    found = current.manifest()
    system = _system_or_error(current)
    if isinstance(system, Unavailable) or system.sm != cell.sm:
        entry = found.serving(cell)
        if entry is not None and cell.param_dtype not in entry.parameter_dtypes:
            entry = None
        here = "no GPU here" if isinstance(system, Unavailable) else f"this machine is {system.sm}"
        text = f"{here}; " + (
            str(UseCubin(entry=entry, plan=found.plan_of(entry), cell=cell))
            if entry
            else f"no admitted cell is {cell}; the nearest admitted cell is {found.nearest(cell)}"
        )
        return Report(lines=(text,), data={"cell": cell.key, "shipped": entry is not None, "route": text})
    decided = current.decide_cell(cell, system)
    data = {"cell": cell.key, "shipped": found.serving(cell) is not None, "route": str(decided)}
    return Report(lines=(str(decided),), data=data)


def _manifest_or_error(current: Dispatcher) -> Manifest | ManifestError:
    try:
        return current.manifest()
    except ManifestError as error:
        return error


def _system_or_error(current: Dispatcher) -> System | Unavailable:
    try:
        return current.system(0)
    except Unavailable as error:
        return error
