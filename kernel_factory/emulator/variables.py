"""Module-level .global and .const variables: placed in memory when a kernel first asks for their address.

PTX ISA 5.1.3, 5.1.4 and 5.4. A variable lives as long as the memory it is in, so launches of one module share it.
"""

from __future__ import annotations

import zlib

import numpy as np

from .errors import Fault
from .ptx.records import Variable
from .registry import runtime


def address_of(M: object, name: str) -> int:
    """The variable's address, with its initial bytes in place."""
    table = vars(M.memory).setdefault("_module_variables", {})
    var = next(v for v in M.program.kernel.variables if v.name == name)
    key = (name, var.size, zlib.crc32(var.data), var.links)
    if key not in table:
        if var.external:
            raise Fault("unsupported", 0, f"variable {name} is defined in another module", "link the modules first")
        table[key] = None  # a cycle of initial addresses ends here
        table[key] = _place(M, var, len(table))
    if table[key] is None:
        raise Fault("unsupported", 0, f"variable {name} holds its own address", "initialise it in the kernel")
    return table[key][0]


def _place(M: object, var: Variable, number: int) -> tuple[int, np.ndarray | None]:
    raw = bytearray(var.data + bytes(var.size - len(var.data)))
    for link in var.links:
        address = address_of(M, link.name) + link.addend
        raw[link.offset : link.offset + link.size] = address.to_bytes(8, "little")[: link.size]
    data = np.frombuffer(bytes(raw) or b"\0", np.uint8)
    if hasattr(M.memory, "add"):
        return M.memory.add(f"variable {var.name} {number}", data, writable=var.space == "global"), None
    room = np.zeros(data.shape[0] + 256, np.uint8)  # host memory: the array itself, kept in the table
    skip = -room.ctypes.data % 128
    room[skip : skip + data.shape[0]] = data
    return room.ctypes.data + skip, room


@runtime
def variable_address(M: object, name: str, offset: int, dtype: type) -> np.ndarray:
    return np.array([address_of(M, name) + offset], np.uint64).astype(dtype)


@runtime
def clock(M: object, name: str, dtype: type) -> np.ndarray:
    """%clock, %clock64 and %globaltimer: a counter of executed blocks, times 32. It only ever goes up."""
    ticks = 32 * (M.steps + 1)
    return np.array([ticks >> 32 if name.endswith("_hi") else ticks], np.uint64).astype(dtype)
