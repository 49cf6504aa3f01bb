"""Compile: KernelSpec × SM -> Artifact, without a GPU.

Each compile runs in a process of its own with a fresh dump folder: the DSL names its dumps
after the function alone, so two compiles in one folder would overwrite each other. The target
comes from CUTE_DSL_ARCH; no device is asked. Run as a module, this file is that process.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from kernel_factory import toolchain
from kernel_factory.artifact import Artifact
from kernel_factory.family import Family, HostEntry, KernelSpec, discover
from kernel_factory.store import Store, digest

KIND = "artifact"
HOST_PREFIX = "kf"
_DTYPES = {"bf16": "BFloat16", "f16": "Float16", "f32": "Float32", "i32": "Int32"}


class CompileError(Exception):
    """The compiler refused a kernel; the message carries its log."""


def record_key(family: Family, spec: KernelSpec, sm: str) -> str:
    """The name of the artifact record: everything that the bytes depend on."""
    return digest([spec.key, sm, family.source_digest(), toolchain.require()])


def compile_kernel(root: Path, spec: KernelSpec, sm: str) -> tuple[Artifact, bool]:
    """The artifact of a spec on an SM, and whether it had to be compiled. Raises CompileError."""
    store = Store(root=root)
    key = record_key(discover()[spec.family], spec, sm)
    with store.making(KIND, key):
        body = store.record(KIND, key)
        if body is not None:
            return Artifact.from_json(body), False
        artifact = _run_worker(store, spec, sm)
        store.put_record(KIND, key, artifact.to_json())
        return artifact, True


def compile_all(
    root: Path,
    jobs: list[tuple[KernelSpec, str]],
    executor: Executor | None = None,
    progress: Callable[[Artifact, bool], None] = lambda artifact, fresh: None,
) -> list[Artifact]:
    """Compile every (spec, SM), a process each. ``executor`` decides how many run at once."""
    own = executor is None
    pool: Executor = executor if executor is not None else ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        futures = [pool.submit(compile_kernel, root, spec, sm) for spec, sm in jobs]
        for future in as_completed(futures):
            progress(*future.result())
        return [future.result()[0] for future in futures]
    finally:
        if own:
            pool.shutdown(cancel_futures=True)


def _run_worker(store: Store, spec: KernelSpec, sm: str) -> Artifact:
    with tempfile.TemporaryDirectory(prefix="kf-compile-") as folder:
        request = Artifact(
            spec=spec, sm=sm, symbol="", cubin="", ptx="", host="", entry="", pointers=0, scalars=0,
            toolchain=toolchain.require(),
        )  # fmt: skip
        Path(folder, "request.json").write_text(json.dumps(request.to_json()))
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")},
            "CUTE_DSL_ARCH": sm,
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": folder,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # the sources that the key was made of
        }
        command = [sys.executable, "-m", "kernel_factory.compile", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, check=False)
        if done.returncode != 0:
            raise CompileError(f"{spec.key} for {sm}: the compiler failed; its log:\n{done.stdout}{done.stderr}")
        reply = json.loads(Path(folder, "reply.json").read_text())
        blobs = {name: store.put_blob(Path(folder, file).read_bytes()) for name, file in reply.pop("files").items()}
        return Artifact.from_json({**request.to_json(), **reply, **blobs})


def _worker(folder: Path) -> None:
    """Compile the request in ``folder`` and leave cubin, PTX, host object and reply.json there."""
    request = Artifact.from_json(json.loads((folder / "request.json").read_text()))
    entry: HostEntry = discover()[request.spec.family].kernels.host_entry(request.spec)
    compiled = compile_entry(entry)
    host = compiled.dump_to_object(HOST_PREFIX)  # not export_to_c: its C header knows no variadic host function
    (folder / "host.o").write_bytes(host)
    (cubin,) = folder.glob("*.cubin")
    (ptx,) = folder.glob("*.ptx")
    text = ptx.read_text()
    symbols = [line.split(".entry ")[1].split("(")[0].strip() for line in text.splitlines() if ".entry " in line]
    if len(symbols) != 1:
        raise CompileError(f"{request.spec.key}: expected one kernel in the module; found {len(symbols)}: {symbols}")
    reply = {
        "symbol": symbols[0],
        "entry": _host_function(host),
        "pointers": len(entry.pointer_dtypes),
        "scalars": entry.scalars,
        "files": {"cubin": cubin.name, "ptx": ptx.name, "host": "host.o"},
        "toolchain": f"{request.toolchain}, CUDA tools {toolchain.ptx_tools(text)}",
    }
    (folder / "reply.json").write_text(json.dumps(reply))


def _host_function(host: bytes) -> str:
    """The function of a host object that takes an array of argument pointers and their count."""
    symbols = ELFFile(io.BytesIO(host)).get_section_by_name(".symtab").iter_symbols()
    found = [s.name for s in symbols if s.name.startswith(f"_mlir_{HOST_PREFIX}__mlir_ciface_")]
    if len(found) != 1:
        raise CompileError(f"host object: expected one _mlir_{HOST_PREFIX}__mlir_ciface_ function; found {found}")
    return found[0]


def compile_entry(entry: HostEntry) -> Any:
    """``cute.compile`` of a host function on stand-in arguments: null-free fake pointers, ones, stream 0."""
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    pointers = [
        make_ptr(getattr(cutlass, _DTYPES[dtype]), 0x10000 * (i + 1), cute.AddressSpace.gmem, assumed_align=16)
        for i, dtype in enumerate(entry.pointer_dtypes)
    ]
    scalars = [cutlass.Int32(1)] * entry.scalars
    return cute.compile(entry.function, *pointers, *scalars, cuda.CUstream(0))


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
