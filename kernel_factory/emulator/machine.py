"""A batch of CTAs at run time: registers, shared memory, thread states, and the schedule.

Threads are numbered warp slot first, then CTA, then lane, so that one warp slot of every CTA is a slice. A *group* is
what is scheduled together: everything (lockstep), or one warp slot (warp-serial). While all threads of a group are at
one block the group has one program counter; when they part, each thread has its own and the lowest goes first.
"""

from __future__ import annotations

import zlib

import numpy as np

from . import clusters, cta_barriers, deadlock, partial_warps
from .async_copies import AsyncCopies
from .blocks import Block
from .errors import Fault
from .lanes import distinct, write_lanes
from .mbarriers import Mbarriers
from .memory import RED_ZONE
from .specials import special_registers
from .tensor_core import TensorCore
from .tiles import Tiles

RUN, BARRIER, MEET, DONE, PHASE, CLUSTER, ALLOC = 0, 1, 2, 3, 4, 5, 6
PATIENCE = 1024  # blocks that change no memory before threads with the lowest program counter must stand back
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128, 32: np.dtype("V32")}
_POISON = {np.bool_: False, np.complex128: np.full(16, 0xFF, np.uint8).view(np.complex128)[0]}


class Group:
    """Threads scheduled together: all, or a slice."""

    def __init__(self, lanes: slice | None, size: int) -> None:
        self.lanes, self.size = lanes, size
        self.span = lanes or slice(0, size)
        self.pc: int | None = 0
        self.ready = True


class Machine:
    """State of one batch (whole clusters, in rank order); generated code reads its attributes."""

    def __init__(self, program, config, memory, ctas, *, warp_groups: bool, rng) -> None:
        self.program, self.config, self.memory, self.rng = program, config, memory, rng
        self.ctas = np.asarray(ctas, np.int64)
        self.shape = config.shape
        self.cluster_size = self.shape.size
        self.late = warp_groups
        self.cta_threads = config.threads
        self.warps, self.cta_count = config.threads // 32, len(ctas)
        self.T = T = config.threads * self.cta_count
        self.threads = np.arange(T)
        self.cta = (self.threads >> 5) % self.cta_count
        self.warp = (self.threads >> 5) // self.cta_count
        self.specials = special_registers(self)
        self.param_bytes = config.packed_params(program.kernel)
        self.R = [
            np.array([_POISON.get(t, ~t(0) if t in (np.uint16, np.uint32, np.uint64) else t(0))], t)
            for t in program.types
        ]
        self._shared()
        self.local_bytes = program.layout.local_bytes
        self.local_stride = -(-self.local_bytes // 32) * 32
        self.local = np.full(T * self.local_stride, 0xFF, np.uint8)
        self.copies: list = []
        self.groups = np.zeros(T, np.int32)
        self.pc = np.zeros(T, np.int32)
        self.state = np.zeros(T, np.int8)
        self.let_go = np.zeros(T, bool)
        self.barrier_number = np.zeros(T, np.int32)
        self.barrier_count = np.zeros(T, np.int32)
        self.barrier_line = np.zeros(T, np.int32)
        width = 32 * self.cta_count
        self.cluster_barrier = clusters.ClusterBarrier(self)
        self.barrier_arrived = np.zeros(self.cta_count * 16, np.int64)
        self.barrier_votes: dict[int, tuple] = {}
        self.mbarriers, self.async_copies, self.tiles = Mbarriers(self), AsyncCopies(self), Tiles(self)
        self.tensor = TensorCore(self)
        self.events = self.quiet = self.timeouts = self.vain = self.recurred = 0
        self.seen: set[int] = set()
        self.polled = self.timed_out_at = -1
        self.found: dict[tuple, list] = {}
        self.parts = (
            [Group(slice(w * width, (w + 1) * width), width) for w in range(self.warps)]
            if warp_groups
            else [Group(None, T)]
        )
        self.race = self.global_race = self.unset = self.count = None
        self.executed = np.zeros(len(program.blocks), np.int64)
        self.steps = 0

    def _shared(self) -> None:
        """Poisoned shared memory, a red zone after each CTA's part, at a base that the seed moves (aligned 1024)."""
        size = self.program.layout.static_shared + self.config.dynamic_shared
        room = ((1 << 18) - size) // 1024  # matrix descriptors hold 18 bits of an address
        self.shared_origin = 1024 * int(self.rng.integers(1, max(2, min(64, room))))
        self.shared_end = self.shared_origin + size
        self.shared_stride = -(-(size + RED_ZONE) // 1024) * 1024 if size else 1024
        self.shared_bytes = np.full(self.cta_count * self.shared_stride, 0xFF, np.uint8)
        self.shared_views = {w: self.shared_bytes.view(t) for w, t in _WORDS.items()}
        self.cta_starts = (np.arange(self.cta_count) * self.shared_stride)[:, None]
        self.cta_shared = self.cta * self.shared_stride - self.shared_origin
        self.cluster_start = np.arange(self.cta_count) // self.cluster_size * self.cluster_size
        self.cta_rank = np.arange(self.cta_count) - self.cluster_start
        self.rank_bits = self.cta_rank[self.cta] << clusters.RANK_SHIFT if self.cluster_size > 1 else None

    # -- where threads go ---------------------------------------------------------------------------------------
    def go(self, group: Group, sel: object, number: int) -> None:
        """All of the threads at hand go to one block."""
        if group.pc is not None:
            group.pc = number
        else:
            self.pc[sel] = number

    def part(self, group: Group, sel: object, numbers: np.ndarray) -> None:
        """Each thread goes to its own block."""
        self._dissolve(group)
        self.pc[group.span if sel is None else sel] = numbers

    def finish(self, group: Group, sel: object) -> None:
        """Threads leave the kernel."""
        self._dissolve(group)
        lanes = group.span if sel is None else sel
        self.state[lanes] = DONE
        if self.cluster_size > 1:
            self.cluster_barrier.check()
            if self.race:
                self.race.leaves(np.setdiff1d(self.cta[lanes], self.cta[self.state != DONE]))

    def reach(self, threads: np.ndarray, targets: np.ndarray, line: int) -> None:
        """Threads access shared memory of these CTAs, perhaps not their own."""
        foreign = targets != self.cta[threads]
        if not foreign.any():
            return
        threads, targets = threads[foreign], targets[foreign]
        gone = ~np.isin(targets, self.cta[self.state != DONE])
        if gone.any():
            self.report("cluster-exit", line, "access to the shared memory of a CTA of the cluster that has ended",
                        "let that CTA wait until the others are done with its memory", threads[gone][0])  # fmt: skip
        if self.race:
            self.race.remote_access(threads, targets, line)

    def wait_at_barrier(
        self, group: Group, sel: object, block: Block, number: np.ndarray, count: np.ndarray | None
    ) -> None:
        self._dissolve(group)
        lanes = group.span if sel is None else sel
        self.state[lanes] = BARRIER
        self.pc[lanes] = block.number + 1
        self.barrier_number[lanes] = number
        self.barrier_count[lanes] = 0 if count is None else count
        self.barrier_line[lanes] = block.terminator.line
        if count is not None and (count != self.cta_threads).any():
            self.release()  # partial barriers are let go at once, so that a producer can run ahead

    def _dissolve(self, group: Group) -> None:
        if group.pc is not None:
            self.pc[group.span], self.state[group.span] = group.pc, RUN
            group.pc = None

    # -- schedule -----------------------------------------------------------------------------------------------
    def run(self) -> bool:
        """Run until every thread is done, or (False) until all that run poll memory which only other CTAs can change.

        Raises Fault for a deadlock or any other fault.
        """
        self.quiet, self.polled = 0, -1
        with np.errstate(all="ignore"):
            while True:
                ready = [g for g in self.parts if g.ready]
                if ready:
                    if self.vain and self.polled == self.events:
                        group = ready[self.vain // 2 % len(ready)]
                    else:
                        group = ready[int(self.rng.integers(len(ready)))] if len(ready) > 1 else ready[0]
                    while self.step(group):
                        if self.quiet > PATIENCE:
                            break
                    else:
                        group.ready = False
                        continue
                    if self._polls(ready):
                        return False
                elif (self.state == DONE).all():
                    self.async_copies.finish()
                    self.tiles.finish()
                    self.tensor.finish()
                    return True
                elif not (self.release() or partial_warps.release(self) or self._advance() or self._time_out()):
                    raise deadlock.fault(self)

    def _polls(self, ready: list[Group]) -> bool:
        """Nobody has changed memory for long: let others run; True when states recur and everyone has had a turn."""
        self.quiet = 0
        if self.polled != self.events:
            self.polled, self.vain, self.recurred = self.events, 0, 0
            self.seen.clear()
        self.vain += 1
        state = self._fingerprint()
        self.recurred += state in self.seen
        self.seen.add(state)
        if self.release() or self._advance():
            self.polled = -1
        return self.recurred > 2 * len(ready) + 2

    def _fingerprint(self) -> int:
        pcs = [-1 if g.pc is None else g.pc for g in self.parts]
        value = zlib.crc32(np.array(pcs).tobytes(), zlib.crc32(self.pc.tobytes(), zlib.crc32(self.state.tobytes())))
        for register in self.R:
            value = zlib.crc32(register.view(np.uint8), value)
        return value

    def _advance(self) -> bool:
        """Something in flight lands because nothing else can go on: in late order a copy that is waited for, or any."""
        if self.late and not self.async_copies.wanted() and self.rng.integers(2):
            return self.tensor.advance() or self.async_copies.advance()
        return self.async_copies.advance() or self.tensor.advance()

    def _time_out(self) -> bool:
        """Threads in try_wait go on with False, as the hardware's time limit would have it; not for ever."""
        if self.timed_out_at == self.events:
            self.timeouts += 1
        else:
            self.timed_out_at, self.timeouts = self.events, 0
        waiting = np.flatnonzero(self.state == PHASE)
        if not waiting.size or self.timeouts > 3:
            return False
        self.resume(waiting, False)
        return True

    def resume(self, threads: np.ndarray, value: bool) -> None:
        """Parked threads go on with the outcome of their wait in its predicate."""
        registers = self.mbarriers.register[threads]
        for number in np.unique(registers):
            write_lanes(self, int(number), threads[registers == number], value)
        self.state[threads] = RUN
        self.wake(threads)

    def wake(self, threads: np.ndarray) -> None:
        """The groups of these threads have something to do."""
        for group in self.parts:
            if group.lanes is None:
                group.ready = True
            elif not group.ready:
                span = group.span
                group.ready = bool(((threads >= span.start) & (threads < span.stop)).any())

    def step(self, group: Group) -> bool:
        """Execute one block for some of the group's threads; False when none can go on.

        The threads with the lowest program counter go first; after PATIENCE blocks without a change of memory
        (they may poll a flag), the ones with the highest.
        """
        if group.pc is not None:
            block = self.program.blocks[group.pc]
            if block.collective > 32 and group.lanes is not None:
                self._dissolve(group)  # a warpgroup meets across groups
            else:
                self._execute(group, block, group.lanes, group.size)
                return True
        runnable = self.state[group.span] == RUN
        if not runnable.any():
            return False
        pcs = self.pc[group.span]
        number = int(pcs[runnable].max() if self.vain & 1 and self.polled == self.events else pcs[runnable].min())
        block = self.program.blocks[number]
        chosen = runnable & (pcs == number)
        if chosen.all() and not (block.collective > 32 and group.lanes is not None):
            group.pc = number
            return True
        lanes = np.flatnonzero(chosen) + group.span.start
        if block.collective:
            lanes = self._meet(block, lanes)
            if lanes is None:
                return True
        self._execute(group, block, lanes, lanes.shape[0])
        return True

    def _meet(self, block: Block, lanes: np.ndarray) -> np.ndarray | None:
        """Whole warps that have arrived at a collective block; the rest of the lanes wait there."""
        width = block.collective
        alone = partial_warps.going(self, lanes)
        if alone is not None:
            return alone
        self.state[lanes] = MEET
        here = (self.state == MEET) & (self.pc == block.number)
        if width == 128:
            return self._meet_warpgroups(here, lanes)
        full = here.reshape(-1, width).all(axis=1)
        mine = distinct(lanes // width)
        mine = mine[full[mine]]
        if not mine.size:
            return None
        lanes = (mine[:, None] * width + np.arange(width)).reshape(-1)
        self.state[lanes] = RUN
        return lanes

    def _meet_warpgroups(self, here: np.ndarray, lanes: np.ndarray) -> np.ndarray | None:
        """Whole warpgroups (four warps of one CTA, the first a multiple of four), each in lane order."""
        warps = here.reshape(self.warps, self.cta_count, 32).all(axis=2)
        full = warps[: self.warps // 4 * 4].reshape(-1, 4, self.cta_count).all(axis=1)
        mine = np.zeros(full.shape, bool)
        groups = self.warp[lanes] // 4
        inside = groups < full.shape[0]
        mine[groups[inside], self.cta[lanes[inside]]] = True
        group, cta = np.nonzero(mine & full)
        if not group.size:
            return None
        slots = (4 * group[:, None] + np.arange(4)) * self.cta_count + cta[:, None]
        found = (slots[:, :, None] * 32 + np.arange(32)).reshape(-1)
        self.state[found] = RUN
        self.wake(found)
        return found

    def _execute(self, group: Group, block: Block, sel: object, n: int) -> None:
        self.steps += 1
        self.quiet += 1
        self.executed[block.number] += n
        if self.steps > self.config.block_limit:
            raise Fault(
                "runaway",
                block.lines[0].line if block.lines else 0,
                f"more than {self.config.block_limit} blocks executed",
                "a loop of the kernel does not end",
            )
        if self.unset is not None:
            self.unset.check(block, sel)
        if self.count:
            self.count.block(self, block, sel, n)
        value = (block.full if sel is None else block.masked)(self, sel, n)
        if block.terminator_op is not None:
            block.terminator_op.resolve(self, group, block, sel, n, value)
        elif block.number + 1 == len(self.program.blocks):
            self.finish(group, sel)
        else:
            self.go(group, sel, block.number + 1)

    def shared_name(self, flat: int) -> str:
        """A flat position in words: address, variable and CTA of the cluster."""
        cta, local = divmod(flat, self.shared_stride)
        near = [(off, name) for name, (space, off) in self.program.layout.places.items() if space == "shared"]
        off, name = max(((o, x) for o, x in near if o <= local), default=(0, "shared memory"))
        where = f" of the CTA of rank {int(self.cta_rank[cta])}" if self.cluster_size > 1 else ""
        return f"at {self.shared_origin + local:#x} ({name}+{local - off}){where}"

    def changed(self) -> None:
        """Something that another thread may be waiting for has happened."""
        self.events += 1
        self.quiet = 0

    def release(self) -> bool:
        """Let go of every barrier that has all its threads; True if any did."""
        waiting = self.state == BARRIER
        if not waiting.any():
            return False
        key = self.cta * 16 + self.barrier_number
        arrived = np.bincount(key[waiting], minlength=self.cta_count * 16) + self.barrier_arrived
        alive = np.bincount(self.cta[self.state != DONE], minlength=self.cta_count)
        need = np.where(self.barrier_count > 0, self.barrier_count, alive[self.cta])
        free = waiting & (arrived[key] >= need)
        if not free.any():
            return False
        self.changed()
        self.state[free] = RUN
        threads = np.flatnonzero(free)
        if self.race:
            self.race.barrier(threads, key[free])
        for number in np.unique(key[free]):
            self.barrier_arrived[number] = 0
            if self.barrier_votes:
                cta_barriers.settle(self, int(number), threads[key[free] == number])
        for group in self.parts:
            if group.pc is None and free[group.span].any():
                group.ready = True
        return True

    def report(self, kind: str, line: int, message: str, cure: str, thread: int = 0, other_line: int = 0) -> None:
        """A fault after which the run can go on; one report for each kind and pair of lines."""
        entry = self.found.setdefault((kind, line, other_line), [message, cure, int(thread), 0])
        entry[3] += 1

    def reports(self) -> list[tuple[Fault, int]]:
        return [
            (Fault(kind, line, message, cure, thread, other), count)
            for (kind, line, other), (message, cure, thread, count) in self.found.items()
        ]
