"""Preload: load kernels ahead of the first call, so that a CUDA graph may capture that call."""

from __future__ import annotations

import torch

from kf_runtime import dispatch
from kf_runtime.campaign import Mode
from kf_runtime.cell import Cell
from kf_runtime.errors import ArgumentError, NoKernel
from kf_runtime.route import Generic, UseCubin


def preload(*cells: Cell | str, device: torch.device | str | int | None = None) -> tuple[Cell, ...]:
    """Load the kernels of ``cells`` onto a device, every one that runs there if none are named; the cells loaded.

    Reads and checks the cubins, then cuLibraryLoadData, cuKernelGetFunction and cuFuncLoad in the
    device's context, checked with cuFuncIsLoaded: nothing is left for a launch to load. ``device``
    defaults to the current CUDA device. With mode off nothing is loaded.

    JIT forms cannot be loaded ahead: the code that the DSL generates loads its kernels when it first runs.

    Raises NoKernel for a named cell that does not run there, Unavailable where a kernel cannot be
    loaded, ArgumentError for a device that has none, and for what is neither a Cell nor a key.
    """
    current = dispatch.current()
    if current.mode is Mode.OFF:
        return ()
    place = dispatch.place(device)
    system = current.system_of(place)
    if isinstance(system, Generic):
        raise ArgumentError("device", expected="a CUDA device", found=f"{place}: {system.reason.text}")
    found = current.manifest()
    named = [_cell(cell) for cell in cells]
    loaded: list[Cell] = []
    for cell in named or [entry.cell for entry in found.on_sm(system.sm)]:
        decided = current.decide_cell(cell, system)
        if isinstance(decided, UseCubin) and cell.sm == system.sm:
            current.executor(decided, place)
            loaded.append(cell)
        elif named:
            raise NoKernel(cell, str(decided))
    return tuple(loaded)


def _cell(named: object) -> Cell:
    if not isinstance(named, (Cell, str)):
        raise ArgumentError("cells", expected="Cells or their keys, each an argument", found=type(named).__name__)
    return Cell.parse(named) if isinstance(named, str) else named
