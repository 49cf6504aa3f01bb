"""Thread-block clusters: which CTAs belong together, and how shared addresses name a CTA of the cluster.

A shared address carries the rank of its CTA in bits 24 and up, in the ``shared::cta`` window too (code for CTA pairs
masks bit 24 to reach the even CTA). PTX ISA 5.1.7: the ``shared::cta`` window lies inside the ``shared::cluster``
window. Without clusters the rank is 0 and nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .errors import Fault

RANK_SHIFT = 24


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """Grid and cluster in (x, y, z); ranks count x first (PTX ISA 10: %cluster_ctarank)."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def size(self) -> int:
        return int(np.prod(self.cluster))

    def position(self, ctas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cluster number and rank inside it of linear CTA numbers."""
        ctas = np.asarray(ctas, np.int64)
        gx, gy, _ = self.grid
        cx, cy, cz = self.cluster
        x, y, z = ctas % gx, ctas // gx % gy, ctas // (gx * gy)
        number = x // cx + (gx // cx) * (y // cy + (gy // cy) * (z // cz))
        return number, x % cx + cx * (y % cy + cy * (z % cz))

    def whole(self, ctas: Iterable[int]) -> np.ndarray:
        """The CTAs of all clusters that ``ctas`` touch, cluster by cluster in rank order."""
        chosen = np.asarray(list(ctas), np.int64)
        if self.size == 1:
            return chosen
        everyone = np.arange(int(np.prod(self.grid)))
        number, rank = self.position(everyone)
        keep = np.isin(number, np.unique(self.position(chosen)[0]))
        order = np.lexsort((rank[keep], number[keep]))
        return everyone[keep][order]


def specials(shape: ClusterShape, ctas: np.ndarray, of_thread: np.ndarray) -> dict[str, np.ndarray]:
    """The cluster's special registers (PTX ISA 10.8 to 10.14), one value a thread."""
    one = lambda x: np.array([x], np.uint32)  # noqa: E731
    out = {
        "cluster_nctarank": one(shape.size),
        "is_explicit_cluster": one(int(shape.size > 1)),
        "cluster_ctarank": one(0),
    }
    linear = ctas[of_thread]
    gx, gy, _ = shape.grid
    for axis, extent, coordinate, width in zip(
        "xyz", shape.grid, (linear % gx, linear // gx % gy, linear // (gx * gy)), shape.cluster, strict=True
    ):
        out[f"nclusterid.{axis}"] = one(extent // width)
        out[f"cluster_nctaid.{axis}"] = one(width)
        out[f"clusterid.{axis}"] = (coordinate // width).astype(np.uint32)
        out[f"cluster_ctaid.{axis}"] = (coordinate % width).astype(np.uint32)
    if shape.size > 1:
        out["cluster_ctarank"] = shape.position(linear)[1].astype(np.uint32)
    return out


class ClusterBarrier:
    """barrier.cluster.arrive and .wait (PTX ISA 9.7.13.4): one barrier a cluster, counted over threads that live."""

    def __init__(self, machine: object) -> None:
        self.M = machine
        count = machine.cta_count // machine.cluster_size
        self.arrived = np.zeros(count, np.int64)
        self.generation = np.zeros(count, np.int64)
        self.joined = np.full(machine.T, -1, np.int64)  # the generation that a thread has arrived at
        self.of_thread = machine.cta // machine.cluster_size

    def arrive(self, threads: np.ndarray, line: int, relaxed: bool) -> None:
        cluster = self.of_thread[threads]
        if (self.joined[threads] == self.generation[cluster]).any():
            at = int(threads[np.argmax(self.joined[threads] == self.generation[cluster])])
            self.M.report("cluster-barrier", line, "a thread arrives twice in one phase of barrier.cluster",
                          "put barrier.cluster.wait between two arrivals", at)  # fmt: skip
        self.joined[threads] = self.generation[cluster]
        np.add.at(self.arrived, cluster, 1)
        if self.M.race:
            self.M.race.cluster_arrive(threads, cluster, relaxed)
            self.M.global_race.cluster_arrive(threads, relaxed)
        self.check()

    def check(self) -> None:
        """Complete the phase of every cluster whose living threads have all arrived, and wake who waits."""
        from .machine import CLUSTER, DONE, RUN

        M = self.M
        if not self.arrived.any():
            return
        alive = np.bincount(self.of_thread[M.state != DONE], minlength=self.arrived.shape[0])
        full = (self.arrived >= alive) & (self.arrived > 0)
        if not full.any():
            return
        M.changed()
        self.generation[full] += 1
        self.arrived[full] = 0
        waiting = np.flatnonzero((M.state == CLUSTER) & full[self.of_thread])
        if M.race:
            M.race.cluster_complete(np.flatnonzero(full))
            M.global_race.cluster_complete(np.flatnonzero(full))
        if waiting.size:
            M.state[waiting] = RUN
            if M.race:
                M.race.cluster_wait(waiting, self.of_thread[waiting])
            M.wake(waiting)

    def passed(self, threads: np.ndarray, line: int) -> np.ndarray:
        """Which threads need not wait: the phase that they arrived at is complete."""
        if (self.joined[threads] < 0).any():
            at = int(threads[np.argmin(self.joined[threads])])
            raise Fault("cluster-barrier", line, "barrier.cluster.wait without an arrive before it",
                        "let every thread of the cluster arrive first", at)  # fmt: skip
        return self.generation[self.of_thread[threads]] > self.joined[threads]
