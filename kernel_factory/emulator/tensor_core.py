"""The tensor core of each CTA (PTX ISA 9.7.16.6): products, copies and commits that run on their own, in order.

What one CTA issues forms a queue. In warp-serial mode an entry lands only when no thread can go on, which is as late
as is legal; in the other modes it lands at once. ``tcgen05.st`` lands at the ``wait::st`` of its warp in every mode.

Two rules of the manual are broken by every kernel that CUTLASS 4.7 and its examples emit, and hold on the hardware
all the same: registers of tcgen05.ld are used before tcgen05.wait::ld (the assembler tracks them), and threads hand
TMEM over through barriers with no tcgen05.fence. So a kernel without a single tcgen05.fence is held to what CUTLASS
relies on: a load is done at its wait, or at the first use of its registers (tensor_waits). A kernel that has a fence,
or whose launch says ``by_the_manual``, is *strict*: the registers are poison until the wait, and a missing fence is a
finding.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from .tensor_races import TensorRaces
from .tmem import TensorMemory


@dataclass(kw_only=True)
class Work:
    """One entry of a queue. ``cells`` are the TMEM columns it uses, as (CTA, first, end)."""

    cta: int
    thread: int
    line: int
    cells: list[tuple[int, int, int]] = field(default_factory=list)
    commits: ClassVar[bool] = False

    def land(self, M: object) -> None:
        raise NotImplementedError

    def matters(self, M: object) -> bool:
        """Is it a fault that the kernel ends before this is done?"""
        return True


@dataclass(slots=True)
class Store:
    """A tcgen05.st that its warp has not waited for: cells of one CTA and their new contents."""

    warp: tuple[int, int]
    lanes: np.ndarray
    columns: np.ndarray
    words: np.ndarray


class TensorCore:
    """Tensor memory and the queues of one batch; nothing is allocated before the first use."""

    def __init__(self, machine: object) -> None:
        self.M = machine
        self._memory: TensorMemory | None = None
        self._races: TensorRaces | None = None
        self.strict = machine.config.by_the_manual or any(
            i.opcode == "tcgen05" and i.modifiers[0].startswith("fence") for i in machine.program.kernel.instructions
        )
        self.queues: dict[int, deque[Work]] = {}
        self.stores: list[Store] = []

    @property
    def memory(self) -> TensorMemory:
        if self._memory is None:
            self._memory = TensorMemory(self.M)
        return self._memory

    @property
    def races(self) -> TensorRaces | None:
        """The checker of tensor memory, in race mode."""
        if self._races is None and self.M.race:
            self._races = TensorRaces(self.M)
        return self._races

    def issue(self, work: Work) -> None:
        """Take an entry; it lands now, or as late as is legal."""
        if self.M.late:
            self.queues.setdefault(work.cta, deque()).append(work)
        else:
            work.land(self.M)

    def advance(self) -> bool:
        """No thread can go on: land the oldest entries of a queue, up to a commit; True if there were any."""
        busy = [queue for queue in self.queues.values() if queue]
        if not busy:
            return False
        queue = busy[int(self.M.rng.integers(len(busy)))] if len(busy) > 1 else busy[0]
        commits = False
        while queue and not commits:
            work = queue.popleft()
            commits = work.commits
            work.land(self.M)
        self.M.changed()
        return True

    # -- stores -------------------------------------------------------------------------------------------------------
    def land_stores(self, warps: set[tuple[int, int]]) -> None:
        """tcgen05.wait::st of these (CTA, warp)s."""
        left = []
        for store in self.stores:
            if store.warp in warps:
                self.memory.data[store.warp[0], store.lanes, store.columns] = store.words
            else:
                left.append(store)
        self.stores = left

    # -- ends ---------------------------------------------------------------------------------------------------------
    def check_idle(self, cta: int, where: slice, thread: int, line: int) -> None:
        """Columns that go back must not be in use."""
        for queue in self.queues.values():
            for work in queue:
                if any(c == cta and first < where.stop and end > where.start for c, first, end in work.cells):
                    self.M.report(
                        "tmem-dealloc-in-flight", line,
                        f"TMEM is freed while the tcgen05 instruction at line {work.line} has not completed",
                        "commit it to an mbarrier and wait for that before tcgen05.dealloc", thread, work.line,
                    )  # fmt: skip
                    return

    def finish(self) -> None:
        """All threads have left: nothing may be in flight, nothing may stay allocated."""
        for queue in self.queues.values():
            for work in filter(lambda work: work.matters(self.M), queue):
                self.M.report(
                    "tcgen05-in-flight", work.line, "the kernel ends before this tcgen05 instruction has completed",
                    "commit to an mbarrier and wait for it before the CTAs that take part leave", work.thread,
                )  # fmt: skip
        if self._memory is not None:
            for cta, line, columns in self._memory.leaks():
                self.M.report(
                    "tmem-leak", line, f"{columns} columns of TMEM are still allocated at the end of the kernel",
                    "free every allocation with tcgen05.dealloc", int(np.flatnonzero(self.M.cta == cta)[0]),
                )  # fmt: skip

    def waits(self, threads: np.ndarray) -> str:
        """What threads that wait in tcgen05.alloc are told about."""
        for queue in self.memory.queue:
            for asked in queue:
                if asked.threads[0] in threads:
                    free = int((self.memory.owner[asked.cta] == 0).sum())
                    pair = " in both CTAs of the pair" if asked.group == 2 else ""
                    return f"tcgen05.alloc of {asked.columns} columns{pair} at line {asked.line} ({free} are free)"
        return "tcgen05.alloc"
