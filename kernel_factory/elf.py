"""What a cubin says of itself: kernels, parameters, registers, stack and shared memory.

Reads the ``.nv.info`` sections with pyelftools. The attribute codes are those that a cubin of
CUDA 13.3 carries; an absent attribute raises, it is never guessed.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

KPARAM_INFO = 0x17
REGCOUNT = 0x2F
FRAME_SIZE = 0x11
MAX_THREADS = 0x05
REQNTID = 0x10
_BY_BYTES = 4  # attribute format: a two-byte length and that many bytes follow


class CubinError(Exception):
    """These bytes are not the cubin that was expected."""


@dataclass(frozen=True, kw_only=True)
class ParameterInfo:
    """One kernel parameter: its place in the constant bank and its size, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class KernelInfo:
    """One kernel of a cubin. ``frame_bytes`` is its stack: 0 means that nothing was spilled."""

    symbol: str
    parameters: tuple[ParameterInfo, ...]
    registers: int
    frame_bytes: int
    static_shared: int
    threads: tuple[int, int, int] | None
    code_bytes: int


def kernels(cubin: bytes) -> tuple[KernelInfo, ...]:
    """Every kernel in a cubin, in section order. Raises CubinError on bytes that are no cubin."""
    try:
        elf = ELFFile(io.BytesIO(cubin))
        sections = {section.name: section for section in elf.iter_sections()}
    except (ELFError, struct.error) as error:
        raise CubinError(f"expected a cubin (ELF); found {len(cubin)} bytes that are none: {error}") from error
    names = [symbol.name for symbol in sections[".symtab"].iter_symbols()] if ".symtab" in sections else []
    common = _by_symbol(sections[".nv.info"].data(), names) if ".nv.info" in sections else {}
    found = []
    for name, section in sections.items():
        if not name.startswith(".text."):
            continue
        symbol = name.removeprefix(".text.")
        own = list(_attributes(sections[f".nv.info.{symbol}"].data()))
        shared = sections.get(f".nv.shared.{symbol}")
        found.append(
            KernelInfo(
                symbol=symbol,
                parameters=_parameters(own),
                registers=_required(common, symbol, REGCOUNT, "register count"),
                frame_bytes=_required(common, symbol, FRAME_SIZE, "frame size"),
                static_shared=shared["sh_size"] if shared is not None else 0,
                threads=_threads(own),
                code_bytes=section["sh_size"],
            )
        )
    if not found:
        raise CubinError("expected a cubin with at least one kernel; found no .text section")
    return tuple(found)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, code, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _BY_BYTES:
            yield code, data[at : at + value]
            at += value
        else:
            yield code, struct.pack("<H", value)


def _by_symbol(data: bytes, names: list[str]) -> dict[tuple[str, int], int]:
    table = {}
    for code, value in _attributes(data):
        if len(value) == 8:
            index, number = struct.unpack("<II", value)
            table[names[index], code] = number
    return table


def _required(table: dict[tuple[str, int], int], symbol: str, code: int, what: str) -> int:
    if (symbol, code) not in table:
        raise CubinError(f"kernel {symbol}: expected attribute {code:#x} ({what}) in .nv.info; found none")
    return table[symbol, code]


def _parameters(attributes: list[tuple[int, bytes]]) -> tuple[ParameterInfo, ...]:
    rows = []
    for code, value in attributes:
        if code == KPARAM_INFO:
            _, ordinal, offset, flags = struct.unpack("<IHHI", value)
            rows.append((ordinal, ParameterInfo(offset=offset, size=flags >> 18)))
    return tuple(info for _, info in sorted(rows, key=lambda row: row[0]))


def _threads(attributes: list[tuple[int, bytes]]) -> tuple[int, int, int] | None:
    for code, value in attributes:
        if code == REQNTID:
            x, y, z = struct.unpack("<III", value)
            return x, y, z
    return None
