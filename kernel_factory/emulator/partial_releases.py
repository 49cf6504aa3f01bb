"""Releases by some lanes of a warp: what the other lanes did since the warp last met is not released with it.

An elected lane that arrives on an mbarrier orders its own accesses. Those of the other lanes may happen later still,
until ``bar.warp.sync`` or a barrier lets the warp meet: so they are given the clock that follows the release. Reads
and writes of ``ldmatrix`` and ``stmatrix`` are the warp's own, done when the instruction is; and writes that a proxy
fence lies behind keep their clock, which the fence speaks of.
"""

from __future__ import annotations

import numpy as np

MANY = 32  # "lane" of a read by more than one lane
TOGETHER = 33  # "lane" of a read by the warp as one


class PartialReleases:
    """For every thread of a batch: the own clock of its warp at its last access, and at its last release."""

    def __init__(self, order: object) -> None:
        self.order, self.M = order, order.M
        self.touched, self.freed = np.zeros(self.M.T, np.int32), np.zeros(self.M.T, np.int32)

    def released(self, threads: np.ndarray) -> None:
        """These threads have just released (and their warps' clocks gone up): the others' accesses come after."""
        order = self.order
        ctas, warps = order._warps(threads)
        clock = order.known[ctas, warps, order.own[ctas, warps]]
        lanes = (warps * self.M.cta_count + ctas)[:, None] * 32 + np.arange(32)
        arrived = np.zeros(self.M.T, bool)
        arrived[threads] = True
        arrived = arrived[lanes]
        self.freed[lanes] = np.where(arrived, (clock - 1)[:, None], self.freed[lanes])
        if arrived.all():
            return
        met = np.repeat(order.synced[ctas, warps][:, None], 32, axis=1)
        if order.met is not None:  # the lanes that arrive may have met some others by themselves
            met = np.maximum(met, np.where(arrived[:, :, None], order.met[lanes], 0).max(axis=1))
        late = (self.touched[lanes] >= met) & (self.touched[lanes] > self.freed[lanes])
        for i in np.flatnonzero(late.any(axis=1)):
            alone = int(arrived[i].sum()) == 1
            late_i, met_i = np.append(late[i], alone), np.append(met[i], met[i].max())
            self._postpone(int(ctas[i]), int(warps[i]), int(clock[i]), late_i, met_i, lanes[i])

    def _postpone(self, cta: int, warp: int, clock: int, late: np.ndarray, met: np.ndarray, lanes: np.ndarray) -> None:
        """Accesses of ``late`` lanes since they ``met`` move to ``clock``; entries 32 are for reads by many lanes."""
        order, M = self.order, self.M
        column = int(order.own[cta, warp])
        freed = np.append(self.freed[lanes], 0)
        width = M.shared_stride // order.G
        start = int(M.cluster_start[cta])
        cells = slice(start * width, (start + M.cluster_size) * width)
        reads = order.reads[column, cells]
        lane = np.minimum(reads & 63, MANY)
        moved = ((reads >> 6) >= met[lane]) & late[lane] & ((reads >> 6) > freed[lane]) & (reads & 63 != TOGETHER)
        reads[moved] = (clock << 6) | (reads[moved] & 63)
        last = order.last[cells]
        known, lane = last >> order.bits, last & 31
        moved = ((last & order.thread_mask) >> 5 == column) & (known >= met[lane]) & late[lane] & (known > freed[lane])
        moved &= known > order.fenced[cta, warp, column]
        last[moved] = (clock << order.bits) | (last[moved] & order.thread_mask)
