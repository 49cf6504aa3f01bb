"""Proof: one emulated run of a cell, as plain data.

``prove`` draws inputs from the seed, runs the launches in every mode, compares with the rounding
model and the float64 oracle, and keeps findings and counters. Outputs and scratch are poisoned
before every launch; a block that leaves an element of its own unwritten, or writes one that is
not its own, shows as a NaN or as a stray write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from kf_runtime.plan import Buffer, Launch

from kernel_factory import emulator, reference, sample
from kernel_factory.built import BuiltCell
from kernel_factory.family import Step, discover

MODES: Final = ("lockstep", "warp-serial", "race")
CHAINED_UP_TO: Final = 128  # largest N that runs whole, each launch on what the one before wrote
BUDGET: Final = 60_000_000  # thread-instructions of a cell's sampled launches together, in one mode, random set
STRESS_SHARE: Final = 4  # the other sets run one in so many of those blocks, corners and edges included
_PARAMETERS: Final = ("_weight", "_bias")
_PROBE: Final = 8  # blocks run first to learn what one costs

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One cell on the emulator's bench: its launches with their kernels, and what they should compute."""

    built: BuiltCell
    kernels: tuple[emulator.Kernel, ...]
    steps: tuple[Step, ...]
    expectation: ModuleType
    reference: reference.Reference
    seed: int

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.built.plan.launches

    @classmethod
    def of(cls, built: BuiltCell, ptx: tuple[str, ...], seed: int) -> Bench:
        """The bench of a built cell with these PTX texts, one a launch."""
        family = discover()[built.family]
        pairs = zip(ptx, built.plan.launches, strict=True)
        return cls(
            built=built,
            kernels=tuple(emulator.load(text).kernels[launch.symbol] for text, launch in pairs),
            steps=family.plan(built.cell).steps,
            expectation=family.expectation,
            reference=reference.REFERENCES[built.cell.op],
            seed=seed,
        )


def prove(built: BuiltCell, ptx: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Numerics, findings and counters of one cell: JSON-ready, the same for the same seed."""
    torch.set_num_threads(1)
    bench = Bench.of(built, ptx, seed)
    return (_chained if built.cell.N <= CHAINED_UP_TO else _per_launch)(bench)


def _modes_of(name: str) -> tuple[str, ...]:
    """Order is the same whatever the values are: only the random set runs in every mode."""
    return MODES if name == "random" else MODES[:1]


def _label(name: str, mode: str) -> str:
    return name if mode == MODES[0] else f"{name} ({mode})"


# ------------------------------------------------------------------ whole cells


def _chained(bench: Bench) -> dict[str, Any]:
    cell = bench.built.cell
    numerics: dict[str, Any] = {}
    findings: dict[str, list[str]] = {mode: [] for mode in MODES}
    counters: dict[str, Any] = {}
    for name in bench.reference.input_sets(cell):
        inputs = bench.reference.inputs(cell, name, bench.seed)
        oracle = bench.reference.oracle(cell, inputs)
        model = bench.expectation.model(cell, inputs, torch.float64)["out"]
        for mode in _modes_of(name):
            out, results = _run_chain(bench, inputs, mode)
            for launch, result in zip(bench.launches, results, strict=True):
                findings[mode] += [str(finding) for finding in result.findings]
                if (name, mode) == ("random", MODES[0]):
                    counters[launch.kernel] = _counted(result)
            numerics[_label(name, mode)] = {
                "model_norm": reference.relative_error(out, model),
                "model_worst_row": reference.worst_row(out, model, bench.expectation.ROW_AXES["out"]),
                "oracle_norm": reference.relative_error(out, oracle),
                "model_to_oracle": reference.relative_error(model, oracle),
            }
    return {"seed": bench.seed, "coverage": "chained", "numerics": numerics, "findings": findings, "counters": counters}


def _run_chain(bench: Bench, inputs: Tensors, mode: str) -> tuple[torch.Tensor, list[emulator.Result]]:
    memory = emulator.Memory(seed=bench.seed)
    addresses = {}
    for buffer in bench.built.plan.buffers:
        if buffer.role == "input":
            addresses[buffer.name] = memory.add(buffer.name, _bits(inputs[buffer.name]), writable=False)
        else:
            addresses[buffer.name] = memory.poison(buffer.name, buffer.nbytes)
    results = [
        emulator.run(kernel, _config(launch, addresses), memory, mode=mode, seed=bench.seed)
        for kernel, launch in zip(bench.kernels, bench.launches, strict=True)
    ]
    return _read(memory, bench.built.plan.buffer("out")), results


# ------------------------------------------------------------------ sampled launches


def _per_launch(bench: Bench) -> dict[str, Any]:
    cell = bench.built.cell
    numerics: dict[str, Any] = {}
    findings: dict[str, list[str]] = {mode: [] for mode in MODES}
    counters: dict[str, Any] = {}
    samples: dict[int, tuple[int, ...]] = {}
    fewer: dict[int, tuple[int, ...]] = {}
    for name in bench.reference.input_sets(cell):
        inputs = bench.reference.inputs(cell, name, bench.seed)
        buffers = {**inputs, **bench.expectation.model(cell, inputs, torch.float32)}
        for index in range(len(bench.launches)):
            if index not in samples:
                samples[index] = _choose(bench, index, buffers)
                fewer[index] = sample.choose(
                    bench.launches[index].grid, len(samples[index]) // STRESS_SHARE, bench.seed
                )
            for mode in _modes_of(name):
                blocks = samples[index] if name == "random" else fewer[index]
                figures, result = run_sample(bench, index, buffers, mode, blocks)
                findings[mode] += [str(finding) for finding in result.findings]
                if (name, mode) == ("random", MODES[0]):
                    counters[bench.launches[index].kernel] = _counted(result)
                _keep_worst(numerics.setdefault(_label(name, mode), {}), figures)
    fraction = {
        launch.kernel: round(len(samples[i]) / prod(launch.grid), 4) for i, launch in enumerate(bench.launches)
    }
    return {
        "seed": bench.seed,
        "coverage": "per-launch",
        "fraction": fraction,
        "numerics": numerics,
        "findings": findings,
        "counters": counters,
    }


def _keep_worst(kept: dict[str, float], figures: dict[str, float]) -> None:
    for name, value in figures.items():
        kept[name] = value if not kept.get(name, 0.0) >= value else kept[name]  # a NaN is kept


def _choose(bench: Bench, index: int, buffers: Tensors) -> tuple[int, ...]:
    """The blocks of one launch that are run: a few are run first, to learn how many the budget buys."""
    launch = bench.launches[index]
    memory, addresses = _stage(bench, index, buffers)
    probe = sample.choose(launch.grid, _PROBE, bench.seed)
    config = _config(launch, addresses)
    cost = emulator.run(bench.kernels[index], config, memory, seed=bench.seed, ctas=probe, counters=False)
    return sample.choose(launch.grid, _affordable(bench, len(probe), cost.thread_instructions), bench.seed)


def _affordable(bench: Bench, blocks: int, cost: int) -> int:
    """Blocks that one launch's share of the budget buys, at the price of a probe."""
    return BUDGET // len(bench.launches) * blocks // max(1, cost)


def _stage(bench: Bench, index: int, buffers: Tensors) -> tuple[emulator.Memory, dict[str, int]]:
    """Memory for one launch: its operands as the model has them, what it writes poisoned."""
    step = bench.steps[index]
    memory = emulator.Memory(seed=bench.seed)
    addresses = {}
    for name in dict.fromkeys(step.operands):
        buffer = bench.built.plan.buffer(name)
        if name == bench.expectation.WRITES[step.spec.kernel]:
            addresses[name] = memory.poison(name, buffer.nbytes)
        else:
            addresses[name] = memory.add(name, _laid_out(buffer, buffers[name]), writable=False)
    return memory, addresses


def run_sample(
    bench: Bench, index: int, buffers: Tensors, mode: str, blocks: tuple[int, ...]
) -> tuple[dict[str, float], emulator.Result]:
    """Run a sample of one launch's blocks on the model's values and compare what they own."""
    launch, step = bench.launches[index], bench.steps[index]
    target = bench.expectation.WRITES[step.spec.kernel]
    memory, addresses = _stage(bench, index, buffers)
    config = _config(launch, addresses)
    result = emulator.run(bench.kernels[index], config, memory, mode=mode, seed=bench.seed, ctas=blocks)
    found = _read(memory, bench.built.plan.buffer(target))
    return _compare(bench, step, launch, blocks, found, buffers[target]), result


def _compare(
    bench: Bench, step: Step, launch: Launch, blocks: tuple[int, ...], found: torch.Tensor, expected: torch.Tensor
) -> dict[str, float]:
    """Errors over the regions that the sampled blocks own."""
    gap = size = largest = 0.0
    rows = 0
    for block in blocks:
        for name, region in bench.expectation.owned(bench.built.cell, step, sample.position(launch.grid, block)):
            row_axis = bench.expectation.ROW_AXES[name]
            axis = row_axis - sum(isinstance(i, int) for i in region[:row_axis])
            got, want = found[region].double(), expected[region].double()
            difference, norms = (got - want).norm(dim=axis), want.norm(dim=axis)
            gap += difference.square().sum().item()
            size += norms.square().sum().item()
            largest = max(largest, difference.max().item()) if not difference.isnan().any() else math.nan
            rows += norms.numel()
    rms = (size / rows) ** 0.5 if rows else 0.0
    if size == 0:
        return {"model_norm": gap, "model_worst_row": largest}
    return {"model_norm": (gap / size) ** 0.5, "model_worst_row": largest / rms}


# ------------------------------------------------------------------ bytes


def _config(launch: Launch, addresses: dict[str, int]) -> emulator.LaunchConfig:
    return emulator.LaunchConfig(
        grid=launch.grid,
        block=launch.block,
        dynamic_shared=launch.shared_bytes,
        params=launch.images_at(addresses),
    )


def _bits(value: torch.Tensor) -> np.ndarray[Any, Any]:
    return value.contiguous().view(torch.int16).numpy()


def _laid_out(buffer: Buffer, value: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor in its buffer's layout; elements of a padded row that the tensor lacks are poison."""
    if tuple(value.shape) == buffer.shape:
        return _bits(value)
    padded = torch.full(buffer.shape, -1, dtype=torch.int16)
    padded[tuple(slice(0, extent) for extent in value.shape)] = value.contiguous().view(torch.int16)
    return padded.numpy()


def _read(memory: emulator.Memory, buffer: Buffer) -> torch.Tensor:
    raw = memory.read(buffer.name, np.int16, buffer.shape)
    return torch.from_numpy(raw).view(torch.bfloat16)


def _counted(result: emulator.Result) -> dict[str, Any]:
    """The counters that evidence keeps: per buffer, not per line, with the two ratios that policy bars.

    ``traffic_ratio``: sectors requested over distinct sectors, every buffer but the parameters.
    ``wavefront_ratio``: shared-memory wavefronts over their ideal.
    """
    counters = result.counters.to_json()
    data = [d for name, ways in counters["memory"].items() if not name.endswith(_PARAMETERS) for d in ways.values()]
    shared = counters["shared"]
    return {
        "thread_instructions": result.thread_instructions,
        "memory": counters["memory"],
        "shared": shared,
        "mma": counters["mma"],
        "cp_async_bytes": counters["cp_async_bytes"],
        "barriers": counters["barriers"],
        "traffic_ratio": round(sum(d["sectors"] for d in data) / sum(d["unique"] for d in data), 4),
        "wavefront_ratio": round(shared["wavefronts"] / shared["ideal"], 4) if shared.get("ideal") else 1.0,
    }
