"""Variable declarations: size, alignment, and initial values (PTX ISA 5.4)."""

from __future__ import annotations

import re
import struct

from ..errors import PtxError
from .records import Link, Variable
from .words import BYTES, IDENT, float_bits, integer, split

_VARIABLE = re.compile(
    rf"(?:\.attribute\s*\([^)]*\)\s*)?(?:\.align\s+(\d+)\s*)?(?:\.v([24])\s+)?\.(\w+)\s+({IDENT})\s*((?:\[\s*\d*\s*\]\s*)*)$"
)
_LINK = re.compile(rf"(?:generic\s*\(\s*({IDENT})\s*\)|({IDENT}))\s*(?:\+\s*(\d+))?$")
LARGEST = 1 << 31
_MODULE = re.compile(r"((?:\.(?:extern|visible|weak|common)\s+)*)\.(shared|global|const)\s+(.*);$", re.S)


def variable(text: str, line: int, external: bool = False, space: str = "shared") -> Variable:
    """A declaration without its state space: ``.align 4 .b8 name[16] = {1, 2}``."""
    declaration, equals, values = text.partition("=")
    match = _VARIABLE.match(declaration.strip())
    if not match or match[3] not in BYTES:
        raise PtxError(line, text[:80], "variable declaration not understood; teach the parser this form")
    align, vector, kind, name, dimensions = match.groups()
    counts = [int(n or 0) for n in re.findall(r"\[\s*(\d*)\s*\]", dimensions)]
    size = BYTES[kind] * int(vector or 1)
    data, links = _initial(values, kind, line) if equals else (b"", ())
    elements = 1
    for count in counts:
        elements *= count
    total = max(elements * size, len(data))
    if total > LARGEST:
        raise PtxError(line, text[:80], f"a variable of {total} bytes is larger than {LARGEST} bytes")
    align = int(align or size or 1)
    if align < 1 or align & (align - 1) or align > 1 << 16:
        raise PtxError(line, text[:80], f"alignment {align} is no power of two up to 65536")
    return Variable(name=name, size=total, align=align, external=external, space=space, data=data, links=links)


def module_variable(text: str, line: int) -> Variable:
    """A module-level declaration of a shared, global or constant variable."""
    match = _MODULE.match(text.strip())
    if not match:
        raise PtxError(
            line, " ".join(text.split())[:80], "only .shared, .global and .const variables exist at module level"
        )
    return variable(" ".join(match[3].split()), line, "extern" in match[1], match[2])


def _initial(text: str, kind: str, line: int) -> tuple[bytes, tuple[Link, ...]]:
    """Bytes of the listed values, and the places that hold addresses of other variables."""
    size, out, links = BYTES[kind], bytearray(), []
    for item in _flat(text.strip(), line):
        link = _LINK.match(item) if not item[:1].isdigit() else None
        if link:
            links.append(Link(offset=len(out), size=size, name=link[1] or link[2], addend=int(link[3] or 0)))
            out += bytes(size)
        else:
            out += _bytes(item, kind, line)
    return bytes(out), tuple(links)


def _bytes(item: str, kind: str, line: int) -> bytes:
    size = BYTES[kind]
    value = float_bits(item)
    if value is not None:
        return value[0].to_bytes(value[1], "little")
    if kind in ("f32", "f64") and re.match(r"-?\d*\.?\d+([eE][+-]?\d+)?$", item):
        return struct.pack("<f" if kind == "f32" else "<d", float(item))
    if not re.match(r"-?\s*\w+$", item):
        raise PtxError(line, item[:80], "initial value not understood")
    return (integer(item.replace(" ", ""), line) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _flat(text: str, line: int) -> list[str]:
    """The values of nested braces, in order."""
    plain = text.replace("{", " ").replace("}", " ") if text.startswith("{") else text
    items = [item for item in split(plain) if item]
    if not items:
        raise PtxError(line, text[:80], "the list of initial values is empty")
    return items
