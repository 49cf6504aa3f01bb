"""tcgen05.commit and tcgen05.fence (PTX ISA 9.7.16.11 and 9.7.16.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..emitter import Emitter, Modifiers
from ..lanes import settle, spread, threads_of
from ..ptx.records import Instruction
from ..registry import emits, runtime
from ..tensor_core import Work
from .cluster import cluster_address, cluster_flat
from .tcgen05_alloc import cta_group


@emits("tcgen05.commit", writes=False)
def commit(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """tcgen05.commit.cta_group.mbarrier::arrive::one{.shared::cluster}{.multicast::cluster}.b64 [mbar]{, mask}.

    One arrival when everything that the thread has issued before is complete; with a mask, one at the same offset in
    each CTA of the cluster whose bit is set.
    """
    cta_group(e, mods)
    mods.one("mbarrier::arrive::one")
    mods.type("b64")
    many = mods.take("multicast::cluster")
    mods.take("shared::cluster", "shared::cta")
    target, *rest = e.operands(2 if many else 1)
    base, offset = cluster_address(e, target)
    where = e.value(rest[0], "u16") if rest else "None"
    e.line(f"tensor_commit(M, sel, {base}, {offset}, {where}, {e.guard()}, {ins.line}, n)")


@dataclass(kw_only=True)
class Commit(Work):
    """The end of a run of instructions: one arrival on each of the mbarriers at these flat addresses."""

    flat: np.ndarray
    epoch: tuple[int, list[int]] | None = None
    commits: ClassVar[bool] = True

    def land(self, M: object) -> None:
        threads = np.full(self.flat.shape[0], self.thread)
        if M.tensor.races:
            M.tensor.races.committed(self, M.mbarriers.find(self.flat, threads, self.line, "tcgen05.commit"))
        M.mbarriers.arrive(self.flat, np.ones(threads.size, np.int64), threads, self.line, what="tcgen05.commit")

    def matters(self, M: object) -> bool:
        """An arrival on a barrier of the CTA's own dies with it; elsewhere it would reach a CTA that has left."""
        return bool((self.flat // M.shared_stride != self.cta).any())


@runtime
def tensor_commit(M, sel, base, offset, where, mask, line, n):
    chosen = settle(mask)
    threads = threads_of(M, sel, chosen)
    flat = cluster_flat(M, sel, base, offset, 8, chosen, line, n)
    for i, thread in enumerate(threads.tolist()):
        at = i if chosen is None else int(chosen[i])
        places = flat[i : i + 1]
        if where is not None:
            places = _everywhere(M, int(flat[i]), int(spread(where, n)[at]))
        work = Commit(cta=int(M.cta[thread]), thread=thread, line=line, flat=places)
        if M.tensor.races:
            M.tensor.races.commit(work)
        M.tensor.issue(work)


def _everywhere(M, flat: int, mask: int) -> np.ndarray:
    """The same offset in the CTAs of the cluster whose rank's bit is set."""
    cta, offset = divmod(flat, M.shared_stride)
    start = int(M.cluster_start[cta])
    ranks = [r for r in range(M.cluster_size) if mask >> r & 1]
    return np.array([(start + r) * M.shared_stride + offset for r in ranks], np.int64)


@emits("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", writes=False)
def fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Orders a thread's asynchronous tcgen05 instructions against what synchronises it with others."""
    if ins.guard:
        raise e.fail("a guarded tcgen05.fence is not emulated")
    e.operands(0)
    e.line(f"tensor_fence(M, sel, {ins.modifiers[0].split('::')[1][:5]!r})")


@runtime
def tensor_fence(M, sel, side):
    if M.tensor.races:
        M.tensor.races.fence(threads_of(M, sel, None), side == "after")
