"""Happens-before among the warps of a cluster, as vector clocks.

Columns of a clock: the warps of the cluster; *agents* that read shared memory asynchronously (one a warpgroup for
wgmma, one a warp for tcgen05, one a warp for its bulk groups, one for its copies to neighbours); *slots* that write it
asynchronously (one an mbarrier that copies complete on); and three that nobody ever sees, "in flight", "never written"
and "an mbarrier lives here". A warp's own clock goes up when it releases something (an arrival, a barrier, a fence), so
that what it does later is not taken for released.

``known`` is what a warp has seen. ``fenced`` is the part of it that a proxy fence lies behind: the async proxy may
read what the generic proxy wrote only if it is in there (PTX ISA 8.8.1, proxy-preserved base causality order).
"""

from __future__ import annotations

import numpy as np

from .errors import Fault

SLOTS = 48


class Ordering:
    """Clocks of one batch, and the synchronisation that joins them."""

    def __init__(self, machine: object) -> None:
        self.M = M = machine
        opcodes = {(i.opcode, *i.modifiers[:1]) for i in M.program.kernel.instructions}
        names = {op[0] for op in opcodes}
        W, S = M.warps, M.cluster_size
        self.W, self.groups = W, W if "tcgen05" in names else -(-W // 4) if "wgmma" in names else 0
        copies = [i.modifiers for i in M.program.kernel.instructions if "bulk" in i.modifiers]
        self.sends = W * any("bulk_group" in m for m in copies)  # where, among the bulk agents, those of sends begin
        self.bulk = self.sends + W * any(m[2:4] == ("shared::cluster", "shared::cta") for m in copies)
        self.slots = SLOTS * S if "mbarrier" in names else 0
        self.warp_columns = W * S
        self.agent = self.warp_columns
        self.bulk_agent = self.agent + self.groups * S
        self.slot = self.bulk_agent + self.bulk * S
        self.flying = self.slot + self.slots
        self.never = self.flying + 1
        self.object = self.never + 1
        self.columns = self.object + 1
        self.bits = (32 * self.columns - 1).bit_length()
        self.known = np.zeros((M.cta_count, W, self.columns), np.int32)
        self.fenced = np.zeros_like(self.known)
        self.own = M.cta_rank[:, None] * W + np.arange(W)  # each warp's own column
        self.released = np.zeros((2, M.cta_count, W, self.columns), np.int32)  # what a release fence lies behind
        self.observed = np.zeros_like(self.released)  # what relaxed waits and loads have seen
        instructions = M.program.kernel.instructions
        self.relaxed = {i.line for i in instructions if i.opcode == "mbarrier" and "relaxed" in i.modifiers}
        self.synced = np.zeros((M.cta_count, W), np.int32)  # own clock since which lanes have not met
        self.met: np.ndarray | None = None  # for each thread, own clocks since which it has not met each other lane
        everyone = np.indices((M.cta_count, W)).reshape(2, -1)
        self.tick(*everyone)
        self._meet(*everyone)
        self.cluster_seen = np.zeros((M.cta_count, W), np.int64)  # phases of barrier.cluster that a warp has waited for
        self.remote = np.zeros((M.cta_count, self.warp_columns), np.int32)  # accesses from other CTAs
        self.remote_line = np.zeros(M.cta_count, np.int32)
        self.arrivals: dict[int, np.ndarray] = {}
        self.cluster_acc = np.zeros((2, M.cta_count // S, self.columns), np.int32)
        self.cluster_out = np.zeros_like(self.cluster_acc)
        self.group_acc = np.zeros((2, M.cta_count, -(-W // 4), 8, self.columns), np.int32)
        self.slot_of: dict[tuple[int, int], int] = {}
        self._size(0)
        self.found: dict[tuple, list] = {}

    def _size(self, count: int) -> None:
        """Room for the state of ``count`` mbarriers."""
        self.acc = np.zeros((2, count, self.columns), np.int32)
        self.out = np.zeros_like(self.acc)
        self.waited = np.zeros((count, self.warp_columns), np.int32)
        self.init_clock, self.init_column = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self.init_fenced, self.init_line = np.zeros(count, bool), np.zeros(count, np.int32)
        self.left = np.zeros(count, np.int32)  # what arrivals release of global memory
        self.slot_number, self.init_phase = np.zeros(count, np.int32), np.zeros(count, np.int64)

    def _grow(self, count: int) -> None:
        names = ("waited", "init_clock", "init_column", "init_fenced", "init_line", "init_phase")
        names += ("slot_number", "acc", "out", "left")
        old = {name: getattr(self, name) for name in names}
        have = old["waited"].shape[0]
        if count > have:
            self._size(count)
            for name, array in old.items():
                new = getattr(self, name)
                (new[:, :have] if name in ("acc", "out") else new[:have])[...] = array

    # -- clocks ----------------------------------------------------------------------------------------------------
    def tick(self, ctas: np.ndarray, warps: np.ndarray) -> None:
        """The own clock of warps goes up."""
        self.known[ctas, warps, self.own[ctas, warps]] += 1
        if self.known[ctas, warps, self.own[ctas, warps]].max(initial=0) >> (31 - self.bits):
            raise Fault("unsupported", 0, "the clocks of the race checker overflow", "check fewer loop iterations")

    def _meet(self, ctas: np.ndarray, warps: np.ndarray) -> None:
        """The lanes of these warps have just met."""
        self.synced[ctas, warps] = self.known[ctas, warps, self.own[ctas, warps]]

    def _warps(self, threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slots = threads >> 5
        if slots.size > 1:
            present = np.zeros(self.M.cta_count * self.W, bool)
            present[slots] = True
            slots = np.flatnonzero(present)
        return slots % self.M.cta_count, slots // self.M.cta_count

    def _see(self, ctas: np.ndarray, warps: np.ndarray, known: np.ndarray, fenced: np.ndarray) -> None:
        """Warps acquire clocks; what they learn of themselves orders their own lanes."""
        self.known[ctas, warps] = np.maximum(self.known[ctas, warps], known)
        self.fenced[ctas, warps] = np.maximum(self.fenced[ctas, warps], fenced)
        own = np.take_along_axis(known, self.own[ctas, warps][:, None], axis=1)[:, 0] + 1
        self.synced[ctas, warps] = np.maximum(self.synced[ctas, warps], own)

    def observe(self, ctas: np.ndarray, warps: np.ndarray, known: np.ndarray, fenced: np.ndarray) -> None:
        """Warps see clocks that the next acquire fence makes known to them."""
        self.observed[0, ctas, warps] = np.maximum(self.observed[0, ctas, warps], known)
        self.observed[1, ctas, warps] = np.maximum(self.observed[1, ctas, warps], fenced)

    # -- barriers of warps and CTAs --------------------------------------------------------------------------------
    def cta_barrier(self) -> None:
        """All warps of all CTAs meet."""
        for clocks in (self.known, self.fenced):
            clocks[:] = clocks.max(axis=1, keepdims=True)
        everyone = np.indices((self.M.cta_count, self.W)).reshape(2, -1)
        self.tick(*everyone)
        self._meet(*everyone)

    def barrier(self, threads: np.ndarray, keys: np.ndarray) -> None:
        """Threads released by barriers, with (CTA, barrier) keys."""
        for key in np.unique(keys):
            ctas, warps = self._warps(threads[keys == key])
            early = self.arrivals.pop(int(key), None)
            for i, clocks in enumerate((self.known, self.fenced)):
                joined = clocks[ctas, warps].max(axis=0)
                clocks[ctas, warps] = joined if early is None else np.maximum(joined, early[i])
            self.tick(ctas, warps)
            self._meet(ctas, warps)

    def barrier_arrive(self, threads: np.ndarray, keys: np.ndarray) -> None:
        """bar.arrive: a release to whoever waits at the barrier."""
        for key in np.unique(keys):
            ctas, warps = self._warps(threads[keys == key])
            both = np.stack([c[ctas, warps].max(axis=0) for c in (self.known, self.fenced)])
            old = self.arrivals.get(int(key))
            self.arrivals[int(key)] = both if old is None else np.maximum(old, both)
            self.tick(ctas, warps)

    def warp_barrier(self, threads: np.ndarray) -> None:
        ctas, warps = self._warps(threads)
        self.tick(ctas, warps)
        self._meet(ctas, warps)

    def partial_warp_barrier(self, threads: np.ndarray, members: np.ndarray) -> None:
        """Each lane meets its members (threads, 32) and learns whom they have met; the warp as a whole has not met."""
        if self.met is None:
            self.met = np.zeros((self.M.T, 32), np.int32)
        ctas, warps = self.M.cta[threads], self.M.warp[threads]
        self.tick(*self._warps(threads))
        lanes = (threads & ~31)[:, None] + np.arange(32)
        theirs = np.where(members[:, :, None], self.met[lanes], 0).max(axis=1)
        now = self.known[ctas, warps, self.own[ctas, warps]]
        self.met[threads] = np.where(members, now[:, None], theirs)

    def proxy_fence(self, threads: np.ndarray) -> None:
        """fence.proxy.async: what the warp knows now is ordered for the async proxy."""
        if threads.size:
            ctas, warps = self._warps(threads)
            self.fenced[ctas, warps] = self.known[ctas, warps]
            self.tick(ctas, warps)

    def release_fence(self, threads: np.ndarray) -> None:
        """fence.acq_rel and its like: a relaxed arrival after it releases what the warp knew here."""
        ctas, warps = self._warps(threads)
        self.released[0, ctas, warps], self.released[1, ctas, warps] = self.known[ctas, warps], self.fenced[ctas, warps]
        self.tick(ctas, warps)

    def acquire_fence(self, threads: np.ndarray) -> None:
        """fence.acq_rel and its like: what relaxed waits and loads have seen before it is known now."""
        ctas, warps = self._warps(threads)
        self._see(ctas, warps, *self.observed[:, ctas, warps])

    def moment(self, threads: np.ndarray) -> tuple:
        """What the threads' warps know now; what they do from here on is later."""
        ctas, warps = self._warps(threads)
        now = (ctas, warps, self.known[ctas, warps], self.fenced[ctas, warps])
        self.tick(ctas, warps)
        return now

    def go_back(self, moment: tuple) -> tuple:
        """Warps know what they knew at an earlier moment; what they knew until now, for ``go_on``."""
        ctas, warps, known, fenced = moment
        now = (ctas, warps, self.known[ctas, warps], self.fenced[ctas, warps])
        self.known[ctas, warps], self.fenced[ctas, warps] = known, fenced
        return now

    def go_on(self, now: tuple) -> None:
        """The warps know again what they knew before ``go_back``, and what they have learned since."""
        ctas, warps, known, fenced = now
        self.known[ctas, warps] = np.maximum(self.known[ctas, warps], known)
        self.fenced[ctas, warps] = np.maximum(self.fenced[ctas, warps], fenced)

    # -- barriers of clusters --------------------------------------------------------------------------------------
    def cluster_arrive(self, threads: np.ndarray, clusters: np.ndarray, relaxed: bool) -> None:
        ctas, warps = self._warps(threads)
        for i, clocks in enumerate(self.released if relaxed else (self.known, self.fenced)):
            _join(self.cluster_acc[i], ctas // self.M.cluster_size, clocks[ctas, warps])
        self.tick(ctas, warps)

    def cluster_complete(self, clusters: np.ndarray) -> None:
        self.cluster_out[:, clusters] = self.cluster_acc[:, clusters]

    def cluster_wait(self, threads: np.ndarray, clusters: np.ndarray) -> None:
        if threads.size:
            ctas, warps = self._warps(threads)
            cluster = ctas // self.M.cluster_size
            self.cluster_seen[ctas, warps] = self.M.cluster_barrier.generation[cluster]
            known, fenced = self.cluster_out[:, cluster]
            self._see(ctas, warps, known, fenced)

    def remote_access(self, threads: np.ndarray, targets: np.ndarray, line: int) -> None:
        """Threads touch shared memory of other CTAs, which must not have left."""
        cta, warp = self.M.cta[threads], self.M.warp[threads]
        column = self.own[cta, warp]
        np.maximum.at(self.remote, (targets, column), self.known[cta, warp, column])
        self.remote_line[targets] = line

    def leaves(self, ctas: np.ndarray) -> None:
        """CTAs end: they must know of every access that other CTAs have made to their shared memory."""
        late = self.remote[ctas] > self.known[ctas].max(axis=1)[:, : self.warp_columns]
        for cta in ctas[late.any(axis=1)]:
            self.note("cluster-exit", int(self.remote_line[cta]), 0, int(cta) * 32)

    # -- mbarriers -------------------------------------------------------------------------------------------------
    def _pairs(self, threads: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct (warp, mbarrier) pairs as CTAs, warps and barrier numbers."""
        pairs = (threads >> 5) * (1 << 32) + ids
        pairs = np.unique(pairs[np.append(True, pairs[1:] != pairs[:-1])])  # lanes of a warp mostly agree
        slots, ids = pairs >> 32, pairs & 0xFFFFFFFF
        return slots % self.M.cta_count, slots // self.M.cta_count, ids

    def mbarrier_init(self, threads: np.ndarray, ids: np.ndarray, flat: np.ndarray, line: int) -> None:
        self._grow(self.M.mbarriers.expected.shape[0])
        cta, warp = self.M.cta[threads], self.M.warp[threads]
        self.init_clock[ids] = self.known[cta, warp, self.own[cta, warp]]
        self.init_column[ids], self.init_line[ids], self.init_fenced[ids] = self.own[cta, warp], line, False
        self.acc[:, ids] = self.out[:, ids] = 0
        self.waited[ids] = 0
        stride = self.M.shared_stride
        for barrier, at in zip(ids.tolist(), flat.tolist(), strict=True):
            key = (int(self.M.cta_rank[at // stride]), at % stride)
            number = self.slot_of.setdefault(key, len(self.slot_of) % max(1, self.slots))
            self.slot_number[barrier] = self.slot + number

    def init_fence(self, threads: np.ndarray) -> None:
        """fence.mbarrier_init: the inits of these warps are visible to the cluster and to the async proxy."""
        if threads.size:
            used = self.M.mbarriers.used
            starts = self.M.cluster_start[self.M.mbarriers.cell[:used] * 8 // self.M.shared_stride]
            ctas, warps = self._warps(threads)
            for cta, warp in zip(ctas, warps, strict=True):
                mine = (self.init_column[:used] == self.own[cta, warp]) & (starts == self.M.cluster_start[cta])
                self.init_fenced[:used][mine] = True
                self.init_phase[:used][mine] = self.M.cluster_barrier.generation[cta // self.M.cluster_size]

    def _check_init(self, pairs: tuple[np.ndarray, np.ndarray, np.ndarray], line: int, proxy: bool) -> None:
        """The init must be known to who uses the barrier; to the async proxy and to other CTAs behind a fence."""
        cta, warp, ids = pairs
        column, clock = self.init_column[ids], self.init_clock[ids]
        unseen = (clock > self.known[cta, warp, column]) & (column != self.own[cta, warp])
        # The fence and a relaxed cluster barrier after it are a release of the inits.
        unseen &= ~self.init_fenced[ids] | (self.cluster_seen[cta, warp] <= self.init_phase[ids])
        if proxy:
            bare = ~self.init_fenced[ids] & (clock > self.fenced[cta, warp, column])
        else:
            bare = ~self.init_fenced[ids] & (self.M.mbarriers.cell[ids] * 8 // self.M.shared_stride != cta)
        for kind, bad in (("mbarrier-init-race", unseen), ("mbarrier-init-unfenced", bare & ~unseen)):
            if bad.any():
                first = np.argmax(bad)
                thread = (warp[first] * self.M.cta_count + cta[first]) * 32  # the warp's first lane
                self.note(kind, line, int(self.init_line[ids[first]]), int(thread))

    def mbarrier_arrive(self, threads: np.ndarray, ids: np.ndarray, line: int) -> None:
        """An arrival releases what the warp knows to the phase; a relaxed one, what its last release fence knew."""
        if self.M.cluster_size > 1:
            np.maximum.at(self.left, ids, self.M.global_race.mbarrier_arrive(threads, line in self.relaxed))
        pairs = ctas, warps, ids = self._pairs(threads, ids)
        self._check_init(pairs, line, False)
        for i, clocks in enumerate(self.released if line in self.relaxed else (self.known, self.fenced)):
            _join(self.acc[i], ids, clocks[ctas, warps])
        self.tick(ctas, warps)
        self.partial.released(threads)

    def copy_issued(self, threads: np.ndarray, ids: np.ndarray, line: int) -> None:
        """The phase that a copy completes on cannot complete before the copy was issued: it carries the issuer's clock.

        (Of a pair of CTAs one expects the bytes of both, and the other does nothing but issue its copies.)
        """
        pairs = ctas, warps, ids = self._pairs(threads, ids)
        self._check_init(pairs, line, True)
        _join(self.acc[0], ids, self.known[ctas, warps])
        self.tick(*self._warps(threads))
        self.partial.released(threads)

    def mbarrier_phase(self, ids: np.ndarray, line: int, thread: int) -> None:
        """A phase completes. Warps that waited for the one before must be known to have seen it."""
        late = self.waited[ids] > self.acc[0][ids][:, : self.warp_columns]
        if late.any():
            self.note("mbarrier-phase-lag", line, 0, thread, int(late.sum()))
            self.waited[ids] = np.where(late, 0, self.waited[ids])
        self.out[:, ids] = self.acc[:, ids]

    def mbarrier_wait(self, threads: np.ndarray, ids: np.ndarray, line: int) -> None:
        """A completed wait acquires what the arrivals released, and what has landed on the barrier.

        A relaxed one only observes it.
        """
        if self.M.cluster_size > 1 and line not in self.relaxed:
            self.M.global_race.mbarrier_wait(threads, self.left[ids])
        pairs = ctas, warps, ids = self._pairs(threads, ids)
        self._check_init(pairs, line, False)
        order = np.argsort(ids, kind="stable")
        for i in order if np.unique(ctas * self.W + warps).size < ids.size else [slice(None)]:
            c, w, b = np.atleast_1d(ctas[i]), np.atleast_1d(warps[i]), np.atleast_1d(ids[i])
            known = self.out[0][b]
            landed = (np.arange(b.size), self.slot_number[b])
            known[landed] = np.maximum(known[landed], self.M.mbarriers.phase[b])
            if line in self.relaxed:
                self.observe(c, w, known, self.out[1][b])
            else:
                self._see(c, w, known, self.out[1][b])
            self.waited[b, self.own[c, w]] = self.known[c, w, self.own[c, w]]

    # -- tensor operations of warpgroups ---------------------------------------------------------------------------
    def _agents(self, ctas: np.ndarray, warps: np.ndarray) -> np.ndarray:
        return self.agent + self.M.cta_rank[ctas] * self.groups + warps // 4

    def group_committed(self, slots: np.ndarray, number: np.ndarray) -> None:
        """Warps close a group: whoever sees its end is ordered after what they did before."""
        ctas, warps = slots % self.M.cta_count, slots // self.M.cta_count
        row = (ctas * self.group_acc.shape[2] + warps // 4) * 8
        for i, clocks in enumerate((self.known, self.fenced)):
            rows = self.group_acc[i].reshape(-1, self.columns)
            _join(rows, row + (number & 7), clocks[ctas, warps])
            rows[row + ((number + 1) & 7)] = 0
        self.tick(ctas, warps)

    def group_waited(self, slots: np.ndarray, done: np.ndarray) -> None:
        """Warps see the end of their warpgroup's first ``done`` groups."""
        slots, done = slots[done > 0], done[done > 0]
        if not slots.size:
            return
        ctas, warps = slots % self.M.cta_count, slots // self.M.cta_count
        at = (ctas, warps, self._agents(ctas, warps))
        self.known[at] = np.maximum(self.known[at], done)
        for i, clocks in enumerate((self.known, self.fenced)):
            clocks[ctas, warps] = np.maximum(clocks[ctas, warps], self.group_acc[i][ctas, warps // 4, done & 7])

    # -- reports ---------------------------------------------------------------------------------------------------
    def note(self, kind: str, line: int, other: int, thread: int, count: int = 1) -> None:
        entry = self.found.setdefault((kind, int(line), int(other)), [int(thread), 0])
        entry[1] += count


def _join(into: np.ndarray, rows: np.ndarray, clocks: np.ndarray) -> None:
    """Raise rows of ``into`` to the clocks of all that name them (``np.maximum.at``, many times as fast)."""
    if rows.size == 0:
        return
    ordered = rows
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        ordered, clocks = rows[order], clocks[order]
    first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    joined = np.maximum.reduceat(clocks, first, axis=0)
    into[ordered[first]] = np.maximum(into[ordered[first]], joined)
