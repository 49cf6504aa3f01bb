"""Mutants: a kernel's PTX with one statement dropped, weakened, shifted, or given another constant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SYNCHRONISATIONS: Final = (
    "bar.arrive",
    "bar.sync",
    "bar.warp.sync",
    "barrier.arrive",
    "barrier.sync",
    "barrier.cluster",
    "cp.async.wait_group",
    "cp.async.wait_all",
    "cp.async.commit_group",
    "cp.async.bulk.wait_group",
    "cp.async.bulk.commit_group",
    "fence.",
    "mbarrier.arrive",
    "wgmma.fence",
    "wgmma.commit_group",
    "wgmma.wait_group",
    "tcgen05.commit",
    "tcgen05.fence",
    "tcgen05.wait",
)
WAITS: Final = ("mbarrier.try_wait", "mbarrier.test_wait")
WEAKENED: Final = ("cp.async.wait_group", "cp.async.bulk.wait_group", "wgmma.wait_group")
INDEXED: Final = (
    "ld.global",
    "st.global",
    "ld.shared",
    "st.shared",
    "ldmatrix",
    "stmatrix",
    "cp.async.cg",
    "cp.async.ca",
)
_STATEMENT: Final = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)")
_WAIT: Final = re.compile(r"mbarrier\.t\w+_wait\S*\s+(%?\w+)\s*,.*;")
_ADDRESS: Final = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")
_SWIZZLE: Final = re.compile(r"^(\s*xor\.b32\s+%\w+,\s*%\w+,\s*)(\d+);")
_DESCRIPTOR: Final = re.compile(r"^(\s*(?:or|mov)\.b64\s+%\w+,\s*(?:%\w+,\s*)?)(-?\d{15,});")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken statement: what was done, on which PTX line, and what stands there instead of ``statement``."""

    kind: str
    line: int
    statement: str
    text: str = ""


def broken(ptx: str, *mutants: Mutant) -> str:
    """The PTX with these mutations; all other lines keep their numbers."""
    rows = ptx.splitlines()
    for mutant in mutants:
        rows[mutant.line - 1] = mutant.text
    return "\n".join(rows) + "\n"


def every(ptx: str) -> Iterator[Mutant]:
    """Every mutant of a kernel, in one order."""
    yield from drops(ptx)
    yield from weakenings(ptx)
    yield from shifts(ptx)
    yield from constants(ptx)


def statements(ptx: str, opcodes: tuple[str, ...]) -> list[tuple[int, str]]:
    """Line numbers (from 1) and texts of the statements whose opcode starts with one of ``opcodes``."""
    found = []
    for number, line in enumerate(ptx.splitlines(), start=1):
        match = _STATEMENT.match(line)
        if match and match.group(1).startswith(opcodes):
            found.append((number, line.strip()))
    return found


def drops(ptx: str) -> Iterator[Mutant]:
    """A mutant for every synchronisation, dropped; a wait for an mbarrier's phase finds it complete at once."""
    rows = ptx.splitlines()
    for line, text in statements(ptx, SYNCHRONISATIONS):
        yield Mutant(kind="drop", line=line, statement=text)
    for line, text in statements(ptx, WAITS):
        passes = _WAIT.sub(lambda m: f"mov.pred {m[1]}, -1;", rows[line - 1])
        yield Mutant(kind="drop", line=line, statement=text, text=passes)


def weakenings(ptx: str) -> Iterator[Mutant]:
    """A mutant for every wait that leaves one more group in flight."""
    for line, text in statements(ptx, WEAKENED):
        looser = re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", ptx.splitlines()[line - 1], count=1)
        if looser != ptx.splitlines()[line - 1]:
            yield Mutant(kind="weaken", line=line, statement=text, text=looser)


def shifts(ptx: str) -> Iterator[Mutant]:
    """For every kind of indexed access, its first and last statement moved by 16 bytes."""
    for opcode in INDEXED:
        found = [row for row in statements(ptx, (opcode,)) if _ADDRESS.search(row[1])]
        for line, text in dict.fromkeys([*found[:1], *found[-1:]]):
            moved = _ADDRESS.sub(lambda m: f"[{m[1]}+{int(m[2] or 0) + 16}]", ptx.splitlines()[line - 1], count=1)
            yield Mutant(kind="shift", line=line, statement=text, text=moved)


def constants(ptx: str) -> Iterator[Mutant]:
    """Swizzle masks (constants of xor) and descriptor bits (wide constants), each with one bit flipped.

    An xor with 1 flips the parity that an mbarrier is waited on: it is made to flip nothing.
    """
    for number, line in enumerate(ptx.splitlines(), start=1):
        for kind, pattern, bit in (("swizzle", _SWIZZLE, 16), ("descriptor", _DESCRIPTOR, 1 << 62)):
            match = pattern.match(line)
            if match:
                parity = kind == "swizzle" and match[2] == "1"
                kind, text = ("parity", f"{match[1]}0;") if parity else (kind, f"{match[1]}{int(match[2]) ^ bit};")
                yield Mutant(kind=kind, line=number, statement=line.strip(), text=text)
