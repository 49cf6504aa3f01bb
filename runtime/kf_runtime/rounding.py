"""Rounding: float32 operands of a kernel as BF16, in scratch that belongs to one call.

One slab from torch's allocator and one multi-tensor copy, both on the current stream. Nothing is kept
from call to call: writes through ``.data`` bump no version and inference tensors have none, so no copy
could be known to be fresh; and a CUDA graph that captures the call records the copy, so that each
replay reads the operands as they are then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from kf_runtime.plan import row_major

#: Of each rounded operand, in bytes: a multiple of what any plan asks for.
ALIGNMENT: Final = 256
_ITEM: Final = 2
_STEP: Final = ALIGNMENT // _ITEM


class Rounding:
    """Rounds float32 tensors of these shapes to row-major BF16 ones, to nearest, ties to even."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._strides = [row_major(shape) for shape in self._shapes]
        self._starts: list[int] = []
        end = 0
        for shape in self._shapes:
            self._starts.append(end)
            end += -(-prod(shape) // _STEP) * _STEP
        self._items = end + _STEP

    def __call__(self, operands: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The rounded operands, on the device of ``like``, a BF16 tensor; each starts at a multiple of ALIGNMENT."""
        slab = like.new_empty(self._items)
        skip = -slab.data_ptr() % ALIGNMENT // _ITEM
        starts = map(skip.__add__, self._starts)
        narrow = list(map(slab.as_strided, self._shapes, self._strides, starts))
        torch._foreach_copy_(narrow, list(operands))
        return narrow


def load(device: torch.device) -> None:
    """Run torch's copy kernel once, so that no CUDA graph is being captured when it is first loaded."""
    narrow = torch.empty(1, dtype=torch.bfloat16, device=device)
    torch._foreach_copy_([narrow], [torch.empty(1, dtype=torch.float32, device=device)])
