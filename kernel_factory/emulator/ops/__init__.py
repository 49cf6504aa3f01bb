"""Opcode groups. Importing this package fills the opcode table; a new group is a new module in this list."""

from . import async_copy, control, convert, floating, integer, matrix, memory_access, move, packed, warp

__all__ = [
    "async_copy",
    "control",
    "convert",
    "floating",
    "integer",
    "matrix",
    "memory_access",
    "move",
    "packed",
    "warp",
]
