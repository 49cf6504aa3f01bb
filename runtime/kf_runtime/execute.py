"""PlanExecutor: replays a Plan's launches on one device. Built once; each call writes addresses and launches.

A parameter that is nothing but one address points straight into the address table, so one write
a buffer serves every launch; addresses inside larger images (tensor maps, tensor structs) are
written one by one. Images, table and launch configs belong to a thread: no lock is held across a
launch, and two threads cannot see each other's addresses.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch

from kf_runtime import driver
from kf_runtime.plan import ITEM_BYTES, Buffer, Launch, Plan, Slot

SLAB_ALIGNMENT: Final = 256


@dataclass(frozen=True, kw_only=True)
class _Patch:
    """An address inside a larger image: ``cell.value = addresses[buffer] + addend``."""

    cell: ctypes.c_uint64
    buffer: int
    addend: int


class _ThreadState:
    """One thread's address table, images and launch configs. The table follows ``order``."""

    def __init__(self, plan: Plan, functions: Sequence[Any], order: Sequence[str], tally: list[int]) -> None:
        self.stream = 0
        self.tally = tally
        self.table = (ctypes.c_uint64 * len(order))()
        self.patches: list[_Patch] = []
        self._alive: list[Any] = []
        places = {name: index for index, name in enumerate(order)}
        self.launches = [
            (driver.launch_config(launch), function, self._parameters(launch, places))
            for launch, function in zip(plan.launches, functions, strict=True)
        ]

    def _parameters(self, launch: Launch, places: Mapping[str, int]) -> int:
        """The address of the launch's array of parameter pointers."""
        pointers = (ctypes.c_void_p * max(1, len(launch.images)))()
        for index, image in enumerate(launch.images):
            slots = [slot for slot in launch.slots if slot.parameter == index]
            if len(image) == 8 and len(slots) == 1 and slots[0].addend == 0:
                pointers[index] = ctypes.addressof(self.table) + 8 * places[slots[0].buffer]
            else:
                pointers[index] = self._image(image, slots, places)
        self._alive.append(pointers)
        return ctypes.addressof(pointers)

    def _image(self, image: bytes, slots: Sequence[Slot], places: Mapping[str, int]) -> int:
        """The address of a private copy of an image, with its slots noted as patches."""
        copy = ctypes.create_string_buffer(image, max(8, len(image)))
        self._alive.append(copy)
        for slot in slots:
            cell = ctypes.c_uint64.from_buffer(copy, slot.offset)
            self.patches.append(_Patch(cell=cell, buffer=places[slot.buffer], addend=slot.addend))
        return ctypes.addressof(copy)

    def follow(self, stream: int) -> None:
        """Point every launch config at another stream."""
        for config, _, _ in self.launches:
            driver.set_stream(config, stream)
        self.stream = stream


class Executor(Protocol):
    """What runs one cell on one device, whichever form its kernels have.

    ``inputs`` names the operands in the order that ``run`` takes; ``alignment`` is the strictest of
    theirs, in bytes; ``family`` names the JIT form, None for cubins; ``launches`` are those of one call.
    """

    inputs: tuple[str, ...]
    alignment: int
    family: str | None
    launches: int
    takes_tensors: bool

    @property
    def calls(self) -> int:
        """How many times it ran, over all threads."""

    def run(self, operands: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
        """Launch on the device's current stream. The operands are tensors where ``takes_tensors``, else addresses."""


class PlanExecutor:
    """Launches of one Plan on one device, in order, on a stream.

    ``functions`` are the loader's, one a launch. The plan has one output buffer, row-major. ``run``
    allocates the output and one scratch slab from torch's allocator, so both follow the current
    stream. ``inputs`` names the operands in the order in which their addresses are given.
    """

    def __init__(self, plan: Plan, functions: Sequence[Any], device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.family: str | None = None
        self.takes_tensors = False
        self.launches = len(plan.launches)
        self.alignment = max(buffer.alignment for buffer in plan.named("input"))
        self.inputs = tuple(buffer.name for buffer in plan.named("input"))
        (output,) = plan.named("output")
        self._functions = tuple(functions)
        self._launch = driver.launcher()
        self._local = threading.local()
        self._tallies: list[list[int]] = []
        self._lock = threading.Lock()
        self._offsets, self.scratch_bytes = carve(plan.named("scratch"))
        self._slab_items = (self.scratch_bytes + SLAB_ALIGNMENT) // ITEM_BYTES[output.dtype]
        self._order = (*self.inputs, output.name, *(buffer.name for buffer in plan.named("scratch")))
        self._pack = struct.Struct(f"={len(self._order)}Q").pack_into
        self._stream_of = _stream_reader(device)
        self._guarded = device.type == "cuda" and torch.cuda.device_count() > 1

    @property
    def calls(self) -> int:
        """How many times the plan was launched, over all threads."""
        with self._lock:
            return sum(tally[0] for tally in self._tallies)

    def run(self, operands: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Launch on the current stream of the device; the new output is like ``like``, which is contiguous.

        ``operands`` are addresses, in the order of ``inputs``. The caller has compared every operand's
        metadata with the plan's. Raises DriverError.
        """
        # One frame, no helper calls: where CPython 3.11 grows its frame stack in the middle of this, each
        # call costs 2 us more (measured with tools/bench on a 2-core x86-64 machine).
        if self._guarded and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):
                return self.run(operands, like)
        state: _ThreadState = getattr(self._local, "state", None) or self._new_state()
        out = torch.empty_like(like)
        slab = like.new_empty(self._slab_items)
        base = (slab.data_ptr() + SLAB_ALIGNMENT - 1) & -SLAB_ALIGNMENT
        places = [*operands, out.data_ptr(), *map(base.__add__, self._offsets)]
        self._pack(state.table, 0, *places)
        for patch in state.patches:
            patch.cell.value = places[patch.buffer] + patch.addend
        stream = self._stream_of()
        if state.stream != stream:
            state.follow(stream)
        state.tally[0] += 1
        launch = self._launch
        for config, function, parameters in state.launches:
            result = launch(config, function, parameters, 0)[0]
            if result:
                self._recover(result, config, function, parameters)
        return out

    def _recover(self, result: Any, config: Any, function: Any, parameters: int) -> None:
        """A thread that never touched CUDA has no current context: make it current and launch again."""
        if int(result) == driver.INVALID_CONTEXT:
            driver.ensure_context(self.device.index or 0)
            result = self._launch(config, function, parameters, 0)[0]
        driver.check("cuLaunchKernelEx", result)

    def _new_state(self) -> _ThreadState:
        tally = [0]
        with self._lock:
            self._tallies.append(tally)
        state: _ThreadState = _ThreadState(self.plan, self._functions, self._order, tally)
        self._local.state = state
        return state


def carve(scratch: Sequence[Buffer]) -> tuple[tuple[int, ...], int]:
    """Offsets of the scratch buffers in one slab, and the slab's size in bytes."""
    offsets: list[int] = []
    end = 0
    for buffer in scratch:
        offsets.append(end)
        end += -(-buffer.nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
    return tuple(offsets), end


def _stream_reader(device: torch.device) -> Callable[[], int]:
    """A function for the handle of the device's current stream; host tensors have stream 0."""
    if device.type != "cuda":
        return int
    index = device.index or 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return lambda: int(torch.cuda.current_stream(device).cuda_stream)
    return partial(raw, index)
