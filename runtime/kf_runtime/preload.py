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
    loaded, ArgumentError for a device that has none.
    """
    current = dispatch.current()
    if current.mode is Mode.OFF:
        return ()
    place = _place(device, current)
    system = current.system_of(place)
    if isinstance(system, Generic):
        raise ArgumentError("device", expected="a CUDA device", found=f"{place}: {system.reason.text}")
    found = current.manifest()
    named = [Cell.parse(cell) if isinstance(cell, str) else cell for cell in cells]
    loaded: list[Cell] = []
    for cell in named or [entry.cell for entry in found.on_sm(system.sm)]:
        decided = current.decide_cell(cell, system)
        if isinstance(decided, UseCubin) and cell.sm == system.sm:
            current.executor(decided, place)
            loaded.append(cell)
        elif named:
            raise NoKernel(cell, str(decided))
    return tuple(loaded)


def _place(device: torch.device | str | int | None, current: dispatch.Dispatcher) -> torch.device:
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    if isinstance(device, int):
        return torch.device("cuda", device)
    place = torch.device(device)
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place
