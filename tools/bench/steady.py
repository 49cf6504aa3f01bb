"""Microseconds of small calls, against what would disturb them on a machine that does other work as well."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

FRAMES = 3  # of about 100 bytes: some 40 rounds walk through a whole chunk of the frame stack

Arms = dict[str, Callable[[], object]]


def microseconds(arms: Arms, rounds: int = 41, calls: int = 400) -> dict[str, float]:
    """Median CPU time of this process a call of each arm, rounds interleaved, garbage collection off.

    CPython maps and unmaps a chunk of its frame stack (16 KiB) in each call that crosses the end of
    one, which takes 15 us: each round runs deeper in the stack, so that a median does not see it.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}

    def descend(frames: int) -> None:
        if frames:
            return descend(frames - 1)
        for name, arm in arms.items():
            start = time.process_time_ns()
            for _ in range(calls):
                arm()
            taken[name].append((time.process_time_ns() - start) / 1e3 / calls)

    gc.disable()
    for i in range(rounds):
        descend(FRAMES * i)
    gc.enable()
    return {name: median(values) for name, values in taken.items()}
