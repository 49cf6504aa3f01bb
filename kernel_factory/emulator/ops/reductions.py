"""Element-wise reductions into global memory for bulk copies (PTX ISA 9.7.9.25.5.2, 9.7.9.27.1.3)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import numerics
from ..tensor_map import ELEMENTS

UFUNCS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_NUMPY = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "f32": np.float32, "f32.ftz": np.float32, "f64": np.float64, "bf16": np.uint16,
    "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip


def combiner(op: str, element: int | str) -> Callable:
    """A function (buffer, positions, values, unit) that combines into a buffer, element by element."""
    kind = ELEMENTS[element] if isinstance(element, int) else element
    dtype = np.dtype(_NUMPY[kind])

    def combine(buffer: object, where: np.ndarray, values: np.ndarray, unit: int) -> None:
        each = unit // dtype.itemsize
        at = (where[:, None] * each + np.arange(each)).reshape(-1)
        new = np.ascontiguousarray(values).view(np.uint8).reshape(-1).view(dtype)
        whole = buffer.data[: buffer.size // dtype.itemsize * dtype.itemsize].view(dtype)
        if kind == "bf16" and op in ("add", "min", "max"):
            _combine_bf16(UFUNCS[op], whole, at, new)
        else:
            UFUNCS[op].at(whole, at, new)

    return combine


def _combine_bf16(ufunc: np.ufunc, whole: np.ndarray, at: np.ndarray, new: np.ndarray) -> None:
    """One rounding an addition, in order; a target that comes twice is combined twice."""
    wide = lambda x: (x.astype(np.uint32) << 16).view(np.float32)  # noqa: E731
    left = np.arange(at.shape[0])
    while left.size:
        _, first = np.unique(at[left], return_index=True)
        rows = left[first]
        whole[at[rows]] = numerics.bf16_bits(ufunc(wide(whole[at[rows]]), wide(new[rows])))
        left = np.setdiff1d(left, rows)
