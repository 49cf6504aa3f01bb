"""Words of PTX text that several parts of the parser share: types, names, constants, lists (PTX ISA 4 and 5.2)."""

from __future__ import annotations

import re

from ..errors import PtxError

BYTES = {
    "pred": 0,
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
}
IDENT = r"[%$A-Za-z_][\w$]*"
INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
DECIMAL = re.compile(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?$")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")
DEEPEST = 64


def without_comments(text: str) -> str:
    """The text with comments blanked; line numbers stay."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*out, last] if last else out


def integer(text: str, line: int) -> int:
    """An integer constant in any of the four bases."""
    if not INTEGER.match(text) or len(text) > 80:
        raise PtxError(line, text[:80], "integer constant not understood")
    plain = text.rstrip("U")
    return int(plain, 8) if re.match(r"-?0\d+$", plain) else int(plain, 0)


def float_bits(text: str) -> tuple[int, int] | None:
    """Bits and size in bytes of an exact float constant (0f… or 0d…)."""
    match = _FLOAT.match(text)
    if not match:
        return None
    return (int(match[1], 16), 4) if match[1] else (int(match[2], 16), 8)
