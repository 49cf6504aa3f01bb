"""Occupancy: how many blocks of a kernel fit on one SM, and what limits them (CUDA C++ Programming Guide, tables)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kernel_factory.artifact import Facts

REGISTERS: Final = 65536
_REGISTER_UNIT: Final = 256  # registers are handed out per warp in units of so many
_RESERVED: Final = 1024  # shared memory that the system takes from every block


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Threads, blocks and shared memory (bytes) of one SM."""

    threads: int
    blocks: int
    shared: int


SMS: Final = {
    "sm_80": Limits(threads=2048, blocks=32, shared=167936),
    "sm_89": Limits(threads=1536, blocks=24, shared=102400),
    "sm_90a": Limits(threads=2048, blocks=32, shared=233472),
    "sm_100a": Limits(threads=2048, blocks=32, shared=233472),
    "sm_103a": Limits(threads=2048, blocks=32, shared=233472),
    "sm_120a": Limits(threads=1536, blocks=24, shared=102400),
}


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Blocks that fit on an SM, the share of its warps that they are, and the resource that runs out first."""

    blocks: int
    share: float
    limit: str


def of(facts: Facts, sm: str) -> Occupancy:
    """The occupancy of a kernel on an SM."""
    limits = SMS[sm]
    warps = -(-facts.threads // 32)
    per_warp = -(-facts.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    fits = {
        "registers": REGISTERS // (per_warp * warps),
        "shared memory": limits.shared // (facts.static_shared + facts.dynamic_shared + _RESERVED),
        "threads": limits.threads // (32 * warps),
        "blocks": limits.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return Occupancy(blocks=fits[limit], share=fits[limit] * warps * 32 / limits.threads, limit=limit)
