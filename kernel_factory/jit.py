"""JIT: a family's cells compiled here by the CuTe DSL, called through tvm-ffi with torch tensors.

For kernel authors: ``register`` makes a family answer calls of ``kf_runtime`` without a cubin, as
``KF_JIT=<family>`` does for a whole process. One function a cell launches all its steps. It is
compiled in a process of its own, linked into a shared library and kept in the store under the
digest of everything that it depends on; any process loads it from there. Run as a module, this
file is the compiling process.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kf_runtime.cell import Cell
from kf_runtime.plan import Buffer

from kernel_factory import toolchain
from kernel_factory.family import CellPlan, Family, discover
from kernel_factory.store import Store, digest, sha256

if TYPE_CHECKING:
    from kernel_factory.jit_form import JitForm

KIND: Final = "jit"
FUNCTION: Final = "cell"  # the name that every library exports its function under
OPTIONS: Final = "--enable-tvm-ffi --keep-ptx --keep-cubin"
PINS: Final = (
    ("nvidia-cutlass-dsl", toolchain.DSL_VERSION),
    ("nvidia-cutlass-dsl-libs-cu13", toolchain.DSL_VERSION),
    ("apache-tvm-ffi", toolchain.TVM_FFI_VERSION),
)
INSTALL: Final = f"nvidia-cutlass-dsl[cu13]=={toolchain.DSL_VERSION}' 'apache-tvm-ffi=={toolchain.TVM_FFI_VERSION}"
_SHIM: Final = Path(__file__).with_name("jit_shim.c")
_DTYPES: Final = {"bf16": "BFloat16", "f16": "Float16", "f32": "Float32", "u8": "Uint8", "i32": "Int32", "i64": "Int64"}


class JitError(Exception):
    """A JIT form could not be compiled, linked or loaded; the message carries the log."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One library to make. ``emulated``: its launches reach the process's emulated driver, not the CUDA runtime."""

    package: str
    cell: str
    emulated: bool

    @property
    def family(self) -> Family:
        """The family, by its import path."""
        found: Family = importlib.import_module(self.package).FAMILY
        return found

    def key(self) -> str:
        """The name of the library's record: a digest of everything that its bytes depend on."""
        sources = [sha256(path.read_bytes()) for path in (Path(__file__), _SHIM)]
        return digest([asdict(self), self.family.source_digest(), sources, toolchain.require(), PINS])


def register(family: Family | str, cells: Iterable[Cell | str] | None = None) -> None:
    """Let a family answer calls of ``kf_runtime`` in its JIT form: ``cells``, or those of its cells.toml.

    Holds for this process, from the next call on. Raises ValueError for a cell that the family cannot
    plan, KeyError for a family that does not exist.
    """
    from kf_runtime import dispatch

    dispatch.current().register(_form(discover()[family] if isinstance(family, str) else family, cells))


def provide() -> list[JitForm]:
    """Every family in its JIT form: the entry point that ``KF_JIT`` reads."""
    return [_form(family) for family in discover().values()]


def _form(family: Family, cells: Iterable[Cell | str] | None = None) -> JitForm:
    from kernel_factory.jit_form import JitForm

    named = family.cells() if cells is None else cells
    return JitForm(family, frozenset(Cell.parse(cell) if isinstance(cell, str) else cell for cell in named))


def problem() -> str | None:
    """What differs from the pins, with the versions found and needed; None where nothing does."""
    wrong = [f"{name}: needs {pin}; found {have}" for name, pin in PINS if (have := _installed(name)) != pin]
    return f"{'; '.join(wrong)}; run `pip install '{INSTALL}'`" if wrong else None


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def library(store: Store, request: Request) -> tuple[bytes, bool]:
    """The shared library of a cell, and whether it had to be compiled. Raises JitError or StoreError.

    A lock a key lets one process compile while the others wait for its record.
    """
    key = request.key()
    with store.making(KIND, key):
        body = store.record(KIND, key)
        fresh = body is None or not store.holds(body["library"])
        if body is None or fresh:
            body = {**asdict(request), "toolchain": toolchain.require(), **_run_worker(store, request)}
            store.put_record(KIND, key, body)
    return store.blob(body["library"]), fresh


def _run_worker(store: Store, request: Request) -> dict[str, str]:
    """Compile and link in a fresh process; the names of cubin, PTX and library in the store."""
    with tempfile.TemporaryDirectory(prefix="kf-jit-") as folder:
        Path(folder, "request.json").write_text(json.dumps(asdict(request)))
        environment = toolchain.compiler_environment(Cell.parse(request.cell).sm, folder)
        command = [sys.executable, "-m", "kernel_factory.jit", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode != 0:
            raise JitError(f"{request.cell}: compiling the JIT form failed; its log:\n{done.stdout}{done.stderr}")
        files = {"cubin": "cell.cubin", "ptx": "cell.ptx", "library": "cell.so"}
        return {name: store.put_blob(Path(folder, file).read_bytes()) for name, file in files.items()}


def arguments(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """The buffers in the order in which a cell's function takes them: inputs, the output, scratch."""
    return tuple(buffer for role in ("input", "output", "scratch") for buffer in buffers if buffer.role == role)


def _worker(folder: Path) -> None:
    """Compile the request in ``folder`` and leave cell.cubin, cell.ptx and cell.so there."""
    request = Request(**json.loads((folder / "request.json").read_text()))
    compiled = _compile(request.family, request.family.plan(Cell.parse(request.cell)))
    (folder / "cell.cubin").write_bytes(compiled.__cubin__)
    (folder / "cell.ptx").write_text(compiled.__ptx__)
    compiled.export_to_c(str(folder / "cell.o"), function_name=FUNCTION)
    _link(folder, request.emulated)


def _compile(family: Family, plan: CellPlan) -> Any:
    """``cute.compile`` of one function that makes every launch of a cell, on the caller's current stream."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    order = arguments(plan.buffers)
    places = {buffer.name: place for place, buffer in enumerate(order)}
    steps = [(family.kernels.host_entry(step.spec).function, step) for step in plan.steps]

    @cute.jit
    def run(*operands: Any) -> None:
        *tensors, stream = operands
        for function, step in cutlass.const_expr(steps):
            pointers = [tensors[places[name]].iterator for name in step.operands]
            function(*pointers, *[cutlass.Int32(value) for value in step.scalars], stream)

    fakes = [
        make_fake_tensor(getattr(cutlass, _DTYPES[buffer.dtype]), buffer.shape, buffer.strides, assumed_align=16)
        for buffer in order
    ]
    return cute.compile(run, *fakes, make_fake_stream(use_tvm_ffi_env_stream=True), options=OPTIONS)


def _link(folder: Path, emulated: bool) -> None:
    from cutlass.cute.runtime import find_runtime_libraries

    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-Wl,-z,noexecstack", "-Wl,-Bsymbolic", "-o", "cell.so"]
    runtime, tvm_ffi = find_runtime_libraries(enable_tvm_ffi=True)
    inputs = ["cell.o", str(_SHIM) if emulated else runtime, tvm_ffi]
    subprocess.run([*command, *inputs], check=True, cwd=folder)


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
