"""mbarrier objects of a batch (PTX ISA 9.7.13.15): counts, transaction bytes, phases, and the threads that wait.

A phase completes when the pending count and the transaction count are both zero; then the phase number goes up by
one and the pending count starts again. Phases are counted in full here; the parity that a thread waits on is the
parity of a phase number. A waiting thread is parked until the phase moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import Fault

_TX_LIMIT = (1 << 20) - 1
_GROWTH = 256


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A kind of arrival: with bytes to expect first (.expect_tx), for good (arrive_drop), without .noComplete."""

    expects: bool = False
    drop: bool = False
    complete: bool = True
    what: str = "mbarrier.arrive"


class Mbarriers:
    """State arrays indexed by barrier number; ``of_cell`` maps each 8-byte word of shared memory to its barrier."""

    def __init__(self, machine: object) -> None:
        self.M = machine
        self.of_cell = np.full(machine.shared_bytes.shape[0] // 8, -1, np.int32)
        self.used = 0
        self.expected, self.pending, self.tx, self.phase, self.cell = (np.zeros(0, np.int64) for _ in range(5))
        self.alive = np.zeros(0, bool)
        self.barrier, self.wait_phase = np.zeros(machine.T, np.int32), np.zeros(machine.T, np.int64)
        self.line, self.register = np.zeros(machine.T, np.int32), np.zeros(machine.T, np.int32)

    # -- life ------------------------------------------------------------------------------------------------------
    def init(self, flat: np.ndarray, count: np.ndarray, threads: np.ndarray, line: int) -> None:
        """mbarrier.init: phase 0, ``count`` arrivals a phase, no transaction bytes."""
        if (count < 1).any() or (count > _TX_LIMIT).any():
            raise self._fault("mbarrier-count", threads[0], line, f"mbarrier.init with a count of {int(count.min())}",
                              "give a count from 1 to 2^20 - 1")  # fmt: skip
        cells = flat >> 3
        old = self.of_cell[cells]
        busy = old >= 0
        if busy.any():
            self.M.report("mbarrier-reinit", line, "init of an mbarrier that is in use",
                          "complete its phase and use mbarrier.inval first", threads[busy][0])  # fmt: skip
        fresh = np.unique(cells[~busy])
        if fresh.size:
            self.of_cell[fresh] = self.used + np.arange(fresh.size)
            self._grow(fresh)
        ids = self.of_cell[cells]
        self.expected[ids] = self.pending[ids] = count
        self.tx[ids] = self.phase[ids] = 0
        self.alive[ids] = True
        self._operation(flat.shape[0])
        if self.M.race:
            self.M.race.mbarrier_init(threads, ids, flat, line)

    def _grow(self, cells: np.ndarray) -> None:
        self.used += cells.size
        if self.used > self.expected.shape[0]:
            extra = self.used - self.expected.shape[0] + _GROWTH
            for name in ("expected", "pending", "tx", "phase", "cell"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(extra, np.int64)]))
            self.alive = np.concatenate([self.alive, np.zeros(extra, bool)])
        self.cell[self.used - cells.size : self.used] = cells

    def inval(self, flat: np.ndarray, threads: np.ndarray, line: int) -> None:
        """mbarrier.inval: the word is plain memory again; any use but init is a fault."""
        ids = self.find(flat, threads, line, "mbarrier.inval")
        self.alive[ids] = False
        self.of_cell[flat >> 3] = -2
        self._operation(flat.shape[0])
        if self.M.race:
            self.M.race.mbarrier_inval(threads, ids, flat, line)

    def find(self, flat: np.ndarray, threads: np.ndarray, line: int, what: str) -> np.ndarray:
        """Barrier numbers of addresses; a Fault where no barrier lives."""
        ids = self.of_cell[flat >> 3]
        if ids.size and int(ids.min()) < 0:
            at = int(np.argmin(ids))
            gone = int(ids[at]) == -2
            raise self._fault(
                "mbarrier-after-inval" if gone else "mbarrier-uninitialised",
                threads[at] if threads.shape[0] > at else threads[0],
                line,
                f"{what} on {self.M.shared_name(int(flat[at]))}, where "
                + ("mbarrier.inval has ended the barrier" if gone else "no mbarrier.init has run"),
                "initialise the mbarrier, and make the init visible (fence.mbarrier_init, barrier) before its use",
            )
        return ids

    def _fault(self, kind: str, thread: int, line: int, message: str, cure: str) -> Fault:
        return Fault(kind, line, message, cure, int(thread))

    def _operation(self, count: int) -> None:
        if self.M.count:
            self.M.count.mbarrier_operations += count
        self.M.changed()

    # -- arrivals and bytes ----------------------------------------------------------------------------------------
    def arrive(self, flat, number, threads, line, how: Arrival) -> np.ndarray:
        """The 64-bit states of the phases that are joined. ``number``: arrivals each, or the bytes they expect."""
        ids = self.find(flat, threads, line, how.what)
        token = (self.phase[ids].astype(np.uint64) << np.uint64(32)) | self.pending[ids].astype(np.uint64)
        if self.M.race:
            self.M.race.mbarrier_arrive(threads, ids, line)
        count = number
        if how.expects:
            np.add.at(self.tx, ids, number)
            self._check_tx(ids, threads, line)
            count = np.ones(number.shape, np.int64)
        if how.drop:
            np.subtract.at(self.expected, ids, count)
        unique, inverse = np.unique(ids, return_inverse=True)
        total = np.bincount(inverse, weights=count).astype(np.int64)
        if not how.complete and (total >= self.pending[unique]).any():
            self.M.report("mbarrier-no-complete", line, "an arrive.noComplete completes its phase",
                          "let the last arrival be one without noComplete", threads[0])  # fmt: skip
        beyond = total > self.pending[unique]
        lone = beyond & (np.bincount(inverse) == 1)
        if lone.any():
            barrier = int(unique[lone][0])
            raise self._fault(
                "mbarrier-arrivals", threads[0], line,
                f"an arrival of count {int(total[lone][0])} on {self.name(barrier)}, which waits for "
                f"{int(self.pending[barrier])} more", "let an arrival count no more than its phase still waits for",
            )  # fmt: skip
        for barrier, n in zip(unique[beyond], total[beyond], strict=True):
            self._arrive_across(int(barrier), int(n), threads[0], line)
        unique, total = unique[~beyond], total[~beyond]
        self.pending[unique] -= total
        self._operation(flat.shape[0])
        self.complete_phases(unique, line, int(threads[0]))
        return token

    def _arrive_across(self, barrier: int, left: int, thread: int, line: int) -> None:
        """Arrivals of one instruction that fill more than one phase."""
        while left:
            step = min(left, int(self.pending[barrier]))
            if step == 0:
                raise self._fault(
                    "mbarrier-arrivals", thread, line,
                    f"{left} more arrivals than {self.name(barrier)} takes in a phase whose bytes have not all landed "
                    f"(count {int(self.expected[barrier])}, {int(self.tx[barrier])} bytes pending)",
                    "initialise the barrier with the number of arrivals, or let one elected thread arrive",
                )  # fmt: skip
            self.pending[barrier] -= step
            left -= step
            self.complete_phases(np.array([barrier]), line, thread)

    def expect(self, flat, tx, threads, line) -> None:
        """mbarrier.expect_tx: more bytes to come in this phase."""
        ids = self.find(flat, threads, line, "mbarrier.expect_tx")
        np.add.at(self.tx, ids, tx)
        self._operation(flat.shape[0])
        self._check_tx(ids, threads, line)

    def complete(self, ids: np.ndarray, nbytes: np.ndarray, line: int, thread: int) -> None:
        """complete_tx: bytes have landed (PTX ISA 9.7.13.15.5)."""
        np.subtract.at(self.tx, ids, nbytes)
        self.M.changed()
        self._check_tx(ids, np.array([thread]), line)
        self.complete_phases(np.unique(ids), line, thread)

    def _check_tx(self, ids: np.ndarray, threads: np.ndarray, line: int) -> None:
        tx = self.tx[ids]
        if int(np.abs(tx).max(initial=0)) > _TX_LIMIT:
            at = int(np.argmax(np.abs(tx)))
            raise self._fault(
                "mbarrier-bytes", threads[min(at, threads.shape[0] - 1)], line,
                f"the transaction count of {self.name(int(ids[at]))} reaches {int(tx[at])}; its range is +-(2^20 - 1)",
                "expect the bytes of one phase only, once a phase",
            )  # fmt: skip

    def complete_phases(self, unique: np.ndarray, line: int, thread: int) -> None:
        """Move on every barrier among ``unique`` that has all it waits for, and wake who waits."""
        arrived = self.pending[unique] == 0
        if not arrived.any():
            return
        full = unique[arrived & (self.tx[unique] == 0)]
        over = unique[arrived & (self.tx[unique] < 0)]
        if over.size:
            self.M.report(
                "mbarrier-bytes", line,
                f"{-int(self.tx[over[0]])} more bytes have landed on {self.name(int(over[0]))} than its phase expects, "
                "so that the phase cannot complete",
                "expect exactly the bytes of the copies that complete on the barrier", thread,
            )  # fmt: skip
        if not full.size:
            return
        self.phase[full] += 1
        self.pending[full] = self.expected[full]
        if self.M.race:
            self.M.race.mbarrier_phase(full, line, thread)
        self._wake(full)

    def _wake(self, moved: np.ndarray) -> None:
        from .machine import PHASE

        waiting = np.flatnonzero(self.M.state == PHASE)
        if waiting.size:
            free = waiting[self.phase[self.barrier[waiting]] > self.wait_phase[waiting]]
            if free.size:
                if self.M.race:
                    for line in np.unique(self.line[free]).tolist():
                        at = free[self.line[free] == line]
                        self.M.race.mbarrier_wait(at, self.barrier[at], line)
                self.M.resume(free, True)

    # -- waits -----------------------------------------------------------------------------------------------------
    def ready(self, ids: np.ndarray, parity: np.ndarray) -> np.ndarray:
        """Has the phase of that parity completed: is the phase in progress the other one?"""
        return (self.phase[ids] & 1) != (parity & 1)

    def park(self, threads, ids, line, register, block_number) -> None:
        """Threads wait until the phase in progress completes."""
        from .machine import PHASE

        M = self.M
        M.state[threads], M.pc[threads] = PHASE, block_number
        self.barrier[threads], self.wait_phase[threads] = ids, self.phase[ids]
        self.line[threads], self.register[threads] = line, register

    def waits(self, threads: np.ndarray) -> list[str]:
        """What parked threads wait for, in words, one entry a barrier."""
        out = []
        for barrier in np.unique(self.barrier[threads]):
            at = threads[self.barrier[threads] == barrier]
            out.append(
                f"phase {int(self.phase[barrier])} (parity {int(self.phase[barrier]) & 1}) of "
                f"{self.name(int(barrier))} at line {int(self.line[at[0]])}: "
                f"{int(self.pending[barrier])} of {int(self.expected[barrier])} arrivals and "
                f"{int(self.tx[barrier])} transaction bytes are still pending"
            )
        return out

    def name(self, barrier: int) -> str:
        return "mbarrier " + self.M.shared_name(int(self.cell[barrier]) * 8)
