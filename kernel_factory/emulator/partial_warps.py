"""Warps that meet at a collective in parts (PTX ISA 9.7.13: the member mask names who takes part).

Lanes first wait for their whole warp. Only when nothing else can go on do the lanes of a warp that wait at its lowest
collective go ahead by themselves; the collective then checks that its mask names no lane that is elsewhere. Lanes
that have left the kernel count as arrived.
"""

from __future__ import annotations

import numpy as np

RUN, MEET = 0, 2


def release(M: object) -> bool:
    """Mark the lanes that go ahead; True if there are any."""
    waiting = np.flatnonzero(M.state == MEET)
    if not waiting.size:
        return False
    blocks = M.program.blocks
    able = np.array([b.collective == 32 and b.partial for b in blocks])
    waiting = waiting[able[M.pc[waiting]]]
    if not waiting.size:
        return False
    warp = waiting >> 5
    lowest = np.full(M.T // 32, len(blocks), np.int64)
    np.minimum.at(lowest, warp, M.pc[waiting])
    chosen = waiting[M.pc[waiting] == lowest[warp]]
    M.let_go[chosen] = True
    M.state[chosen] = RUN
    M.wake(chosen)
    return True


def going(M: object, lanes: np.ndarray) -> np.ndarray | None:
    """Those of ``lanes`` that were let go, once; None if there are none."""
    mine = lanes[M.let_go[lanes]]
    if not mine.size:
        return None
    M.let_go[mine] = False
    return mine
