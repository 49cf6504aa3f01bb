"""Bulk and tensor copies in flight. They land as late as is legal, so that a missing wait shows.

A copy that completes on an mbarrier lands when nothing else can run: in lockstep all of them together, else one of
those whose barrier somebody waits for. A copy of a bulk group reads its source at the wait that covers it, and writes
its target there too unless that wait is a ``.read``: then at the next full wait, or at the end of the kernel (PTX ISA
9.7.9.25.3, 9.7.9.25.6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .mbarriers import Arrival

_AFTER_COPIES = Arrival(what="cp.async.mbarrier.arrive")


@dataclass(frozen=True, slots=True)
class Deferred:
    """Arrivals of threads on mbarriers, behind the first ``before`` cp.async in flight; they release a past moment."""

    threads: np.ndarray
    flat: np.ndarray
    line: int
    before: int
    moment: tuple | None


class AsyncCopies:
    """Queues of one batch. A job has ``threads`` (one a copy), ``line``, and ``land(M)``.

    Loads also have ``barriers``; stores have ``groups``, ``part(keep)``, and ``capture(M)``, which reads the sources.
    """

    def __init__(self, machine: object) -> None:
        self.M = machine
        self.loads: list = []
        self.stores: list = []
        self.written: list = []  # stores whose sources a .read wait has found read
        self.arrivals: list[Deferred] = []
        self.groups = np.zeros(machine.T, np.int32)

    def load(self, job: object) -> None:
        """Queue a copy that completes on an mbarrier."""
        self.loads.append(job)
        self.M.changed()

    def store(self, job: object) -> None:
        """Queue a copy of the current bulk group of its threads."""
        job.groups = self.groups[job.threads].copy()
        self.stores.append(job)
        self.M.changed()

    def arrive_later(self, threads: np.ndarray, flat: np.ndarray, line: int) -> None:
        """Arrive on mbarriers once all cp.async that the threads have issued so far have landed."""
        moment = self.M.race.moment(threads) if self.M.race else None
        self.arrivals.append(Deferred(threads, flat, line, len(self.M.copies), moment))

    def commit(self, threads: np.ndarray) -> None:
        self.groups[threads] += 1

    def wait(self, threads: np.ndarray, left: int, read: bool) -> None:
        """All but the newest ``left`` groups of these threads land; with ``read``, only their sources are read."""
        if not self.stores and (read or not self.written):
            return
        limit = np.full(self.M.T, -1, np.int32)
        limit[threads] = self.groups[threads] - left
        done, self.stores = _covered(self.stores, limit)
        if read:
            for job in done:
                job.capture(self.M)
            self.written += done
            return
        before, self.written = _covered(self.written, limit)
        for job in before + done:
            job.land(self.M)
        self.M.changed()

    def advance(self) -> bool:
        """Let something land because nothing else can go on; False when nothing is in flight."""
        if self.arrivals:
            self._arrive()
            return True
        if not self.loads:
            return False
        if self.M.late:
            self.loads.pop(self._pick()).land(self.M)
        else:
            ready, self.loads = self.loads, []
            for job in ready:
                job.land(self.M)
        self.M.changed()
        return True

    def wanted(self) -> list[int]:
        """The loads whose barrier somebody waits for."""
        from .machine import PHASE

        M = self.M
        barriers = np.unique(M.mbarriers.barrier[M.state == PHASE])
        return [i for i, job in enumerate(self.loads) if job.barriers is not None
                and np.isin(job.barriers, barriers).any()]  # fmt: skip

    def _pick(self) -> int:
        """A load that is wanted, else any."""
        choice = self.wanted() or range(len(self.loads))
        return choice[int(self.M.rng.integers(len(choice)))]

    def _arrive(self) -> None:
        """The oldest cp.async.mbarrier.arrive: its threads' copies land, then they arrive."""
        arrival, M = self.arrivals.pop(0), self.M
        now = M.race.go_back(arrival.moment) if M.race else None
        mine = np.zeros(M.T, bool)
        mine[arrival.threads] = True
        rest = []
        for number, copy in enumerate(M.copies):
            done = mine[copy.threads] & (number < arrival.before)
            if done.any():
                copy.part(done).land(M)
            if not done.all():
                rest.append(copy.part(~done) if done.any() else copy)
        gone = len(M.copies) - len(rest)
        M.copies = rest
        self.arrivals = [replace(a, before=max(0, a.before - gone)) for a in self.arrivals]
        once = np.ones(arrival.flat.shape[0], np.int64)
        M.mbarriers.arrive(arrival.flat, once, arrival.threads, arrival.line, _AFTER_COPIES)
        if M.race:
            M.race.go_on(now)

    def finish(self) -> None:
        """The end of the kernel: what nobody has waited for is a finding, and lands."""
        for job in self.written:
            job.land(self.M)
        for job in (*self.loads, *self.stores):
            self.M.report(
                "async-not-waited", job.line,
                "a bulk copy is still in flight at the end of the kernel",
                "wait for its mbarrier phase, or for its bulk group (cp.async.bulk.wait_group.read 0), before exit",
                int(job.threads[0]),
            )  # fmt: skip
            job.land(self.M)
        self.loads, self.stores, self.written = [], [], []


def _covered(jobs: list, limit: np.ndarray) -> tuple[list, list]:
    """Jobs, or parts of them, in groups below their threads' limits; and the rest."""
    inside, rest = [], []
    for job in jobs:
        done = job.groups < limit[job.threads]
        if done.all():
            inside.append(job)
        elif done.any():
            inside.append(job.part(done))
            rest.append(job.part(~done))
        else:
            rest.append(job)
    return inside, rest
