"""Bench: a built cell on the emulator, ready to run its launches and be compared with the rounding model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from kf_runtime.plan import Buffer, Launch

from kernel_factory import emulator, reference, sample
from kernel_factory.built import BuiltCell
from kernel_factory.family import Step, discover

MODES: Final = ("lockstep", "warp-serial", "race")
NORM_BAR: Final = 1.5e-3  # the policy's bars against the rounding model, for checks that write no evidence
ROW_BAR: Final = 1e-2
_PARAMETERS: Final = ("weight", "bias")
_PROBE: Final = 8  # blocks run first, to learn what one costs

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One cell: its launches with their kernels, what they should compute, and the seed of everything random."""

    built: BuiltCell
    kernels: tuple[emulator.Kernel, ...]
    steps: tuple[Step, ...]
    expectation: ModuleType
    reference: reference.Reference
    seed: int

    @classmethod
    def of(cls, built: BuiltCell, ptx: tuple[str, ...], seed: int) -> Bench:
        """The bench of a built cell with these PTX texts, one a launch."""
        torch.set_num_threads(1)
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

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The plan's launches, in order."""
        return self.built.plan.launches


def modes_of(name: str) -> tuple[str, ...]:
    """Order is the same whatever the values are: only the random set runs in every mode."""
    return MODES if name == "random" else MODES[:1]


def label(name: str, mode: str) -> str:
    """How numerics name a set's run in a mode."""
    return name if mode == MODES[0] else f"{name} ({mode})"


# ------------------------------------------------------------------ whole cells


def run_chain(bench: Bench, inputs: Tensors, mode: str) -> tuple[torch.Tensor, list[emulator.Result]]:
    """Every launch whole, each on what the one before wrote; scratch and output poisoned first."""
    memory = emulator.Memory(seed=bench.seed)
    addresses = {}
    for buffer in bench.built.plan.buffers:
        if buffer.role == "input":
            addresses[buffer.name] = memory.add(buffer.name, _bits(inputs[buffer.name]), writable=False)
        else:
            addresses[buffer.name] = memory.poison(buffer.name, buffer.nbytes)
    results = [
        emulator.run(kernel, config(launch, addresses), memory, mode=mode, seed=bench.seed)
        for kernel, launch in zip(bench.kernels, bench.launches, strict=True)
    ]
    return _read(memory, bench.built.plan.buffer("out")), results


# ------------------------------------------------------------------ one launch, sampled


@dataclass(frozen=True, kw_only=True)
class Target:
    """One launch of a bench and the blocks of it that run, with the regions they own."""

    bench: Bench
    index: int
    blocks: tuple[int, ...]

    @property
    def launch(self) -> Launch:
        return self.bench.launches[self.index]

    @property
    def regions(self) -> list[Any]:
        """What the blocks own, in block order."""
        cell, step, grid = self.bench.built.cell, self.bench.steps[self.index], self.launch.grid
        owned = self.bench.expectation.owned
        return [region for block in self.blocks for region in owned(cell, step, sample.position(grid, block))]


def affordable(bench: Bench, index: int, inputs: Tensors, staged: Any, budget: int) -> Target:
    """A target of as many blocks as ``budget`` thread-instructions buy; a few run first, to learn the price."""
    grid = bench.launches[index].grid
    probe = Target(bench=bench, index=index, blocks=sample.choose(grid, _PROBE, bench.seed))
    memory, addresses = stage(probe, inputs, staged)
    cost = emulator.run(
        bench.kernels[index],
        config(probe.launch, addresses),
        memory,
        seed=bench.seed,
        ctas=probe.blocks,
        counters=False,
    )
    count = budget * len(probe.blocks) // max(1, cost.thread_instructions)
    return Target(bench=bench, index=index, blocks=sample.choose(grid, count, bench.seed))


def stage(target: Target, inputs: Tensors, staged: Any) -> tuple[emulator.Memory, dict[str, int]]:
    """Memory for one launch: inputs, scratch as the model has it, and what the launch writes poisoned."""
    bench, step = target.bench, target.bench.steps[target.index]
    memory = emulator.Memory(seed=bench.seed)
    addresses = {}
    for name in dict.fromkeys(step.operands):
        buffer = bench.built.plan.buffer(name)
        if name == bench.expectation.WRITES[step.spec.kernel]:
            addresses[name] = memory.poison(name, buffer.nbytes)
            continue
        value = inputs[name] if name in inputs else staged.operand(bench.built.cell, name, target.regions)
        addresses[name] = memory.add(name, _laid_out(buffer, value), writable=False)
    return memory, addresses


def run_target(target: Target, inputs: Tensors, staged: Any, mode: str) -> tuple[dict[str, float], emulator.Result]:
    """Run a target on the model's values and compare what its blocks own with the model."""
    found, result = launch_target(target, inputs, staged, mode)
    return compare(target, found, staged), result


def launch_target(target: Target, inputs: Tensors, staged: Any, mode: str) -> tuple[torch.Tensor, emulator.Result]:
    """Run a target on the model's values; the buffer it wrote and what the emulator saw."""
    bench = target.bench
    name = bench.expectation.WRITES[bench.steps[target.index].spec.kernel]
    memory, addresses = stage(target, inputs, staged)
    kernel = bench.kernels[target.index]
    request = config(target.launch, addresses)
    result = emulator.run(kernel, request, memory, mode=mode, seed=bench.seed, ctas=target.blocks)
    return _read(memory, bench.built.plan.buffer(name)), result


def compare(target: Target, found: torch.Tensor, staged: Any) -> dict[str, float]:
    """Errors over the owned regions: norm, and the worst row over the rms row norm."""
    gap = size = largest = 0.0
    rows = 0
    for name, region in target.regions:
        row_axis = target.bench.expectation.ROW_AXES[name]
        axis = row_axis - sum(isinstance(i, int) for i in region[:row_axis])
        want = staged.expected(target.bench.built.cell, (name, region)).double()
        difference, norms = (found[region].double() - want).norm(dim=axis), want.norm(dim=axis)
        gap += difference.square().sum().item()
        size += norms.square().sum().item()
        largest = max(largest, difference.max().item()) if not difference.isnan().any() else math.nan
        rows += norms.numel()
    if size == 0:
        return {"model_norm": gap, "model_worst_row": largest}
    return {"model_norm": (gap / size) ** 0.5, "model_worst_row": largest / (size / rows) ** 0.5}


def within_bars(figures: dict[str, float]) -> bool:
    """Whether the errors of a launch are those of a right kernel; a NaN is not."""
    return figures["model_norm"] <= NORM_BAR and figures["model_worst_row"] <= ROW_BAR


# ------------------------------------------------------------------ bytes and counts


def config(launch: Launch, addresses: dict[str, int]) -> emulator.LaunchConfig:
    """A launch at these addresses, for the emulator."""
    return emulator.LaunchConfig(
        grid=launch.grid,
        block=launch.block,
        dynamic_shared=launch.shared_bytes,
        params=launch.images_at(addresses),
        cluster=launch.cluster,
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


def counted(result: emulator.Result) -> dict[str, Any]:
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
