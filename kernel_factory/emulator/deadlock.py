"""The report of a batch in which no thread can go on: who waits for what."""

from __future__ import annotations

import numpy as np

from .errors import Fault


def fault(M: object) -> Fault:
    """The Fault of a deadlock, told for the first CTA that is stuck."""
    from .machine import DONE

    stuck = np.flatnonzero(M.state != DONE)
    cta = M.cta[stuck[0]]
    who = []
    for warp in range(M.warps):
        ids = np.flatnonzero((M.cta == cta) & (M.warp == warp))
        who += [f"warp {warp}: {text}" for text in _warp(M, ids)]
    first = int(stuck[0])
    return Fault(
        "deadlock",
        _line(M, first),
        "no thread can go on. " + "; ".join(who),
        "make every thread of the barrier's count reach it, arrive at the mbarrier and expect the bytes that land, "
        "and keep warps together at collectives",
        first,
    )


def _warp(M: object, ids: np.ndarray) -> list[str]:
    from .machine import ALLOC, BARRIER, CLUSTER, DONE, MEET, PHASE

    state, out = M.state[ids], []
    at = ids[state == BARRIER]
    for number, count, line in sorted(
        {(int(M.barrier_number[i]), int(M.barrier_count[i]), int(M.barrier_line[i])) for i in at}
    ):
        out.append(f"{at.size} threads wait at barrier {number} (needs {count or 'all'} threads) at line {line}")
    at = ids[state == PHASE]
    out += [f"{at.size} threads wait for {text}" for text in M.mbarriers.waits(at)]
    at = ids[state == ALLOC]
    out += [f"{at.size} threads wait in {M.tensor.waits(at)}"] if at.size else []
    for value, what in (
        (MEET, "wait for their warp or warpgroup"),
        (CLUSTER, "wait at barrier.cluster"),
        (DONE, "have left"),
    ):
        at = ids[state == value]
        if at.size:
            out.append(f"{at.size} threads {what}" + (f" at line {_line(M, int(at[0]))}" if value != DONE else ""))
    return out


def _line(M: object, thread: int) -> int:
    from .machine import BARRIER, PHASE

    if M.state[thread] == BARRIER:
        return int(M.barrier_line[thread])
    if M.state[thread] == PHASE:
        return int(M.mbarriers.line[thread])
    lines = M.program.blocks[int(M.pc[thread])].lines
    return lines[0].line if lines else 0
