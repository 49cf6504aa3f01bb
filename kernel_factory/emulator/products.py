"""Records of wgmma: an instruction, its products in flight, and the accumulators as matrices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Product:
    """One wgmma instruction: register numbers of D (and of A, unless A lies in shared memory), types, layouts."""

    n: int
    d: tuple[int, ...]
    d_kind: str
    a: tuple[int, ...] | None
    a_kind: str
    b_kind: str
    scale: int
    a_mn: bool
    b_mn: bool
    line: int


@dataclass(slots=True)
class Job:
    """A product of some warpgroups; ``number`` counts each warpgroup's committed groups at the time of issue."""

    product: Product
    groups: np.ndarray
    a: np.ndarray
    b: np.ndarray
    scale_d: np.ndarray
    number: np.ndarray

    def part(self, keep: np.ndarray) -> Job:
        return Job(self.product, self.groups[keep], self.a[keep], self.b[keep], self.scale_d[keep], self.number[keep])


class Accumulator:
    """The D registers of one or more instructions as (warpgroups, 64, N); ``valid`` where the registers are older."""

    def __init__(self, product: Product, groups: int) -> None:
        self.registers, self.kind, self.n = product.d, product.d_kind, product.n
        self.matrix = np.zeros((groups, 64, product.n), np.float32 if product.d_kind != "s32" else np.int64)
        self.valid = np.zeros(groups, bool)
        self.pending = np.zeros(groups, np.int32)


def chains(last: Job, job: Job) -> bool:
    """Can two products be one: same registers and types, the later one added to the earlier one?"""
    a, b = last.product, job.product
    return (
        a.d == b.d
        and a.d_kind != "f16"
        and (a.n, a.a_kind, a.b_kind, a.scale) == (b.n, b.a_kind, b.b_kind, b.scale)
        and bool(job.scale_d.all())
        and np.array_equal(last.groups, job.groups)
    )
