"""Device memory: named buffers with red zones, or this process's own addresses.

A pointer is looked up by address range, so an access one byte outside of a buffer is seen even where another buffer
lies next to it. The red zones are a second net: ``run`` checks that their pattern is whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RED_ZONE = 256
_PATTERN = 0xA5
_WORDS = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
    16: np.dtype(np.complex128),
    32: np.dtype("V32"),
}


class Buffer:
    """A contiguous range of device memory and the NumPy bytes behind it."""

    def __init__(
        self, name: str, address: int, data: np.ndarray, writable: bool, whole: np.ndarray | None = None
    ) -> None:
        self.name, self.address, self.data, self.writable, self.whole = name, address, data, writable, whole
        self._views: dict[int, np.ndarray] = {}

    @property
    def size(self) -> int:
        return self.data.shape[0]

    def view(self, nbytes: int) -> np.ndarray:
        """The bytes as elements of ``nbytes`` (a rest at the end is left out; no aligned access reaches it)."""
        if nbytes not in self._views:
            self._views[nbytes] = self.data[: self.size // nbytes * nbytes].view(_WORDS[nbytes])
        return self._views[nbytes]


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of ``nbytes`` each, at these positions of one buffer."""

    buffer: Buffer
    at: np.ndarray
    nbytes: int

    @property
    def sectors(self) -> np.ndarray:
        """The 32-byte sectors that they lie in; buffers start at whole sectors."""
        return self.at >> (6 - self.nbytes.bit_length())


class Memory:
    """Buffers known by name. ``seed`` moves the addresses, which stay aligned to 256 bytes and no more."""

    def __init__(self, seed: int = 0) -> None:
        self._buffers: list[Buffer] = []
        self._starts = np.zeros(0, np.uint64)
        self._next = 0x7F00_0000_0000 + 512 * int(np.random.default_rng(seed).integers(1, 1 << 16)) + 256
        self._last: Buffer | None = None

    def add(self, name: str, array: np.ndarray, *, writable: bool = True) -> int:
        """Copy an array's bytes into device memory and return its address."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self._allocate(name, raw.shape[0], writable, raw)

    def poison(self, name: str, nbytes: int, *, writable: bool = True) -> int:
        """Allocate bytes of 0xFF, a NaN in bf16, f16 and f32: what a kernel fails to write stays visible."""
        return self._allocate(name, nbytes, writable, None)

    def read(self, name: str, dtype: object, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of a buffer's first bytes as an array."""
        buffer = self[name]
        count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if count > buffer.size:
            raise ValueError(f"read of {count} bytes from buffer {name!r} of {buffer.size} bytes; give a smaller shape")
        return buffer.data[:count].copy().view(dtype).reshape(shape)

    def address(self, name: str) -> int:
        return self[name].address

    def __getitem__(self, name: str) -> Buffer:
        for buffer in self._buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(f"no buffer named {name!r}; known: {', '.join(b.name for b in self._buffers) or 'none'}")

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(self._buffers)

    def _allocate(self, name: str, nbytes: int, writable: bool, raw: np.ndarray | None) -> int:
        if any(b.name == name for b in self._buffers):
            raise ValueError(f"buffer {name!r} exists already; give each buffer its own name")
        # The array itself starts 64-byte aligned inside, so that wide views are aligned for NumPy.
        whole = np.empty(nbytes + 2 * RED_ZONE + 64, np.uint8)
        skip = -(whole.ctypes.data + RED_ZONE) % 64
        whole = whole[skip : skip + nbytes + 2 * RED_ZONE]
        whole[:RED_ZONE] = whole[RED_ZONE + nbytes :] = _PATTERN
        data = whole[RED_ZONE : RED_ZONE + nbytes]
        data[:] = 0xFF if raw is None else raw
        address = self._next
        self._next = -(-(address + nbytes + 2 * RED_ZONE) // 512) * 512 + 256
        self._buffers.append(Buffer(name, address, data, writable, whole))
        self._starts = np.array([b.address for b in self._buffers], np.int64)
        return address

    # -- what the machine asks ----------------------------------------------------------------------------------
    def find(self, low: int, high: int) -> Buffer | None:
        """The one buffer that holds [low, high), or None."""
        last = self._last
        if last is not None and last.address <= low and high <= last.address + last.size:
            return last
        for buffer in self._buffers:
            if buffer.address <= low and high <= buffer.address + buffer.size:
                self._last = buffer
                return buffer
        return None

    def which(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        """Index of the buffer of each access, -1 for none."""
        out = np.full(address.shape, -1)
        for index, b in enumerate(self._buffers):
            out[(address >= b.address) & (address + nbytes <= b.address + b.size)] = index
        return out

    def buffer(self, index: int) -> Buffer | None:
        return self._buffers[index] if index >= 0 else None

    def describe(self, address: int) -> str:
        """Address as an offset from the nearest buffer."""
        if not self._buffers:
            return f"address {address:#x}; no buffer is registered"
        near = min(self._buffers, key=lambda b: max(b.address - address, address - (b.address + b.size - 1), 0))
        return f"address {address:#x}, at offset {address - near.address} of buffer {near.name!r} ({near.size} bytes)"

    def broken_red_zones(self) -> list[str]:
        return [
            b.name
            for b in self._buffers
            if (b.whole[:RED_ZONE] != _PATTERN).any() or (b.whole[RED_ZONE + b.size :] != _PATTERN).any()
        ]


class _HostRange:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class HostMemory:
    """No registry: addresses are this process's own, and are not checked. A wrong kernel can end the process."""

    def find(self, low: int, high: int) -> Buffer | None:
        start = low & ~31
        return Buffer("host", start, np.asarray(_HostRange(start, -(-(high - start) // 32) * 32)), True)

    def which(self, address: np.ndarray, nbytes: int) -> np.ndarray:
        return np.zeros(address.shape, np.int64)

    def buffer(self, index: int) -> Buffer | None:
        return None

    def describe(self, address: int) -> str:
        return f"host address {address:#x}"

    def broken_red_zones(self) -> list[str]:
        return []

    buffers: tuple[Buffer, ...] = ()
