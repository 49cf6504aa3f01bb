"""Errors of the emulator, and the records it reports about a kernel's faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class PtxError(ValueError):
    """PTX text that this emulator does not accept: the line, its text, and what to do next."""

    def __init__(self, line: int, text: str, message: str) -> None:
        super().__init__(f"PTX line {line}: {message}\n    {text}")
        self.line, self.text, self.message = line, text, message


@contextmanager
def operands_of(ins: object) -> Iterator[None]:
    """An emitter that stumbles over operands of the wrong number or kind is a PtxError of that instruction."""
    try:
        yield
    except PtxError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PtxError(ins.line, ins.text, f"the operands do not fit the opcode ({error})") from error


class LaunchError(ValueError):
    """Input to ``run`` that could never be launched (block shape, parameter sizes, shared memory)."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of a kernel: what, where (CTA, warp, lane, PTX line) and how such faults are cured."""

    kind: str
    kernel: str
    cta: int
    warp: int
    lane: int
    line: int
    text: str
    other_line: int = 0
    message: str = ""
    cure: str = ""
    count: int = 1

    def __str__(self) -> str:
        other = f", against line {self.other_line}" if self.other_line else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return (
            f"{self.kind}: kernel {self.kernel}, CTA {self.cta}, warp {self.warp}, lane {self.lane}, "
            f"PTX line {self.line}{other}{times}: {self.text}\n    {self.message}\n    next: {self.cure}"
        )


class Fault(Exception):
    """Internal: a fault after which going on is meaningless; ``run`` turns it into a Finding."""

    def __init__(self, kind: str, line: int, message: str, cure: str, thread: int = 0, other_line: int = 0) -> None:
        super().__init__(f"{kind} at PTX line {line}: {message}")
        self.kind, self.line, self.message, self.cure = kind, line, message, cure
        self.thread, self.other_line = thread, other_line
