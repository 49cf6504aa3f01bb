"""tcgen05.commit and tcgen05.fence (PTX ISA 9.7.16.11 and 9.7.16.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..emitter import Emitter, Modifiers
from ..issue import Issue
from ..mbarriers import Arrival
from ..ptx.records import Instruction
from ..registry import emits, runtime
from ..tensor_core import Work
from .cluster import cluster_flat
from .tcgen05_alloc import cta_group

_COMMIT = Arrival(what="tcgen05.commit")


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
    where = e.value(rest[0], "u16") if rest else "None"
    e.line(f"tensor_commit({e.issue()}, {e.cluster_place(target)}, {where})")


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
        M.mbarriers.arrive(self.flat, np.ones(threads.size, np.int64), threads, self.line, _COMMIT)

    def matters(self, M: object) -> bool:
        """An arrival on a barrier of the CTA's own dies with it; elsewhere it would reach a CTA that has left."""
        return bool((self.flat // M.shared_stride != self.cta).any())


@runtime
def tensor_commit(issue: Issue, place: tuple, where: np.ndarray | None) -> None:
    M, flat = issue.M, cluster_flat(issue, place, 8)
    masks = None if where is None else issue.each(where).tolist()
    for i, thread in enumerate(issue.threads.tolist()):
        places = flat[i : i + 1] if masks is None else _everywhere(M, int(flat[i]), masks[i])
        work = Commit(cta=int(M.cta[thread]), thread=thread, line=issue.line, flat=places)
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
    e.line(f"tensor_fence({e.issue()}, {ins.modifiers[0].endswith('::after_thread_sync')})")


@runtime
def tensor_fence(issue: Issue, after: bool) -> None:
    if issue.M.tensor.races:
        issue.M.tensor.races.fence(issue.threads, after)
