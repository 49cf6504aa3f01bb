"""JIT trial: one cell called through ``kf_runtime`` in its JIT form, on the emulated driver, against the cubin's PTX.

The call needs a process whose only libcuda is the emulated one: run as a module, this file is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from kf_runtime.cell import Cell

from kernel_factory.bench import MODES, Bench, run_chain
from kernel_factory.reference import REFERENCES, relative_error

INPUTS = "random"


class JitTrialError(Exception):
    """The JIT form did not run: the process's own words."""


@dataclass(frozen=True, kw_only=True)
class JitTrial:
    """How many elements of the output differ in bits from the cubin's, and its error against the float64 oracle."""

    different: int
    oracle_norm: float

    @property
    def right(self) -> bool:
        return self.different == 0


def run(bench: Bench, store: Path) -> JitTrial:
    """Call a built cell in its JIT form. Raises JitTrialError."""
    built = bench.built
    with tempfile.TemporaryDirectory(prefix="kf-jit-") as folder:
        command = [sys.executable, "-m", "kernel_factory.jit_trial", built.family, built.cell.key, str(bench.seed)]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "KF_STORE": str(store)}
        done = subprocess.run(
            [*command, folder], env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise JitTrialError(f"{built.cell}: the JIT form did not run:\n{done.stdout}{done.stderr}")
        found = torch.load(Path(folder, "out.pt"))
    inputs = bench.reference.inputs(built.cell, INPUTS, bench.seed)
    proved, _ = run_chain(bench, inputs, MODES[0])
    different = int((found.view(torch.int16) != proved.view(torch.int16)).sum())
    return JitTrial(different=different, oracle_norm=relative_error(found, bench.reference.oracle(built.cell, inputs)))


def _call(family: str, key: str, seed: int, folder: Path) -> None:
    cell = Cell.parse(key)
    from kernel_factory.emulator import install_driver

    install_driver(cell.sm)
    import kf_runtime

    from kernel_factory import jit

    jit.register(family, [cell])
    reference = REFERENCES[cell.op]
    with torch.no_grad():
        out = reference.call(cell, reference.inputs(cell, INPUTS, seed))
    status = kf_runtime.status()
    if status.hits != 1:
        raise SystemExit(f"the call took the generic path: {json.dumps(status.to_json(), default=str)}")
    torch.save(out, folder / "out.pt")


if __name__ == "__main__":
    _call(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
