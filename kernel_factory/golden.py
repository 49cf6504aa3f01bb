"""Golden vectors: single launches with inputs and the emulator's outputs, to be replayed on a real GPU.

One folder a launch: ``launch.json`` (the launch, its buffers, the bound), ``cubin``, and one raw
file a buffer. Nothing in it needs the factory to be read: the replay has torch and the wheel.

The contraction runs on small integers, whose products and sums are exact in every order: a GPU
must agree to the bit. The other kernels run on random values: accumulation order and approximate
functions may move a BF16 rounding, so that elements may differ by one step, and few do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kf_runtime.plan import Plan

from kernel_factory import emulator
from kernel_factory.bench import NORM_BAR, Bench, Target, config, stage
from kernel_factory.built import BuiltCell
from kernel_factory.store import Store, write_atomically


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A replayed launch against its golden output: elements that differ, their largest step, and the norm."""

    launch: str
    elements: int
    different: int
    norm: float
    exact: bool

    @property
    def right(self) -> bool:
        """Bit for bit where integers went in; within the bound elsewhere."""
        return self.different == 0 if self.exact else self.norm <= NORM_BAR


def record(store: Store, built: BuiltCell, seed: int, folder: Path) -> list[Path]:
    """Run every launch of a cell on the emulator and write its golden folder; the folders are returned."""
    texts = tuple(store.blob(artifact.ptx).decode() for artifact in built.artifacts)
    bench = Bench.of(built, texts, seed)
    inputs = bench.reference.inputs(built.cell, "random", seed)
    staged = bench.expectation.Staged(built.cell, inputs, torch.float64)
    written = []
    for index, launch in enumerate(bench.launches):
        exact = launch.kernel == "contract"
        if exact:
            staged.ab = _integers(staged.ab, seed)
        blocks = tuple(range(int(np.prod(launch.grid))))
        target = Target(bench=bench, index=index, blocks=blocks)
        memory, addresses = stage(target, inputs, staged)
        before = {name: _raw(built, memory, name) for name in addresses}
        result = emulator.run(bench.kernels[index], config(launch, addresses), memory, seed=seed)
        if result.findings:
            raise ValueError(f"{built.cell}: {launch.kernel}: {result.findings[0]}")
        output = bench.expectation.WRITES[launch.kernel]
        place = folder / f"{built.cell.key.replace('/', '_')}.{index}.{launch.kernel}"
        meta = {
            "plan": Plan(buffers=built.plan.buffers, launches=(launch,)).to_json(),
            "output": output,
            "exact": exact,
        }
        write_atomically(place / "launch.json", json.dumps(meta).encode())
        write_atomically(place / "cubin", store.blob(launch.cubin))
        for name, data in before.items():
            write_atomically(place / f"{name}.in", data.tobytes())
        write_atomically(place / f"{output}.out", _raw(built, memory, output).tobytes())
        written.append(place)
    return written


def _integers(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Integers in [-2, 2] where ``like`` is not padding."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, like.shape, generator=draw).to(like.dtype) * (like != 0)


def _raw(built: BuiltCell, memory: emulator.Memory, name: str) -> np.ndarray[Any, Any]:
    return memory.read(name, np.int16, (built.plan.buffer(name).nbytes // 2,))


def compare(place: Path, found: np.ndarray[Any, Any]) -> Difference:
    """A replayed output, as int16 bits of BF16, against the golden one. Bits that are poison in both are left out."""
    meta = json.loads((place / "launch.json").read_text())
    golden = np.frombuffer((place / f"{meta['output']}.out").read_bytes(), np.int16)
    written = (golden != -1) | (found != -1)
    a, b = (_wide(bits[written]) for bits in (found, golden))
    size = float(np.linalg.norm(b))
    return Difference(
        launch=place.name,
        elements=int(written.sum()),
        different=int((found[written] != golden[written]).sum()),
        norm=float(np.linalg.norm(a - b)) / size if size else float(np.linalg.norm(a)),
        exact=meta["exact"],
    )


def _wide(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
