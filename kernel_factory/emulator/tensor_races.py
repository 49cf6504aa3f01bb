"""Race checks of tensor memory, and of what tcgen05 reads in shared memory (PTX ISA 9.7.16.6).

Clocks and order are those of ``ordering``. Each warp that issues tcgen05.mma or cp has an agent column: its *stream*,
whose clock counts commits. A product belongs to the stream's clock that the next commit will publish, and only a warp
that has waited on the commit's mbarrier knows that clock. In a pair the same stream number stands for both CTAs.

A shadow cell is one column of 16 lanes. It holds its last writer (a warp, or a stream) with the writer's clock, the
clock of the last read by each warp that reaches the lanes, and that of the last read by a stream (A in TMEM). A load
or store is in flight, at a clock that nobody ever sees, until its warp's tcgen05.wait.

In strict kernels (tensor_core) what one thread did is ordered for another's tcgen05 instructions only behind
fence::before_thread_sync here and fence::after_thread_sync there. In the others a load whose registers are used before
wait::ld is taken for complete when it is issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .tensor_operands import SharedOperand
from .tmem import COLUMNS, LANES

FLYING = np.int32(0x7FFFFFFF)
UNFENCED = np.int32(0x7FFFFFFE)  # complete, but not behind the fence that another thread needs
_GRAIN = 16
_NEVER = -1
_ORDER = "commit the tcgen05 instruction to an mbarrier (tcgen05.commit) and wait for that phase first"
_SYNC = "synchronise the two warps (mbarrier, or bar.sync) between the two accesses"
_FENCE = (
    "put tcgen05.fence::before_thread_sync before the barrier or arrival of the first thread, and "
    "tcgen05.fence::after_thread_sync behind the wait of the second"
)


class Cells:
    """A block of shadow cells of one CTA: granules of lanes by columns."""

    def __init__(self, cta: int, grains: np.ndarray, columns: np.ndarray) -> None:
        self.cta, self.at = cta, np.ix_(grains, columns)

    @classmethod
    def of(cls, cta: int, lanes: np.ndarray, first: int, count: int) -> Cells:
        return cls(cta, np.unique(lanes // _GRAIN), np.arange(first, first + count))


@dataclass(frozen=True, slots=True)
class Use:
    """One access of tensor memory: which cells, by whose thread, which line and opcode.

    ``stream``: it runs in the order of the warp's stream.
    """

    cells: Cells
    thread: int
    line: int
    what: str
    stream: bool = False


class TensorRaces:
    """Shadow of one batch's tensor memory."""

    def __init__(self, machine: object) -> None:
        self.M, self.order = machine, machine.race
        count, self.W = machine.cta_count, machine.warps
        shape = (count, LANES // _GRAIN, COLUMNS)
        self.writer, self.clock, self.line = (
            np.full(shape, _NEVER, np.int16),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
        )
        self.shape = np.zeros(shape, np.int32)  # of the product that wrote last, and its first column; 0: a copy did
        self.stream, self.stream_clock = np.full(shape, _NEVER, np.int16), np.zeros(shape, np.int32)
        self.groups = -(-self.W // 4)
        self.reads = np.zeros((count, self.groups, *shape[1:]), np.int32)
        self.read_line = np.zeros(shape, np.int32)
        self.strict = machine.tensor.strict
        self.after = self.order.known.copy()  # what a tcgen05 instruction of a warp may rely on, with fences
        self.unfenced: dict[tuple[int, int], list[tuple]] = {}
        self.pending: dict[tuple[int, int, str], list[tuple[Cells, int]]] = {}
        self.epochs: dict[tuple[int, int], int] = {}
        self.issuers: set[int] = set()

    # -- who knows what -----------------------------------------------------------------------------------------------
    def _known(self, cta: int, warp: int) -> np.ndarray:
        return self.order.known[cta, warp]

    def _own(self, cta: int, warp: int) -> tuple[int, int]:
        """A warp's column and clock."""
        column = int(self.order.own[cta, warp])
        return column, int(self.order.known[cta, warp, column])

    def _stream(self, cta: int, warp: int) -> int:
        """The agent column of a CTA's stream that this warp issues."""
        return self.order.agent + int(self.M.cta_rank[cta]) * self.order.groups + warp

    def _epoch(self, cta: int, warp: int) -> int:
        """The clock that the warp's next commit publishes; one counter for a cluster's streams of that warp."""
        return self.epochs.get((int(self.M.cluster_start[cta]), warp), 1)

    def _issuer(self, thread: int) -> tuple[int, int]:
        return int(self.M.cta[thread]), int(self.M.warp[thread])

    def meet(self, threads: list[int]) -> None:
        """Warps of a pair that allocate together have met."""
        who = [self._issuer(t) for t in threads]
        ctas, warps = np.array([c for c, _ in who]), np.array([w for _, w in who])
        for clocks in (self.order.known, self.order.fenced):
            clocks[ctas, warps] = clocks[ctas, warps].max(axis=0)
        self.order.tick(ctas, warps)

    # -- checks -------------------------------------------------------------------------------------------------------
    def _check_writer(self, use: Use) -> None:
        """The last write of every cell must be complete and known."""
        cells, what = use.cells, use.what
        cta, warp = self._issuer(use.thread)
        writer, clock = self.writer[cells.cta][cells.at], self.clock[cells.cta][cells.at]
        lines = self.line[cells.cta][cells.at]
        own = self._own(cta, warp)[0]
        agent = writer >= self.order.agent
        there = writer != _NEVER
        flying = there & ~agent & (clock == FLYING)
        if flying.any():
            self._report(use, "tmem-store-not-waited", lines[flying],
                         f"{what} of TMEM that a tcgen05.st has not completed writing",
                         "put tcgen05.wait::st.sync.aligned behind the store, before the warp goes on")  # fmt: skip
        known = self._known(cta, warp)
        bare = there & (writer != own) & (clock == UNFENCED)
        late = there & ~flying & ~bare & (writer != own) & (clock > known[writer])
        in_order = (writer == self._stream(cells.cta, warp)) if use.stream else np.zeros_like(agent)
        late &= ~in_order
        if (late & agent).any():
            bad = late & agent
            self._report(use, "tmem-not-committed", lines[bad],
                         f"{what} of TMEM that a tcgen05 instruction may still write", _ORDER)  # fmt: skip
        if (late & ~agent).any():
            self._report(use, "tmem-race", lines[late & ~agent],
                         f"{what} of TMEM not ordered after another warp's tcgen05.st", _SYNC)  # fmt: skip
        if self.strict:
            bare |= there & ~flying & ~late & (writer != own) & (clock > self.after[cta, warp][writer])
            bare &= ~in_order
            self._report_fence(use, bare, lines)

    def _check_readers(self, use: Use) -> None:
        """Every read of the cells must be complete and known."""
        cells, what = use.cells, use.what
        cta, warp = self._issuer(use.thread)
        own, known = self._own(cta, warp)[0], self._known(cta, warp)
        rank = int(self.M.cta_rank[cells.cta])
        quarter = cells.at[0] // 2
        lines = self.read_line[cells.cta][cells.at]
        for group in range(self.groups):
            reads = self.reads[cells.cta, group][cells.at]
            if not reads.any():
                continue
            column = np.broadcast_to(rank * self.W + np.minimum(4 * group + quarter, self.W - 1), reads.shape)
            flying, bare = reads == FLYING, (reads == UNFENCED) & (column != own)
            late = ~flying & ~bare & (column != own) & (reads > known[column])
            if flying.any():
                self._report(use, "tmem-load-not-waited", lines[flying],
                             f"{what} over TMEM that a tcgen05.ld may still read",
                             "put tcgen05.wait::ld.sync.aligned behind the load first")  # fmt: skip
            if late.any():
                self._report(use, "tmem-race", lines[late],
                             f"{what} over TMEM not ordered after another warp's tcgen05.ld", _SYNC)  # fmt: skip
            if self.strict:
                bare |= (reads > 0) & ~flying & ~late & (column != own) & (reads > self.after[cta, warp][column])
                self._report_fence(use, bare, lines)
        column, clock = self.stream[cells.cta][cells.at], self.stream_clock[cells.cta][cells.at]
        late = (column != _NEVER) & (clock > known[column])
        if use.stream:
            late &= column != self._stream(cells.cta, warp)
        if late.any():
            self._report(use, "tmem-not-committed", lines[late],
                         f"{what} over TMEM that a tcgen05 instruction may still read", _ORDER)  # fmt: skip

    def _report_fence(self, use: Use, bare: np.ndarray, lines: np.ndarray) -> None:
        if bare.any():
            self._report(use, "tcgen05-missing-fence", lines[bare],
                         f"{use.what} of TMEM that another thread has used; the threads have synchronised, but tcgen05 "
                         "instructions are ordered only by tcgen05.fence", _FENCE)  # fmt: skip

    def _report(self, use: Use, kind: str, lines: np.ndarray, message: str, cure: str) -> None:
        for other in np.unique(lines):
            text = message + (f" (line {other})" if other else "")
            self.M.report(kind, use.line, text, cure, use.thread, int(other))

    # -- warps: ld, st, wait, dealloc ---------------------------------------------------------------------------------
    def _uses(self, to: object, line: int, what: str) -> Iterator[Use]:
        """One a warp of a tcgen05.ld or st."""
        relative = np.unique(to.columns)
        relative = np.unique(np.concatenate([relative, relative + 1])) if to.packed else relative
        grains = np.unique(to.rows // _GRAIN)
        for cta, thread, lane, column in zip(
            *(x.tolist() for x in (to.cta, to.first, to.lane, to.column)), strict=True
        ):
            yield Use(Cells(cta, lane // _GRAIN + grains, column + relative), thread, line, what)

    def load(self, to: object, line: int) -> None:
        """tcgen05.ld: in flight until wait::ld, or its registers' first use (tensor_waits)."""
        for use in self._uses(to, line, "tcgen05.ld"):
            cells, who = use.cells, self._issuer(use.thread)
            if (self.writer[cells.cta][cells.at] == _NEVER).any():
                self.M.report("uninitialised-tmem", line, "tcgen05.ld of TMEM that nothing has written",
                              "write the cells first, or let the first product overwrite (enable-input-d false)",
                              use.thread)  # fmt: skip
            self._check_writer(use)
            self.reads[cells.cta, who[1] // 4][cells.at] = FLYING
            self.read_line[cells.cta][cells.at] = line
            self.pending.setdefault((*who, "ld"), []).append((cells, line))

    def store(self, to: object, line: int) -> None:
        """tcgen05.st: in flight until wait::st."""
        for use in self._uses(to, line, "tcgen05.st"):
            cells, who = use.cells, self._issuer(use.thread)
            self._check_writer(use)
            self._check_readers(use)
            self.writer[cells.cta][cells.at] = self._own(*who)[0]
            self.clock[cells.cta][cells.at] = FLYING
            self.line[cells.cta][cells.at] = line
            self.pending.setdefault((*who, "st"), []).append((cells, line))

    def waited(self, first: np.ndarray, kind: str) -> None:
        """tcgen05.wait: what was in flight is done at the warp's clock of now."""
        for thread in first.tolist():
            cta, warp = self._issuer(thread)
            for cells, _ in self.pending.pop((cta, warp, kind), []):
                self._settle(cells, warp, kind, FLYING, UNFENCED if self.strict else self._own(cta, warp)[1])
                if self.strict:
                    self.unfenced.setdefault((cta, warp), []).append((cells, kind))

    def used(self, threads: np.ndarray, loads: tuple[int, ...]) -> None:
        """Registers of the loads at these lines are used: the loads are done."""
        for slot in np.unique(threads >> 5).tolist():
            cta, warp = slot % self.M.cta_count, slot // self.M.cta_count
            left = []
            for cells, line in self.pending.pop((cta, warp, "ld"), []):
                if line in loads:
                    self._settle(cells, warp, "ld", FLYING, self._own(cta, warp)[1])
                else:
                    left.append((cells, line))
            if left:
                self.pending[cta, warp, "ld"] = left

    def _settle(self, cells: Cells, warp: int, kind: str, old: int, new: int) -> None:
        clocks = self.reads[cells.cta, warp // 4] if kind == "ld" else self.clock[cells.cta]
        clocks[cells.at] = np.where(clocks[cells.at] == old, new, clocks[cells.at])

    def fence(self, threads: np.ndarray, after: bool) -> None:
        """tcgen05.fence: after, the warp's instructions may rely on what it knows; before, others may rely on it."""
        for slot in np.unique(threads >> 5):
            cta, warp = int(slot % self.M.cta_count), int(slot // self.M.cta_count)
            if after:
                self.after[cta, warp] = self.order.known[cta, warp]
                continue
            for cells, kind in self.unfenced.pop((cta, warp), []):
                self._settle(cells, warp, kind, UNFENCED, self._own(cta, warp)[1])

    def allocated(self, cta: int, where: slice) -> None:
        self.writer[cta, :, where], self.stream[cta, :, where] = _NEVER, _NEVER
        self.reads[cta, :, :, where] = 0

    def freed(self, cta: int, where: slice, thread: int, line: int) -> None:
        """All use of the columns must be over."""
        cells = Cells(cta, np.arange(LANES // _GRAIN), np.arange(where.start, where.stop))
        for thread_of, kinds in list(self.unfenced.items()):  # dealloc itself needs no fence
            if thread_of[0] == cta:
                for each, kind in kinds:
                    self._settle(each, thread_of[1], kind, UNFENCED, self._own(*thread_of)[1] - 1)
        strict, self.strict = self.strict, False
        use = Use(cells, thread, line, "tcgen05.dealloc")
        self._check_writer(use)
        self._check_readers(use)
        self.strict = strict

    # -- streams: mma, cp, commit -------------------------------------------------------------------------------------
    def product(self, work: object) -> None:
        """tcgen05.mma, checked when it is issued: what it reads and overwrites must be settled by then."""
        self.issuers.add(work.thread)
        lanes = np.concatenate([np.arange(p.lane, p.lane + p.rows) for p in work.layout]) + work.lane
        for each in work.ctas:
            target = Cells.of(each, lanes, work.column, work.layout[0].columns)
            self._one_shape(work, target)
            self._stream_write(work, target, reads=work.use and work.keep is None)
            if isinstance(work.left, SharedOperand):
                self._shared(work, each, work.left)
            else:
                self._stream_read(work, Cells.of(each, lanes, work.left & 0xFFFF, 8))
            for column, extent in zip(work.factors, (work.form.m // len(work.ctas), work.form.n), strict=False):
                self._stream_read(work, Cells.of(each, np.arange(32), column, -(-extent // 32)))
            self._shared(work, each, work.right)

    def copy(self, work: object) -> None:
        """tcgen05.cp."""
        self.issuers.add(work.thread)
        for each in work.ctas:
            target = Cells.of(each, work.lanes.reshape(-1), work.column, work.columns)
            self._stream_write(work, target, reads=False)
            self.shape[each][target.at] = 0
            self._shared(work, each, work.matrix)

    def _one_shape(self, work: object, cells: Cells) -> None:
        """Products of one thread run in order only where they have the same accumulator and shape (9.7.16.6.4)."""
        cta, warp = self._issuer(work.thread)
        stream, shape = self._stream(cells.cta, warp), work.form.m << 20 | work.form.n << 10 | work.column
        before = self.shape[cells.cta][cells.at]
        mixed = (before != 0) & (before != shape) & (self.writer[cells.cta][cells.at] == stream)
        mixed &= self.clock[cells.cta][cells.at] > self._known(cta, warp)[stream]
        if mixed.any():
            use, lines = Use(cells, work.thread, work.line, "tcgen05.mma"), self.line[cells.cta][cells.at][mixed]
            message = "tcgen05.mma over the result of one of another shape or place, that may still run"
            self._report(use, "tmem-not-committed", lines, message, _ORDER)
        self.shape[cells.cta][cells.at] = shape

    def _stream_read(self, work: object, cells: Cells) -> None:
        """Operands in TMEM are read from now until the stream's next commit has completed."""
        cta, warp = self._issuer(work.thread)
        self._needs_data(cells, work)
        self._check_writer(Use(cells, work.thread, work.line, "tcgen05.mma", stream=True))
        self.stream[cells.cta][cells.at] = self._stream(cells.cta, warp)
        self.stream_clock[cells.cta][cells.at] = self._epoch(cta, warp)
        self.read_line[cells.cta][cells.at] = work.line

    def _needs_data(self, cells: Cells, work: object) -> None:
        if (self.writer[cells.cta][cells.at] == _NEVER).any():
            self.M.report("uninitialised-tmem", work.line, "tcgen05.mma reads TMEM that nothing has written",
                          "clear the accumulator, or let the first product overwrite (enable-input-d false)",
                          work.thread)  # fmt: skip

    def _stream_write(self, work: object, cells: Cells, *, reads: bool) -> None:
        cta, warp = self._issuer(work.thread)
        if reads:
            self._needs_data(cells, work)
        name = self.M.program.instruction_at(work.line).split(".cta_group")[0].split()[-1]
        use = Use(cells, work.thread, work.line, name, stream=True)
        self._check_writer(use)
        self._check_readers(use)
        self.writer[cells.cta][cells.at] = self._stream(cells.cta, warp)
        self.clock[cells.cta][cells.at] = self._epoch(cta, warp)
        self.line[cells.cta][cells.at] = work.line

    def _shared(self, work: object, where: int, operand: SharedOperand) -> None:
        """The operand is read from now until the stream's next commit has completed."""
        cta, warp = self._issuer(work.thread)
        flat = operand.flat(self.M, where).reshape(1, -1)
        self.order.stream_read(np.array([work.thread]), flat, self._epoch(cta, warp), work.line)

    def commit(self, work: object) -> None:
        """The mbarriers' phases in progress carry the stream's clock, for every CTA of the cluster.

        A thread's commit covers what it has issued itself: one that has issued nothing publishes nothing.
        """
        if work.thread not in self.issuers:
            return
        cta, warp = self._issuer(work.thread)
        key = (int(self.M.cluster_start[cta]), warp)
        epoch = self._epoch(cta, warp)
        work.epoch = (epoch, [self._stream(c, warp) for c in range(key[0], key[0] + self.M.cluster_size)])
        self.epochs[key] = epoch + 1

    def committed(self, work: object, ids: np.ndarray) -> None:
        """The commit lands: whoever waits for these phases knows the stream's clock."""
        epoch, columns = work.epoch or (0, [])
        for column in columns:
            self.order.acc[0][ids, column] = np.maximum(self.order.acc[0][ids, column], epoch)
