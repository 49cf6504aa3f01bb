"""Measure: the timing protocol. A time counts only if it came from a GPU.

Arms run interleaved in ABBA order, so that drift hits all alike. A sample is a few calls
between two CUDA events; the figure is the median with its interquartile range, in microseconds a
call. *Cold* calls rotate through operand sets of at least twice the L2 together; *warm* calls
use one set. Eager and graph replay are separate figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

import torch

SAMPLES: Final = 24  # a multiple of 2: each round is A B B A
_SAMPLE_US: Final = 400.0  # calls are repeated until a sample is about this long


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to compute the same thing. ``call(i)`` runs it on operand set ``i``."""

    name: str
    call: Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds a call: median, first and third quartile, and the number of samples."""

    median_us: float
    q1_us: float
    q3_us: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Summary of the samples."""
        q1, _, q3 = quantiles(samples, n=4)
        return cls(median_us=round(median(samples), 3), q1_us=round(q1, 3), q3_us=round(q3, 3), samples=len(samples))


def compare(arms: list[Arm], sets: int, samples: int = SAMPLES) -> dict[str, Timing]:
    """Time the arms against each other over ``sets`` operand sets (1 is warm), interleaved ABBA."""
    for arm in arms:
        for i in range(max(3, sets)):
            arm.call(i % sets)
    repeats = {arm.name: _repeats(arm, sets) for arm in arms}
    taken: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for _ in range(samples // 2):
        for arm in [*arms, *reversed(arms)]:
            taken[arm.name].append(_sample(arm, sets, repeats[arm.name]))
    return {name: Timing.of(values) for name, values in taken.items()}


def _sample(arm: Arm, sets: int, repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for i in range(repeats):
        arm.call(i % sets)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def _repeats(arm: Arm, sets: int) -> int:
    each = min(_sample(arm, sets, sets) for _ in range(2))
    return max(sets, min(64 * sets, round(_SAMPLE_US / each)))


def graphed(call: Callable[[int], Any], sets: int) -> Callable[[int], Any]:
    """``call`` captured once per operand set; the result replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(sets):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graphs = []
    for i in range(sets):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(i)
        graphs.append(graph)
    return lambda i: graphs[i].replay()


def operand_sets(bytes_of_one: int) -> int:
    """How many operand sets are at least twice the L2 together."""
    l2: int = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-2 * l2 // bytes_of_one))


def ceilings() -> dict[str, float]:
    """What this device does today: copy bandwidth (TB/s, read plus written) and a batched BF16 product (TFLOP/s)."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = compare([Arm(name="copy", call=lambda i: target.copy_(source))], 1)["copy"]
    a = torch.randn(128, 768, 768, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(128, 768, 768, device="cuda", dtype=torch.bfloat16)
    product = compare([Arm(name="bmm", call=lambda i: torch.bmm(a, b))], 1)["bmm"]
    return {
        "copy_tb_s": round(2 * source.numel() / copy.median_us / 1e6, 3),
        "bmm_128x768_tflop_s": round(2 * 128 * 768**3 / product.median_us / 1e6, 1),
    }
