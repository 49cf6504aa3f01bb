"""wgmma products in flight, and accumulators as matrices (PTX ISA 9.7.15.2, 9.7.15.7).

A product reads shared memory and lands when a wait covers it, the latest moment that is legal; products of one group
on one accumulator are one matrix product. An accumulator stays a matrix until an ordinary instruction touches its
registers: the block's first act is then ``touch``, which brings the registers up to date, and reports registers that
are touched while a product is in flight.
"""

from __future__ import annotations

import numpy as np

from . import fragments
from .errors import Fault
from .issue import Issue
from .lanes import spread, threads_of, write_lanes
from .products import Accumulator, Job, Product, chains


class Tiles:
    """What is in flight in one batch. Warpgroups are numbered (slot of four warps) * CTAs + CTA."""

    def __init__(self, machine: object) -> None:
        self.M = M = machine
        self.count = M.warps // 4 * M.cta_count
        self.committed = np.zeros(M.warps * M.cta_count, np.int32)
        self.fenced = np.zeros(M.warps * M.cta_count, bool)
        self.touched = np.zeros(M.warps * M.cta_count, np.int32)
        self.jobs: list[Job] = []
        self.accumulators: dict[tuple[int, ...], Accumulator] = {}
        self.busy: dict[int, np.ndarray] = {}  # A registers: products in flight that read them, by warpgroup
        self.blocks: dict[int, tuple] = {}
        self.places: dict[tuple, np.ndarray] = {}
        self.threads = (
            ((4 * np.arange(M.warps // 4)[:, None, None, None] + np.arange(4)[:, None]) * M.cta_count
             + np.arange(M.cta_count)[:, None, None]) * 32 + np.arange(32)
        ).reshape(self.count, 128) if self.count else np.zeros((0, 128), np.int64)  # fmt: skip

    # -- issue -----------------------------------------------------------------------------------------------------
    def _uniform(self, issue: Issue, x: np.ndarray, what: str) -> np.ndarray:
        """The one value that all threads of each warpgroup give."""
        everyone = issue.sel is None
        if x.shape[0] == 1:
            return np.full(self.count if everyone else issue.n // 128, x[0])
        x = spread(x, issue.n)
        table = x[self.threads] if everyone else x.reshape(-1, 128)
        if (table != table[:, :1]).any():
            raise issue.fault("bad-descriptor", f"the threads of a warpgroup give different {what}",
                              "compute it from values that are the same in the whole warpgroup")  # fmt: skip
        return table[:, 0]

    def issue(self, issue: Issue, product: Product, a, b, scale_d) -> None:
        """wgmma.mma_async: note the product; what it reads from registers is taken now."""
        M, line, everyone = self.M, product.line, issue.sel is None
        if M.warps % 4 and everyone:
            raise issue.fault("warpgroup", f"wgmma in blocks of {M.warps} warps", "use whole warpgroups")
        groups = np.arange(self.count) if everyone else self._group_of(issue.threads[::128])
        self._check_fence(groups, line)
        entry = self._accumulator(product)
        self._leave_others(product, groups)
        if product.a is not None:
            left = np.stack([spread(M.R[r], M.T)[self.threads[groups]] for r in product.a]).transpose(1, 0, 2)
            for r in product.a:
                self.busy.setdefault(r, np.zeros(self.count, np.int32))[groups] += 1
        else:
            left = self._uniform(issue, a, "descriptors of A")
        right = self._uniform(issue, b, "descriptors of B")
        scale = self._uniform(issue, scale_d, "values of scale-d").astype(bool)
        if M.unset is not None:
            M.unset.tiles(product, self.threads[groups], scale, line)
        entry.pending[groups] += 1
        job = Job(product, groups, left, right, scale, self.committed[self._first_warps(groups)])
        self.jobs.append(job)
        if M.race:
            self._race(job)
        M.changed()

    def _group_of(self, threads: np.ndarray) -> np.ndarray:
        return self.M.warp[threads] // 4 * self.M.cta_count + self.M.cta[threads]

    def _first_warps(self, groups: np.ndarray) -> np.ndarray:
        slot, cta = groups // self.M.cta_count, groups % self.M.cta_count
        return 4 * slot * self.M.cta_count + cta

    def _warps_of(self, groups: np.ndarray) -> np.ndarray:
        return self._first_warps(groups)[:, None] + np.arange(4) * self.M.cta_count

    def _accumulator(self, product: Product) -> Accumulator:
        if product.d not in self.accumulators:
            self.accumulators[product.d] = Accumulator(product, self.count)
            self.blocks.clear()
        found = self.accumulators[product.d]
        if found.kind != product.d_kind:
            raise Fault("unsupported", product.line, "one set of registers as accumulator of two types",
                        "use registers of their own for each accumulator type", 0)  # fmt: skip
        return found

    def _leave_others(self, product: Product, groups: np.ndarray) -> None:
        """Accumulators that share registers with this one, and A registers that are an accumulator, come to rest."""
        mine = set(product.d) | set(product.a or ())
        for registers, other in self.accumulators.items():
            if registers == product.d or not mine.intersection(registers):
                continue
            busy = groups[other.pending[groups] > 0]
            if busy.size:
                issued = next((j.product.line for j in reversed(self.jobs) if j.product.d == registers), 0)
                self.M.report(
                    "wgmma-in-flight", product.line,
                    "a wgmma takes registers of one of another shape, or as its A, that has not been waited for",
                    "put wgmma.wait_group between the two", int(self.threads[busy[0], 0]), issued,
                )  # fmt: skip
            if other.valid[groups].any() or other.pending[groups].any():
                self._settle(other, groups)

    # -- fences, groups, waits -------------------------------------------------------------------------------------
    def fence(self, warps: np.ndarray) -> None:
        self.fenced[warps] = True
        self.touched[warps] = 0
        if self.M.race:
            self.M.race.warp_barrier(warps * 32)

    def _check_fence(self, groups: np.ndarray, line: int) -> None:
        M = self.M
        if not M.race:
            return
        warps = self._warps_of(groups)
        for bad, other in ((~self.fenced[warps], 0), (self.touched[warps] > 0, None)):
            if bad.any():
                at = int(warps[bad][0])
                M.report(
                    "missing-wgmma-fence", line,
                    "wgmma.mma_async without a wgmma.fence since the kernel began or since its registers were written",
                    "put wgmma.fence.sync.aligned before the first wgmma.mma_async, after the registers are written",
                    at * 32, int(self.touched[at]) if other is None else 0,
                )  # fmt: skip
                self.touched[warps], self.fenced[warps] = 0, True

    def commit(self, warps: np.ndarray) -> None:
        self.committed[warps] += 1
        if self.M.race:
            self.M.race.group_committed(warps, self.committed[warps])

    def wait(self, warps: np.ndarray, left: int, line: int) -> None:
        """Land every product in a group that is not among the newest ``left``."""
        M = self.M
        limit = np.full(self.count, -1, np.int32)
        slots, ctas = warps // M.cta_count, warps % M.cta_count
        whole = slots // 4 < M.warps // 4
        np.maximum.at(limit, (slots // 4 * M.cta_count + ctas)[whole], (self.committed[warps] - left)[whole])
        self._land(limit)
        if M.race:
            M.race.group_waited(warps, self.committed[warps] - left)

    def _land(self, limit: np.ndarray) -> None:
        rest, run = [], []
        for job in self.jobs:
            done = job.number < limit[job.groups]
            if done.all():
                ready = job
            elif done.any():
                ready = job.part(done)
                rest.append(job.part(~done))
            else:
                rest.append(job)
                continue
            if run and not chains(run[-1], ready):
                self._compute(run)
                run = []
            run.append(ready)
        if run:
            self._compute(run)
        self.jobs = rest

    # -- arithmetic ------------------------------------------------------------------------------------------------
    def _compute(self, run: list[Job]) -> None:
        """Products of the same warpgroups on the same accumulator, in order."""
        product, groups = run[0].product, run[0].groups
        entry = self.accumulators[product.d]
        start = self._start(entry, groups, run[0].scale_d)
        a = np.concatenate([self._left(job) for job in run], axis=2) if len(run) > 1 else self._left(run[0])
        b = self._right(run)
        out = np.matmul(a, b.transpose(0, 2, 1))
        if product.scale < 0:
            out = -out
        if product.d_kind == "s32":
            out = out.astype(np.int64)
        elif product.d_kind == "f16":
            out = (start + out if start is not None else out).astype(np.float16).astype(np.float32)
            start = None
        everyone = groups.shape[0] == self.count
        if start is not None:
            out = np.add(start, out, out=out)
        if everyone:
            entry.matrix = out
        else:
            entry.matrix[groups] = out
        entry.valid[groups] = True
        entry.pending[groups] -= len(run)
        for job in run:
            for r in job.product.a or ():
                self.busy[r][groups] -= 1

    def _start(self, entry: Accumulator, groups: np.ndarray, scale_d: np.ndarray) -> np.ndarray | None:
        """What the products are added to, or None for nothing."""
        if not scale_d.any():
            return None
        stale = groups[~entry.valid[groups] & scale_d]
        if stale.size:
            entry.matrix[stale] = self._gather(entry, stale)
        start = entry.matrix if groups.shape[0] == self.count else entry.matrix[groups]
        return start if scale_d.all() else np.where(scale_d[:, None, None], start, start.dtype.type(0))

    def _gather(self, entry: Accumulator, groups: np.ndarray) -> np.ndarray:
        at = self.threads[groups]
        words = np.stack([spread(self.M.R[r], self.M.T)[at] for r in entry.registers])
        if entry.kind == "f16":
            return fragments.half_accumulator(words)
        return fragments.accumulator(words.view(np.float32 if entry.kind == "f32" else np.int32))

    def _left(self, job: Job) -> np.ndarray:
        p = job.product
        if p.a is None:
            return fragments.decode(self._matrix(job, job.a, 64, p.a_mn, p.a_kind), p.a_kind)
        words = fragments.fragment_a(job.a.transpose(1, 0, 2), fragments.SIZE[p.a_kind])
        return fragments.decode(words, p.a_kind)

    def _right(self, run: list[Job]) -> np.ndarray:
        """B of a run; warpgroups of a CTA that read the same B share it."""
        M = self.M
        cta = run[0].groups % M.cta_count
        keys = np.column_stack([cta, *(job.b.astype(np.int64) for job in run)])
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        parts = []
        for job in run:
            p = job.product
            part = job.part(first)
            parts.append(fragments.decode(self._matrix(part, part.b, p.n, p.b_mn, p.b_kind), p.b_kind))
        whole = np.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
        return whole if first.size == cta.size else whole[inverse.reshape(-1)]

    def _matrix(self, job: Job, descriptors: np.ndarray, rows: int, mn_major: bool, kind: str) -> np.ndarray:
        """(warpgroups, rows, k) words of a matrix in shared memory."""
        cta = job.groups % self.M.cta_count
        at = self._positions(descriptors, rows, mn_major, job.product.line, job.groups) + (
            cta * (self.M.shared_stride >> 4)
        ).reshape(-1, 1, 1)
        return fragments.in_k_order(self.M.shared_views[16].take(at), fragments.SIZE[kind], mn_major)

    def _positions(self, descriptors, rows, mn_major, line, groups) -> np.ndarray:
        """Chunk numbers of a matrix in a CTA's shared memory, for each warpgroup (or one for all)."""
        M = self.M
        if (descriptors == descriptors[0]).all():
            values, inverse = descriptors[:1], None
        else:
            values, inverse = np.unique(descriptors, return_inverse=True)
        tables = []
        for value in values.tolist():
            key = (value, rows, mn_major)
            if key not in self.places:
                thread = int(self.threads[groups[0], 0])
                at = fragments.chunks(value, rows, mn_major, line, thread)
                low, high = int(at.min()), int(at.max()) + 16
                if low < M.shared_origin or high > M.shared_end:
                    raise Fault(
                        "bad-descriptor", line,
                        f"matrix descriptor {value:#018x} reaches offsets {low - M.shared_origin} to "
                        f"{high - M.shared_origin} of {M.shared_end - M.shared_origin} bytes of shared memory",
                        "correct the start address and the offsets of the descriptor", thread,
                    )  # fmt: skip
                self.places[key] = (at - M.shared_origin) >> 4
            tables.append(self.places[key])
        return tables[0][None] if len(tables) == 1 else np.stack(tables)[inverse]

    # -- registers -------------------------------------------------------------------------------------------------
    def _settle(self, entry: Accumulator, groups: np.ndarray) -> None:
        """Bring the registers of an accumulator up to date; what is in flight lands first."""
        if entry.pending[groups].any():
            limit = np.full(self.count, -1, np.int32)
            limit[groups] = np.iinfo(np.int32).max
            self._land(limit)
        groups = groups[entry.valid[groups]]
        if not groups.size:
            return
        matrix = entry.matrix[groups]
        if entry.kind == "f16":
            words = fragments.half_accumulator_registers(matrix)
        else:
            kind = np.float32 if entry.kind == "f32" else np.int32
            words = fragments.accumulator_registers(matrix.astype(kind, copy=False)).view(np.uint32)
        at = self.threads[groups].reshape(-1)
        for number, word in zip(entry.registers, words, strict=True):
            write_lanes(self.M, number, at, word.reshape(-1))
        entry.valid[groups] = False

    def _block(self, number: int) -> tuple:
        """Accumulators and A registers that a block touches, and what ordinary instructions do to which registers."""
        if number not in self.blocks:
            block = self.M.program.blocks[number]
            everything = {n for _, reads, writes in block.touches for n in (*reads, *writes)}
            entries = [e for e in self.accumulators.values() if everything.intersection(e.registers)]
            plain = [(i.line, set(r), set(w)) for i, r, w in block.touches if i.opcode != "mov"]
            inputs = [r for r in self.busy if r in everything]
            self.blocks[number] = (entries, plain, inputs)
        return self.blocks[number]

    def touch(self, number: int, sel: object, n: int) -> None:
        """Called by a block before it reads or writes tile registers."""
        entries, plain, inputs = self._block(number)
        threads = threads_of(self.M, sel)
        # Reads before a fence are in order with later products; CUTLASS relies on it. Writes are what a fence is for.
        written = next((line for line, _, writes in plain if writes), 0)
        if written and self.M.race:
            self.touched[np.unique(threads >> 5)] = written
        if not entries and not inputs:
            return
        inside = threads[self.M.warp[threads] < self.M.warps // 4 * 4]
        groups = np.unique(self._group_of(inside))
        for entry in entries:
            if entry.pending[groups].any():
                self._in_flight(entry.registers, plain, groups[entry.pending[groups] > 0], True)
            self._settle(entry, groups)
        for register in inputs:
            if self.busy[register][groups].any():
                self._in_flight((register,), plain, groups[self.busy[register][groups] > 0], False)

    def _in_flight(self, registers, plain, groups, result: bool) -> None:
        """Report an ordinary access to registers of a product in flight; plain copies are renames, and pass."""
        mine = set(registers)
        for line, reads, writes in plain:
            if (result and mine & reads) or mine & writes:
                issued = [j.product.line for j in self.jobs if mine & {*j.product.d, *(j.product.a or ())}]
                self.M.report(
                    "wgmma-in-flight", line,
                    "a register of a wgmma that has not been waited for is "
                    + ("read" if mine & reads else "written"),
                    "put wgmma.wait_group before the access", int(self.threads[groups[0], 0]), (issued or [0])[-1],
                )  # fmt: skip
                return

    def finish(self) -> None:
        """The end of the kernel: products that nobody has waited for."""
        if self.jobs:
            job = self.jobs[0]
            self.M.report("wgmma-not-waited", job.product.line, "a wgmma is still in flight at the end of the kernel",
                          "wait for its group before exit", int(self.threads[job.groups[0], 0]))  # fmt: skip

    # -- race checker ----------------------------------------------------------------------------------------------
    def _race(self, job: Job) -> None:
        M, p = self.M, job.product
        cta = job.groups % M.cta_count
        for descriptors, rows, mn_major, left in ((job.a, 64, p.a_mn, True), (job.b, p.n, p.b_mn, False)):
            if descriptors.ndim == 1:
                at = self._positions(descriptors, rows, mn_major, p.line, job.groups)
                at = at.reshape(at.shape[0], -1)
                M.race.group_read(job, at + (cta * (M.shared_stride >> 4))[:, None], left)
