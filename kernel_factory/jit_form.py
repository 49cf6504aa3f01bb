"""JitForm: a family as ``kf_runtime.jit`` wants it, and the executor of one of its cells.

On a GPU torch tensors are handed to the compiled function as they are. tvm-ffi refuses host
tensors, so on the emulated driver each enters as a DLPack capsule that says CUDA device 0.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Final

import torch
from kf_runtime.cell import Cell
from kf_runtime.errors import JitFailed
from kf_runtime.execute import SLAB_ALIGNMENT, carve
from kf_runtime.plan import Buffer

from kernel_factory import jit, workspace
from kernel_factory.family import Family
from kernel_factory.jit import JitError, Request
from kernel_factory.store import StoreError
from kernel_factory.toolchain import ToolchainError

log: Final = logging.getLogger("kf_runtime")
Function = Callable[..., None]
_CUDA: Final = 2  # DLDeviceType
_DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class JitForm:
    """One family in its JIT form. Functions are kept by cell: one load a process, one compile a machine.

    Raises ValueError where the family cannot plan a cell.
    """

    def __init__(self, family: Family, cells: frozenset[Cell]) -> None:
        self.name = family.name
        self.cells = cells
        self._family = family
        self._plans = {cell: family.planned(cell) for cell in cells}
        self._functions: dict[tuple[Cell, bool], Function] = {}
        self._lock = threading.Lock()

    @cached_property
    def problem(self) -> str | None:
        """The versions found and needed, where they differ."""
        return jit.problem()

    def buffers(self, cell: Cell) -> tuple[Buffer, ...]:
        """The family's own buffer table."""
        return self._plans[cell].buffers

    def build(self, cell: Cell, device: torch.device) -> JitExecutor:
        """The executor of a cell on a device: from memory, from the store, or compiled. Raises JitFailed."""
        try:
            function = self._function(cell, emulated=device.type == "cpu")
        except (JitError, StoreError, ToolchainError) as cause:
            raise JitFailed(self.name, cell, str(cause)) from cause
        return JitExecutor(self, cell, function, device)

    def launches(self, cell: Cell) -> int:
        """How many kernels one call launches."""
        return len(self._plans[cell].steps)

    def _function(self, cell: Cell, emulated: bool) -> Function:
        with self._lock:
            if (cell, emulated) not in self._functions:
                request = Request(package=self._family.package, cell=cell.key, emulated=emulated)
                image, fresh = jit.library(workspace.find().store, request)
                log.info("jit: %s %s", cell, "compiled" if fresh else "taken from the store")
                self._functions[cell, emulated] = load(image, emulated)
            return self._functions[cell, emulated]


def load(image: bytes, emulated: bool) -> Function:
    """The function of a library's bytes; the file is gone once it is mapped. Raises JitError."""
    import tvm_ffi

    with tempfile.TemporaryDirectory(prefix="kf-jit-") as folder:
        path = Path(folder, "cell.so")
        path.write_bytes(image)
        try:
            if not emulated:
                ctypes.CDLL(_runtime())  # the library needs it, by its SONAME
            function: Function = tvm_ffi.load_module(str(path))[jit.FUNCTION]
        except (OSError, RuntimeError) as cause:
            raise JitError(f"loading the compiled library failed: {cause}") from cause
        return function


def _runtime() -> str:
    """Where the DSL keeps the runtime that its host code launches through."""
    folder = distribution("nvidia-cutlass-dsl-libs-cu13").locate_file("nvidia_cutlass_dsl/cu13/lib")
    return str(Path(str(folder), "libcute_dsl_runtime.so"))


class JitExecutor:
    """Runs one cell's compiled function on one device: a ``kf_runtime.execute.Executor`` that takes tensors.

    A function that failed once is not called again: on the DSL's runtime, a call after a failed load
    of the kernels does not return (seen in 4.7.0).
    """

    takes_tensors = True

    def __init__(self, form: JitForm, cell: Cell, function: Function, device: torch.device) -> None:
        buffers = jit.arguments(form.buffers(cell))
        inputs = [buffer for buffer in buffers if buffer.role == "input"]
        self.family: str | None = form.name
        self.inputs = tuple(buffer.name for buffer in inputs)
        self.alignment = max(buffer.alignment for buffer in inputs)
        self.launches = form.launches(cell)
        self._cell, self._function, self._device = cell, function, device
        self._operands = buffers[: len(inputs) + 1]
        self._scratch = buffers[len(inputs) + 1 :]
        self._offsets, self._slab_bytes = carve(self._scratch)
        self._enter = _labelled if device.type == "cpu" else torch.Tensor.detach
        self._failed: Exception | None = None
        self._calls = 0
        self._lock = threading.Lock()

    @property
    def calls(self) -> int:
        """How many times the function was called, over all threads."""
        return self._calls

    def run(self, operands: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Launch on the current stream; the new output is like ``like``, which is contiguous.

        ``operands`` follow ``inputs``; the caller has compared them with the buffer table. Raises
        JitFailed where loading or launching fails.
        """
        out = torch.empty_like(like)
        tensors = [
            _shaped(tensor, buffer) for tensor, buffer in zip((*operands, out), self._operands, strict=True)
        ] + self._carved(like)
        with self._lock:
            self._calls += 1
        if self._failed is None:
            try:
                with self._current():
                    self._function(*map(self._enter, tensors))
                return out
            except RuntimeError as cause:
                self._failed = cause
        raise JitFailed(self.family or "", self._cell, f"the launch failed: {self._failed}") from self._failed

    def _current(self) -> AbstractContextManager[Any]:
        """The device as torch's current one: tvm-ffi takes its stream from there."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _carved(self, like: torch.Tensor) -> list[torch.Tensor]:
        """The scratch buffers, in one slab from torch's allocator."""
        slab = like.new_empty(self._slab_bytes + SLAB_ALIGNMENT, dtype=torch.uint8)
        base = -slab.data_ptr() % SLAB_ALIGNMENT
        return [
            slab[base + at : base + at + buffer.nbytes].view(_DTYPES[buffer.dtype]).as_strided(
                buffer.shape, buffer.strides
            )
            for at, buffer in zip(self._offsets, self._scratch, strict=True)
        ]  # fmt: skip


def _shaped(tensor: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """The tensor with its leading dimensions folded as the buffer table spells them; the memory is the same."""
    if tensor.shape == buffer.shape and tensor.stride() == buffer.strides:
        return tensor
    return tensor.as_strided(buffer.shape, buffer.strides)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _labelled(tensor: torch.Tensor) -> Any:
    """A host tensor as a DLPack tensor that says CUDA device 0. Its DLTensor begins with address and device."""
    import tvm_ffi

    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    device = (ctypes.c_int32 * 2).from_address(_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p))
    device[:] = (_CUDA, 0)
    return tvm_ffi.from_dlpack(capsule)
