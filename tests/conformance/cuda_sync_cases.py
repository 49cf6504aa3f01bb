"""Cases of the CUDA C++ kernels that are about synchronisation: barriers, locks, pipelines, parts of warps."""

from __future__ import annotations

import numpy as np

from .cuda_specs import Spec, exact, rng


def groups() -> Spec:
    x = rng(9).integers(-99, 99, 256).astype(np.int32)
    args = (x, np.zeros(32, np.int32), np.zeros(2, np.int32))
    tiles, total = x.reshape(32, 8).sum(1), x.reshape(2, 128).sum(1)
    return (2,), (128,), args, {1: exact(tiles.astype(np.int32)), 2: exact(total.astype(np.int32))}


def block_counts() -> Spec:
    x = rng(22).integers(-100, 100, 256).astype(np.int32)
    rows = x.reshape(2, 128)
    want = (rows > 0).sum(1) + 1000 * (rows > 95).any(1) + 2000 * (rows > -100).all(1)
    return (2,), (128,), (x, np.zeros(2, np.int32)), {1: exact(want.astype(np.int32))}


def last_block() -> Spec:
    x = rng(23).integers(-9, 9, 1500).astype(np.float32)
    args = (x, np.zeros(6, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32), 1500)
    return (6,), (128,), args, {3: exact(x.sum(keepdims=True))}


def timed_sleep() -> Spec:
    return (1,), (32,), (np.zeros(32, np.int64),), {0: exact(np.ones(32, np.int64))}


def pipelined_sum() -> Spec:
    x = rng(27).integers(-9, 9, (5, 64, 4)).astype(np.float32)
    want = (x * np.array([1, 2, 3, 4], np.float32)).sum((0, 2))[np.arange(64) ^ 1]
    return (1,), (64,), (x, np.zeros(64, np.float32), 5), {1: exact(want.astype(np.float32))}


def barrier_exchange() -> Spec:
    x = rng(28).integers(-9, 9, 128).astype(np.int32)
    want = x.copy()
    for _ in range(4):
        want = want + np.roll(want, -33)
    return (1,), (128,), (x, np.zeros(128, np.int32), 4), {1: exact(want)}


def grid_barrier() -> Spec:
    want = (3 * ((np.arange(192) + 64) % 192)).astype(np.int32)
    args = (np.zeros(192, np.int32), np.zeros(1, np.uint32), np.zeros(192, np.int32))
    return (3,), (64,), args, {2: exact(want)}


def spin_lock() -> Spec:
    x = rng(29).integers(-9, 9, 256).astype(np.int32)
    args = (np.zeros(1, np.int32), np.zeros(1, np.int32), x)
    return (2,), (128,), args, {0: exact(np.zeros(1, np.int32)), 1: exact(x.sum(keepdims=True, dtype=np.int32))}


def half_warps() -> Spec:
    x = rng(7).integers(-1000, 1000, 64).astype(np.int32)
    rows = x.reshape(2, 32)
    want = np.concatenate(
        [np.repeat(rows[:, :11].sum(1, keepdims=True), 11, 1), np.repeat(rows[:, 11:].max(1, keepdims=True), 21, 1)], 1
    )
    mask = np.full(64, sum(1 << i for i in range(0, 32, 3)), np.uint32)
    args = (x, np.zeros(64, np.int32), np.zeros(64, np.uint32))
    return (1,), (64,), args, {1: exact(want.reshape(-1).astype(np.int32)), 2: exact(mask)}


def early_exit() -> Spec:
    n = 77
    x = rng(8).integers(-9, 9, n).astype(np.float32)
    want = np.array([x[i : i + 32].sum() for i in range(0, n, 32)], np.float32)
    return (1,), (96,), (x, np.zeros(3, np.float32), n), {1: exact(want)}


def transpose_tiles() -> Spec:
    x = rng(21).standard_normal((50, 70)).astype(np.float32)
    return (3, 2), (32, 8), (x, np.zeros((70, 50), np.float32), 70, 50), {1: exact(x.T)}


BUILDERS = (
    groups, block_counts, last_block, timed_sleep, pipelined_sum, barrier_exchange, grid_barrier, spin_lock,
    half_warps, early_exit, transpose_tiles,
)  # fmt: skip
