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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kf_runtime import driver
from kf_runtime.plan import Launch, Plan

SLAB_ALIGNMENT: Final = 256
_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "u8": torch.uint8,
    "i32": torch.int32,
    "i64": torch.int64,
}


@dataclass(frozen=True, kw_only=True)
class _Patch:
    """An address inside a larger image: ``cell.value = addresses[buffer] + addend``."""

    cell: ctypes.c_uint64
    buffer: int
    addend: int


class _ThreadState:
    """One thread's images, address table and launch configs."""

    def __init__(self, plan: Plan) -> None:
        self.stream = 0
        self.calls = 0
        self.table = (ctypes.c_uint64 * len(plan.buffers))()
        self.patches: list[_Patch] = []
        self.alive: list[Any] = []
        self.launches = [(driver.launch_config(launch), self._parameters(plan, launch)) for launch in plan.launches]

    def _parameters(self, plan: Plan, launch: Launch) -> int:
        """The address of the launch's array of parameter pointers."""
        order = {buffer.name: index for index, buffer in enumerate(plan.buffers)}
        pointers = (ctypes.c_void_p * max(1, len(launch.images)))()
        for index, image in enumerate(launch.images):
            slots = [slot for slot in launch.slots if slot.parameter == index]
            if len(image) == 8 and len(slots) == 1 and slots[0].addend == 0:
                pointers[index] = ctypes.addressof(self.table) + 8 * order[slots[0].buffer]
                continue
            copy = ctypes.create_string_buffer(image, max(8, len(image)))
            self.alive.append(copy)
            pointers[index] = ctypes.addressof(copy)
            for slot in slots:
                cell = ctypes.c_uint64.from_buffer(copy, slot.offset)
                self.patches.append(_Patch(cell=cell, buffer=order[slot.buffer], addend=slot.addend))
        self.alive.append(pointers)
        return ctypes.addressof(pointers)


class PlanExecutor:
    """Launches of one Plan on one device, in order, on a stream.

    ``functions`` are the loader's, one a launch. The plan has one output buffer. ``run`` allocates
    the output and one scratch slab from torch's allocator, so both follow the current stream.
    """

    def __init__(self, plan: Plan, functions: Sequence[Any], device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.inputs = tuple(buffer.name for buffer in plan.named("input"))
        (output,) = plan.named("output")
        self._output_dtype = _DTYPES[output.dtype]
        self._functions = tuple(functions)
        self._launch = driver.launcher()
        self._local = threading.local()
        self._states: list[_ThreadState] = []
        self._lock = threading.Lock()
        self._offsets, self.scratch_bytes = _carve(plan)
        self._slab_bytes = self.scratch_bytes + SLAB_ALIGNMENT
        self._order = _table_order(plan)
        self._pack = struct.Struct(f"={len(plan.buffers)}Q").pack_into
        self._stream_of = _stream_reader(device)

    @property
    def calls(self) -> int:
        """How many times ``run`` has launched the plan, over all threads."""
        with self._lock:
            return sum(state.calls for state in self._states)

    def run(self, addresses: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Launch on the current stream of the device. ``addresses`` follow ``inputs``; ``shape`` is the output's.

        The caller has compared every operand's metadata with the plan's. Raises DriverError.
        """
        out = torch.empty(shape, dtype=self._output_dtype, device=self.device)
        slab = torch.empty(self._slab_bytes, dtype=torch.uint8, device=self.device)
        base = (slab.data_ptr() + SLAB_ALIGNMENT - 1) & -SLAB_ALIGNMENT
        self.launch((*addresses, out.data_ptr(), *[base + offset for offset in self._offsets]), self._stream_of())
        return out

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Launch with every address given: inputs, the output, then scratch, each in table order."""
        state: _ThreadState | None = getattr(self._local, "state", None)
        if state is None:
            state = self._new_state()
        if state.stream != stream:
            for config, _ in state.launches:
                driver.set_stream(config, stream)
            state.stream = stream
        if self._order is not None:
            addresses = [addresses[index] for index in self._order]
        self._pack(state.table, 0, *addresses)
        for patch in state.patches:
            patch.cell.value = addresses[patch.buffer] + patch.addend
        state.calls += 1
        launch = self._launch
        for function, (config, parameters) in zip(self._functions, state.launches, strict=True):
            result = launch(config, function, parameters, 0)[0]
            if result:
                self._recover(result, config, function, parameters)

    def _recover(self, result: Any, config: Any, function: Any, parameters: int) -> None:
        """A thread that never touched CUDA has no current context: make it current and launch again."""
        if int(result) == driver.INVALID_CONTEXT:
            driver.ensure_context(self.device.index or 0)
            result = self._launch(config, function, parameters, 0)[0]
        driver.check("cuLaunchKernelEx", result)

    def _new_state(self) -> _ThreadState:
        state = _ThreadState(self.plan)
        with self._lock:
            self._states.append(state)
        self._local.state = state
        return state


def _carve(plan: Plan) -> tuple[tuple[int, ...], int]:
    """Offsets of the scratch buffers in one slab, and the slab's size in bytes."""
    offsets: list[int] = []
    end = 0
    for buffer in plan.named("scratch"):
        offsets.append(end)
        end += -(-buffer.nbytes // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
    return tuple(offsets), end


def _table_order(plan: Plan) -> tuple[int, ...] | None:
    """For each buffer of the table its place in (inputs, output, scratch); None where that is the table's own order."""
    names = [buffer.name for role in ("input", "output", "scratch") for buffer in plan.named(role)]
    order = tuple(names.index(buffer.name) for buffer in plan.buffers)
    return None if order == tuple(range(len(order))) else order


def _stream_reader(device: torch.device) -> Any:
    """A function for the handle of the device's current stream; host tensors have stream 0."""
    if device.type != "cuda":
        return lambda: 0
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    index = device.index or 0
    if raw is None:
        return lambda: torch.cuda.current_stream(device).cuda_stream
    return lambda: raw(index)
