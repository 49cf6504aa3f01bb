"""A batch of CTAs at run time: registers, shared memory, thread states, and the schedule.

Threads are numbered warp slot first, then CTA, then lane, so that one warp slot of every CTA is a slice. A *group* is
what is scheduled together: everything (lockstep), or one warp slot (warp-serial). While all threads of a group are at
one block the group has one program counter; when they part, each thread has its own and the lowest goes first.
"""

from __future__ import annotations

import numpy as np

from .blocks import Block
from .errors import Fault
from .memory import RED_ZONE

RUN, BARRIER, MEET, DONE = 0, 1, 2, 3
MAX_BLOCKS = 50_000_000
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
    """State of one batch; generated code reads its attributes."""

    def __init__(self, program, config, memory, ctas, *, warp_groups: bool, rng, count=None) -> None:
        self.program, self.config, self.memory, self.rng = program, config, memory, rng
        self.ctas = np.asarray(ctas, np.int64)
        self.cta_threads = config.threads
        self.warps, self.cta_count = config.threads // 32, len(ctas)
        self.T = T = config.threads * self.cta_count
        self.threads = np.arange(T)
        self.cta = (self.threads >> 5) % self.cta_count
        self.warp = (self.threads >> 5) // self.cta_count
        self.specials = self._specials()
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
        self.barrier_number = np.zeros(T, np.int32)
        self.barrier_count = np.zeros(T, np.int32)
        self.barrier_line = np.zeros(T, np.int32)
        width = 32 * self.cta_count
        self.parts = (
            [Group(slice(w * width, (w + 1) * width), width) for w in range(self.warps)]
            if warp_groups
            else [Group(None, T)]
        )
        self.race = self.global_race = self.unset = None
        self.count = count
        self.executed = np.zeros(len(program.blocks), np.int64)
        self.steps = 0

    def _specials(self) -> dict[str, np.ndarray]:
        grid, block = self.config.grid, self.config.block
        lane = (self.threads & 31).astype(np.uint32)
        inside = (self.warp * 32).astype(np.uint32) + lane
        cta = self.ctas[self.cta].astype(np.uint32) if self.cta_count > 1 else self.ctas.astype(np.uint32)
        one = lambda x: np.array([x], np.uint32)  # noqa: E731
        out = {
            "tid.x": inside % block[0],
            "tid.y": inside // block[0] % block[1],
            "tid.z": inside // (block[0] * block[1]),
            "ctaid.x": cta % grid[0],
            "ctaid.y": cta // grid[0] % grid[1],
            "ctaid.z": cta // (grid[0] * grid[1]),
            "laneid": lane,
            "warpid": self.warp.astype(np.uint32),
            "nwarpid": one(self.warps),
            "smid": one(0),
            "nsmid": one(1),
            "gridid": one(1),
            "cluster_ctarank": one(0),
            "cluster_nctarank": one(1),
            "is_explicit_cluster": one(0),
            "lanemask_eq": np.uint32(1) << lane,
            "lanemask_lt": (np.uint32(1) << lane) - np.uint32(1),
            "dynamic_smem_size": one(self.config.dynamic_shared),
            "total_smem_size": one(self.config.dynamic_shared + self.program.layout.static_shared),
        }
        out["lanemask_le"] = out["lanemask_lt"] | out["lanemask_eq"]
        out["lanemask_ge"], out["lanemask_gt"] = ~out["lanemask_lt"], ~out["lanemask_le"]
        for i, axis in enumerate("xyz"):
            out[f"ntid.{axis}"], out[f"nctaid.{axis}"] = one(block[i]), one(grid[i])
            out[f"clusterid.{axis}"], out[f"nclusterid.{axis}"] = out[f"ctaid.{axis}"], one(grid[i])
            out[f"cluster_ctaid.{axis}"], out[f"cluster_nctaid.{axis}"] = one(0), one(1)
        return out

    def _shared(self) -> None:
        """Poisoned shared memory, a red zone after each CTA's part, at a base that the seed moves (aligned 1024)."""
        size = self.program.layout.static_shared + self.config.dynamic_shared
        self.shared_origin = 1024 * int(self.rng.integers(1, 64))
        self.shared_end = self.shared_origin + size
        self.shared_stride = -(-(size + RED_ZONE) // 1024) * 1024 if size else 1024
        self.shared_bytes = np.full(self.cta_count * self.shared_stride, 0xFF, np.uint8)
        self.shared_views = {w: self.shared_bytes.view(t) for w, t in _WORDS.items()}
        self.cta_starts = (np.arange(self.cta_count) * self.shared_stride)[:, None]
        self.cta_shared = self.cta * self.shared_stride - self.shared_origin

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
        self.state[group.span if sel is None else sel] = DONE

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
    def run(self) -> None:
        """Run until every thread is done; raises Fault for a deadlock or any other fault."""
        with np.errstate(all="ignore"):
            while True:
                ready = [g for g in self.parts if g.ready]
                if ready:
                    group = ready[int(self.rng.integers(len(ready)))] if len(ready) > 1 else ready[0]
                    while self.step(group):
                        pass
                    group.ready = False
                elif (self.state == DONE).all():
                    return
                elif not self.release():
                    self._deadlock()

    def step(self, group: Group) -> bool:
        """Execute one block for the group's threads that are lowest; False when none can go on."""
        if group.pc is not None:
            block = self.program.blocks[group.pc]
            self._execute(group, block, group.lanes, group.size)
            return True
        runnable = self.state[group.span] == RUN
        if not runnable.any():
            return False
        pcs = self.pc[group.span]
        number = int(pcs[runnable].min())
        block = self.program.blocks[number]
        chosen = runnable & (pcs == number)
        if chosen.all():
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
        self.state[lanes] = MEET
        here = (self.state == MEET) & (self.pc == block.number)
        full = here.reshape(-1, width).all(axis=1)
        mine = np.unique(lanes // width)
        mine = mine[full[mine]]
        if not mine.size:
            return None
        lanes = (mine[:, None] * width + np.arange(width)).reshape(-1)
        self.state[lanes] = RUN
        return lanes

    def _execute(self, group: Group, block: Block, sel: object, n: int) -> None:
        self.steps += 1
        self.executed[block.number] += n
        if self.steps > MAX_BLOCKS:
            raise Fault(
                "runaway",
                block.lines[0].line if block.lines else 0,
                f"more than {MAX_BLOCKS} blocks executed",
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

    def release(self) -> bool:
        """Let go of every barrier that has all its threads; True if any did."""
        waiting = self.state == BARRIER
        if not waiting.any():
            return False
        key = self.cta * 16 + self.barrier_number
        arrived = np.bincount(key[waiting], minlength=self.cta_count * 16)
        alive = np.bincount(self.cta[self.state != DONE], minlength=self.cta_count)
        need = np.where(self.barrier_count > 0, self.barrier_count, alive[self.cta])
        free = waiting & (arrived[key] >= need)
        if not free.any():
            return False
        self.state[free] = RUN
        if self.race:
            self.race.barrier(np.flatnonzero(free), key[free])
        for group in self.parts:
            if group.pc is None and free[group.span].any():
                group.ready = True
        return True

    def _deadlock(self) -> None:
        stuck = np.flatnonzero((self.state == BARRIER) | (self.state == MEET))
        cta = self.cta[stuck[0]]
        who = []
        for warp in range(self.warps):
            ids = np.flatnonzero((self.cta == cta) & (self.warp == warp))
            state = self.state[ids]
            for s, what in ((BARRIER, "wait at barrier"), (MEET, "wait for their warp"), (DONE, "have left")):
                at = ids[state == s]
                if at.size and s == BARRIER:
                    for number, count, line in sorted(
                        {
                            (int(self.barrier_number[i]), int(self.barrier_count[i]), int(self.barrier_line[i]))
                            for i in at
                        }
                    ):
                        need = count or "all"
                        who.append(
                            f"warp {warp}: {at.size} threads {what} {number} (needs {need} threads) at line {line}"
                        )
                elif at.size:
                    where = f" at line {self._line_of(int(at[0]))}" if s == MEET else ""
                    who.append(f"warp {warp}: {at.size} threads {what}{where}")
        first = int(stuck[0])
        line = int(self.barrier_line[first]) if self.state[first] == BARRIER else self._line_of(first)
        raise Fault(
            "deadlock",
            line,
            "no thread can go on. " + "; ".join(who),
            "make every thread of the barrier's count reach it, and keep warps together at collectives",
            first,
        )

    def _line_of(self, thread: int) -> int:
        lines = self.program.blocks[int(self.pc[thread])].lines
        return lines[0].line if lines else 0
