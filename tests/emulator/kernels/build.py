"""Compile a test kernel in a process of its own and capture its launch: PTX, grid, cluster, parameter images.

``python build.py FOLDER MODULE JSON`` is that process; ``build`` starts it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Built:
    """One compiled kernel. ``launch`` is what the host code asked for, its addresses still open."""

    ptx: str
    symbol: str
    launch: Any


def build(
    module: str,
    fields: dict[str, Any],
    operands: tuple[str, ...],
    scalars: tuple[int, ...] = (),
    sm: str = "sm_100a",
) -> Built:
    """Compile ``module.entry(**fields)`` for an SM without a GPU, and capture the launch on named operands."""
    from kernel_factory import elf
    from kernel_factory.capture import HostCode, capture
    from kernel_factory.compile import _host_function
    from kernel_factory.family import KernelSpec, Step

    with tempfile.TemporaryDirectory(prefix="kf-test-kernel-") as name:
        folder = Path(name)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")} | {
            "CUTE_DSL_ARCH": sm,
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": name,
            "PYTHONPATH": os.pathsep.join([str(HERE), *(p for p in sys.path if p)]),
        }
        command = [sys.executable, str(HERE / "build.py"), name, module, json.dumps(fields)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{module} did not compile:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        (cubin,), (ptx,) = folder.glob("*.cubin"), folder.glob("*.ptx")
        (kernel,) = elf.kernels(cubin.read_bytes())
        host = (folder / "host.o").read_bytes()
        launch = capture(
            HostCode(object_bytes=host, entry=_host_function(host), cubin="", kernel=kernel, sm=sm),
            Step(spec=KernelSpec.of("test", module), operands=operands, scalars=scalars),
        )
        return Built(ptx=ptx.read_text(), symbol=kernel.symbol, launch=launch)


def _worker(folder: str, module: str, fields: str) -> None:
    from kernel_factory.compile import HOST_PREFIX, compile_entry

    compiled = compile_entry(importlib.import_module(module).entry(**json.loads(fields)))
    Path(folder, "host.o").write_bytes(compiled.dump_to_object(HOST_PREFIX))


if __name__ == "__main__":
    _worker(*sys.argv[1:])
