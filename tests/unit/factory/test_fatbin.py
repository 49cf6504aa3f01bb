"""What the emulated driver takes for a cubin: a bare ELF, or a fatbin as the DSL's JIT form embeds it."""

from __future__ import annotations

import struct

from kernel_factory.emulator.driver.service import cubin_of

HEADER, PTX, CUBIN = 72, 1, 2
#: 64 bytes of an ELF header whose section table lies at its end, and which says so.
ELF = b"\x7fELF" + bytes(28) + struct.pack("<QQ", 0, 64) + bytes(16)


def fatbin(*entries: tuple[int, bytes]) -> bytes:
    """A fatbin of (kind, payload) entries, with something after it."""
    packed = b"".join(
        struct.pack("<HHIQ", kind, 0x101, HEADER, len(data)).ljust(HEADER, b"\0") + data for kind, data in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed + ELF


def found(image: bytes) -> bytes:
    """What ``cubin_of`` finds in an image in memory that goes on after it."""
    return cubin_of(lambda at, size: (image + bytes(256))[at : at + size])


def test_a_bare_elf_ends_where_its_tables_end() -> None:
    """Bytes after the image are not part of it."""
    assert found(ELF + b"more") == ELF


def test_the_cubin_of_a_fatbin() -> None:
    """The first uncompressed ELF entry, whatever comes before it, byte for byte."""
    cubin = ELF + b"code"
    assert found(fatbin((CUBIN, cubin))) == cubin
    assert found(fatbin((PTX, b".version 9.3"), (CUBIN, b"(lz4)"), (CUBIN, cubin))) == cubin


def test_no_cubin() -> None:
    """PTX alone, compressed code alone, or neither format: nothing, which the driver reports as no binary."""
    assert found(fatbin((PTX, ELF))) == b""
    assert found(fatbin((CUBIN, b"(lz4)"))) == b""
    assert found(b"text") == b""
