"""bar.arrive and bar.red (PTX ISA 9.7.13.1): arrivals that do not wait, and barriers that reduce a predicate."""

from __future__ import annotations

import numpy as np

from .errors import Fault
from .lanes import write_lanes


def arrive(M: object, threads: np.ndarray, number: np.ndarray, count: np.ndarray, line: int) -> None:
    """Count threads at a barrier without holding them."""
    if ((count % 32) != 0).any() or (count <= 0).any():
        raise Fault("barrier-count", line, f"bar.arrive for {int(count.min())} threads",
                    "give a multiple of 32 threads", int(threads[0]))  # fmt: skip
    key = M.cta[threads] * 16 + number
    np.add.at(M.barrier_arrived, key, 1)
    if M.race:
        M.race.barrier_arrive(threads, key)
    M.changed()
    M.release()
    if (M.barrier_arrived[key] >= count).any():
        M.report(
            "barrier-count", line,
            f"arrivals alone complete a barrier for {int(count.min())} threads; who waits there next waits for others",
            "let the producer wait for the consumers between two arrivals", int(threads[0]),
        )  # fmt: skip
        M.barrier_arrived[key] %= count


def vote(M: object, threads: np.ndarray, number: np.ndarray, values: np.ndarray, what: str, register: int) -> None:
    """Note what waiting threads bring to a bar.red."""
    for key in np.unique(M.cta[threads] * 16 + number):
        here = M.cta[threads] * 16 + number == key
        got = M.barrier_votes.setdefault(int(key), (what, register, []))
        got[2].append(values[here])


def settle(M: object, key: int, threads: np.ndarray) -> None:
    """Write the reduction to the threads that a barrier lets go."""
    if key not in M.barrier_votes:
        return
    what, register, parts = M.barrier_votes.pop(key)
    votes = np.concatenate(parts)
    value = {"popc": np.uint32(votes.sum()), "and": bool(votes.all()), "or": bool(votes.any())}[what]
    write_lanes(M, register, threads, value)
