"""Where the units of tensor-map boxes lie in global and in shared memory, for many copies at once."""

from __future__ import annotations

import numpy as np

from .errors import Fault
from .issue import Issue
from .memory import Elements
from .tensor_map import TensorMap


class Boxes:
    """Boxes of one tensor map at ``coords`` (copies, rank), and the bytes that they cover in global memory.

    ``unit`` is what is moved at once: 16 bytes where coordinates and extents allow it, else one element.
    """

    def __init__(self, tmap: TensorMap, coords: np.ndarray) -> None:
        self.tmap, self.coords = tmap, coords
        size = tmap.element_bytes
        whole = not ((coords[:, 0] * size) & 15).any() and not (tmap.extents[0] * size) & 15
        self.unit = 16 if whole and tmap.box[0] * size % 16 == 0 else size
        self.index, self.offset = tmap.offsets(self.unit)
        self.inside = self._inside()

    def _inside(self) -> np.ndarray | None:
        """Which units lie inside of the tensor, (copies, units); None when all do."""
        extents, box = np.array(self.tmap.extents), np.array(self.tmap.box)
        if ((self.coords >= 0) & (self.coords + box <= extents)).all():
            return None
        at = self.coords[:, :, None] + self.index
        return ((at >= 0) & (at < extents[:, None])).all(axis=1)

    def locate(self, M: object, line: int, threads: np.ndarray, write: bool) -> tuple[object, np.ndarray]:
        """The buffer and the position of every unit in it (0 outside of the tensor)."""
        steps = np.array([self.tmap.element_bytes, *self.tmap.strides])
        address = (self.tmap.address + self.coords @ steps)[:, None] + self.offset
        if self.inside is None:
            low, high = int(address.min()), int(address.max())
        elif self.inside.any():
            low = int(np.where(self.inside, address, np.iinfo(np.int64).max).min())
            high = int(np.where(self.inside, address, 0).max())
        else:
            return None, np.zeros(address.shape, np.int64)
        buffer = M.memory.find(low, high + self.unit)
        if buffer is None or (write and not buffer.writable):
            where = M.memory.describe(low if M.memory.find(low, low + self.unit) is None else high)
            raise Fault(
                "out-of-bounds" if buffer is None else "write-to-read-only", line,
                f"tensor {'store' if write else 'load'} of a box of {self.tmap.box} elements: {where}",
                "correct the tensor map's address, extents and strides: inside of its extents it names other memory",
                int(threads[0]),
            )  # fmt: skip
        at = (address - buffer.address) >> (self.unit.bit_length() - 1)
        return buffer, at if self.inside is None else np.where(self.inside, at, 0)

    def read(self, M: object, line: int, threads: np.ndarray) -> np.ndarray:
        """The boxes' data, (copies, units); zeros or NaN outside of the tensor (PTX ISA 5.5.5)."""
        buffer, at = self.locate(M, line, threads, False)
        kind = M.shared_views[self.unit].dtype
        if buffer is None:
            return self._fill(at.shape, kind)
        elements = Elements(buffer, at, self.unit)
        if M.global_race:
            M.global_race.read(*self._within(threads, elements), line)
        if M.count:
            M.count.tensor(elements, self.inside, "read", line)
        data = buffer.view(self.unit).take(at)
        return data if self.inside is None else np.where(self.inside, data, self._fill(at.shape, kind))

    def _fill(self, shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
        return np.full((*shape, kind.itemsize), 0xFF if self.tmap.nan_fill else 0, np.uint8).view(kind)[..., 0]

    def write(self, M: object, data: np.ndarray, line: int, threads: np.ndarray, combine: object = None) -> None:
        """Write (or combine) what lies inside of the tensor."""
        buffer, at = self.locate(M, line, threads, True)
        if buffer is None:
            return
        elements = Elements(buffer, at, self.unit)
        rows, written = self._within(threads, elements)
        values = data.reshape(-1) if self.inside is None else data[self.inside]
        if M.global_race and combine is None:
            M.global_race.write(rows, written, line, values)
        elif M.global_race:
            M.global_race.reduce(rows, written, line)
        if M.count:
            M.count.tensor(elements, self.inside, "write", line)
        if combine is None:
            buffer.view(self.unit)[written.at] = values
        else:
            combine(buffer, written.at, values, self.unit)
        M.changed()

    def _within(self, threads: np.ndarray, elements: Elements) -> tuple[np.ndarray, Elements]:
        """The units inside of the tensor, and the thread of each."""
        keep = np.ones(elements.at.shape, bool) if self.inside is None else self.inside
        rows = np.broadcast_to(threads[:, None], keep.shape)[keep]
        return rows, Elements(elements.buffer, elements.at[keep], elements.nbytes)

    def shared(self, M: object, start: np.ndarray) -> np.ndarray:
        """Flat byte positions of every unit in shared memory, (copies, units), for tiles that start at ``start``."""
        linear = np.arange(self.offset.shape[0]) * self.unit
        align = self.tmap.alignment
        if not (start & (align - 1)).any():
            return start[:, None] + self.tmap.swizzled(linear)
        return self.tmap.swizzled(start[:, None] + linear)


def check_room(issue: Issue, start: np.ndarray, nbytes: np.ndarray | int, align: int, what: str) -> None:
    """The ``nbytes`` from flat position ``start`` must lie in one CTA's shared memory, aligned."""
    M = issue.M
    local = start % M.shared_stride
    bad = local + nbytes > M.shared_end - M.shared_origin
    if bad.any():
        at = int(np.argmax(bad))
        asked = int(np.broadcast_to(nbytes, bad.shape)[at])
        raise issue.fault(
            "out-of-bounds",
            f"{what} of {asked} bytes at offset {int(local[at])} of {M.shared_end - M.shared_origin} bytes "
            "of shared memory",
            "correct the layout, or ask for more dynamic shared memory at launch",
            at,
        )
    bad = (start & (align - 1)) != 0
    if bad.any():
        at = int(np.argmax(bad))
        raise issue.fault(
            "misaligned",
            f"{what} at shared-memory offset {int(local[at])}, expected a multiple of {align}",
            f"align the tile to {align} bytes",
            at,
        )
