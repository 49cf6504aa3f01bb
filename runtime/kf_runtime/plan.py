"""Plan: the ordered launches of one cell, as data.

A Plan holds no address. Each ``Slot`` says where a buffer's address goes in a launch's
parameter images; everything else in the images is final. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

ROLES: Final = ("input", "output", "scratch")
ITEM_BYTES: Final = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1, "i32": 4, "i64": 8}


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor, in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One tensor of a Plan: its role, dtype, shape, strides (in elements) and alignment in bytes."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int = 16

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"Buffer {self.name}: role: expected one of {', '.join(ROLES)}; found {self.role!r}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"Buffer {self.name}: dtype: expected one of {', '.join(ITEM_BYTES)}; found {self.dtype!r}"
            )

    @classmethod
    def contiguous(cls, name: str, role: str, dtype: str, shape: tuple[int, ...], alignment: int = 16) -> Buffer:
        """A row-major buffer."""
        return cls(name=name, role=role, dtype=dtype, shape=shape, strides=row_major(shape), alignment=alignment)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where an address goes: ``images[parameter][offset : offset + 8] = address(buffer) + addend``."""

    parameter: int
    offset: int
    buffer: str
    addend: int = 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything ``cuLaunchKernelEx`` needs, as data.

    ``images`` are the by-value parameters with every address and padding byte zeroed.
    ``function_attributes`` are (CUfunction_attribute, value) pairs set once after loading;
    ``cluster`` is (1, 1, 1) where the launch has none. ``grid_barrier`` marks a kernel whose
    blocks wait for each other through global memory.
    """

    kernel: str
    cubin: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int
    function_attributes: tuple[tuple[int, int], ...] = ()
    images: tuple[bytes, ...]
    slots: tuple[Slot, ...]
    grid_barrier: bool = False

    def images_at(self, addresses: Mapping[str, int]) -> tuple[bytes, ...]:
        """The parameter images with these buffer addresses written into the slots."""
        filled = [bytearray(image) for image in self.images]
        for slot in self.slots:
            word = (addresses[slot.buffer] + slot.addend).to_bytes(8, "little")
            filled[slot.parameter][slot.offset : slot.offset + 8] = word
        return tuple(bytes(image) for image in filled)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ordered launches of one cell and its buffer table. Raises ValueError on a dangling slot."""

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]

    def __post_init__(self) -> None:
        known = {buffer.name for buffer in self.buffers}
        for launch in self.launches:
            for slot in launch.slots:
                if slot.buffer not in known:
                    raise ValueError(
                        f"Launch {launch.kernel}: slot {slot.parameter}+{slot.offset} names buffer {slot.buffer!r}; "
                        f"the Plan has {', '.join(sorted(known))}"
                    )
                if slot.offset + 8 > len(launch.images[slot.parameter]):
                    raise ValueError(
                        f"Launch {launch.kernel}: slot at byte {slot.offset} passes the end of its parameter"
                    )

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name; KeyError otherwise."""
        for buffer in self.buffers:
            if buffer.name == name:
                return buffer
        raise KeyError(name)

    def named(self, role: str) -> tuple[Buffer, ...]:
        """The buffers of one role, in table order."""
        return tuple(buffer for buffer in self.buffers if buffer.role == role)

    def to_json(self) -> dict[str, Any]:
        """Plain data; parameter images as hexadecimal text."""
        return {
            "buffers": [{**vars(b), "shape": list(b.shape), "strides": list(b.strides)} for b in self.buffers],
            "launches": [_launch_json(launch) for launch in self.launches],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The inverse of ``to_json``."""
        return cls(
            buffers=tuple(
                Buffer(**{**b, "shape": tuple(b["shape"]), "strides": tuple(b["strides"])}) for b in data["buffers"]
            ),
            launches=tuple(_launch_of(launch) for launch in data["launches"]),
        )


def _launch_json(launch: Launch) -> dict[str, Any]:
    return {
        **vars(launch),
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "function_attributes": [list(pair) for pair in launch.function_attributes],
        "images": [image.hex() for image in launch.images],
        "slots": [[s.parameter, s.offset, s.buffer, s.addend] for s in launch.slots],
    }


def _launch_of(data: dict[str, Any]) -> Launch:
    triple = {name: (int(x), int(y), int(z)) for name in ("grid", "block", "cluster") for x, y, z in [data[name]]}
    return Launch(
        **{
            **data,
            **triple,
            "function_attributes": tuple((int(k), int(v)) for k, v in data["function_attributes"]),
            "images": tuple(bytes.fromhex(image) for image in data["images"]),
            "slots": tuple(Slot(parameter=p, offset=o, buffer=b, addend=a) for p, o, b, a in data["slots"]),
        }
    )
