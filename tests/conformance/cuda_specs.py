"""What the CUDA cases share."""

from __future__ import annotations

import numpy as np

from .cases import Expected

Spec = tuple[tuple, tuple, tuple, dict]  # grid, block, arguments, expected


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def exact(x: np.ndarray) -> Expected:
    return Expected(values=np.ascontiguousarray(x))
