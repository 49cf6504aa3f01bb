"""Roofline: the least time that a launch could take on an SM, from its counters and published ceilings.

AN ESTIMATE, never a measurement: it says which resource would bind if nothing else did, and by
how much. Nothing in admission reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one part offers at its boost clock. TB/s, TFLOP/s (dense BF16, float32 accumulation), SMs, GHz.

    ``issue`` is warp instructions a cycle and SM; shared memory moves one wavefront of 128 bytes
    a cycle and SM.
    """

    part: str
    memory_tb_s: float
    bf16_tflop_s: float
    sms: int
    ghz: float
    issue: int = 4


# Vendors' data sheets, for the part that stands for each SM. mma.sync reaches about 63 % of the wgmma rate on sm_90.
PARTS: Final = {
    "sm_80": Ceilings(part="A100 SXM 80GB", memory_tb_s=2.04, bf16_tflop_s=312, sms=108, ghz=1.41),
    "sm_89": Ceilings(part="L40S", memory_tb_s=0.864, bf16_tflop_s=362, sms=142, ghz=2.52),
    "sm_90a": Ceilings(part="H200 SXM", memory_tb_s=4.8, bf16_tflop_s=989, sms=132, ghz=1.98),
    "sm_100a": Ceilings(part="B200", memory_tb_s=8.0, bf16_tflop_s=2250, sms=148, ghz=1.85),
    "sm_103a": Ceilings(part="B300", memory_tb_s=8.0, bf16_tflop_s=2500, sms=148, ghz=1.9),
    "sm_120a": Ceilings(part="RTX PRO 6000 Blackwell", memory_tb_s=1.79, bf16_tflop_s=503, sms=188, ghz=2.6),
}
_SECTOR: Final = 32
_FLOP_OF: Final = {"m16n8k16": 2 * 16 * 8 * 16, "m16n8k8": 2 * 16 * 8 * 8}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Microseconds that each resource needs at its ceiling; ``binding`` names the largest."""

    part: str
    memory_us: float
    tensor_us: float
    shared_us: float
    issue_us: float

    @property
    def binding(self) -> str:
        """The resource that binds."""
        times = {name.removesuffix("_us"): value for name, value in vars(self).items() if name.endswith("_us")}
        return max(times, key=lambda name: times[name])

    @property
    def microseconds(self) -> float:
        """The largest of the four."""
        return max(self.memory_us, self.tensor_us, self.shared_us, self.issue_us)


def estimate(launch: dict[str, Any], sm: str) -> Estimate:
    """The estimate for one launch of a piece of evidence, scaled up from the sample that ran.

    Global memory counts distinct sectors (a perfect cache); the other three count what was asked for.
    """
    part, counters, whole = PARTS[sm], launch["counters"], 1 / launch["fraction"]
    sectors = sum(way["unique"] for ways in counters["memory"].values() for way in ways.values())
    flop = sum(count * _FLOP_OF[name.split(".")[0]] for name, count in counters["mma"].items())
    cycles = part.sms * part.ghz * 1e3  # SM cycles in a microsecond
    return Estimate(
        part=part.part,
        memory_us=whole * sectors * _SECTOR / part.memory_tb_s / 1e6,
        tensor_us=whole * flop / part.bf16_tflop_s / 1e6,
        shared_us=whole * counters["shared"].get("wavefronts", 0) / cycles,
        issue_us=whole * counters["thread_instructions"] / 32 / part.issue / cycles,
    )
