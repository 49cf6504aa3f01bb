"""Registers of tcgen05.ld that are read before tcgen05.wait::ld (PTX ISA 9.7.16.8): found in the text, once a kernel.

A load fills its registers at some moment before the wait. The analysis follows every path: a load makes its
registers pending, the wait (or another write) settles them, a read while pending is an *early read*. In strict kernels
(tensor_core) the loads that an early read can see give poison, and in race mode the read is a finding.
"""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import definitions_and_uses
from .ptx.records import Instruction, KernelText


@dataclass(frozen=True, kw_only=True)
class EarlyReads:
    """``registers`` by line of the load; ``reads`` by line of the reading instruction: line of the load."""

    registers: dict[int, frozenset[int]]
    reads: dict[int, int]


def is_load(ins: Instruction) -> bool:
    return ins.opcode == "tcgen05" and ins.modifiers[0] == "ld"


def is_wait(ins: Instruction) -> bool:
    return ins.opcode == "tcgen05" and ins.modifiers[0] == "wait::ld"


def early_reads(kernel: KernelText) -> EarlyReads:
    """Analyse a kernel; the result is kept with its text."""
    known = getattr(kernel, "early_reads", None)
    if known is None:
        known = (
            _Analysis(kernel).result() if any(map(is_load, kernel.instructions)) else EarlyReads(registers={}, reads={})
        )
        kernel.early_reads = known
    return known


class _Analysis:
    def __init__(self, kernel: KernelText) -> None:
        self.code, self.labels = kernel.instructions, kernel.labels
        self.touched = [definitions_and_uses(ins) for ins in self.code]
        self.interest = {n for ins, (d, _) in zip(self.code, self.touched, strict=True) if is_load(ins) for n in d}
        self.registers: dict[int, set[int]] = {}
        self.reads: dict[int, int] = {}

    def result(self) -> EarlyReads:
        starts = [i for i, ins in enumerate(self.code) if is_load(ins)]
        todo = [(i + 1, frozenset((n, self.code[i].line) for n in self.touched[i][0])) for i in starts]
        seen: dict[int, set] = {}
        while todo:
            at, pending = todo.pop()
            todo += self._run(at, pending, seen)
        return EarlyReads(registers={k: frozenset(v) for k, v in self.registers.items()}, reads=self.reads)

    def _run(self, at: int, pending: frozenset, seen: dict) -> list[tuple[int, frozenset]]:
        """Follow straight-line code from ``at`` while registers are pending; the branches that lead on."""
        while at < len(self.code):
            pending = frozenset(pending - seen.get(at, set()))
            if not pending:
                return []
            seen.setdefault(at, set()).update(pending)
            ins = self.code[at]
            if is_wait(ins):
                return []
            defined, used = self.touched[at]
            for number, line in pending:
                if number in used and not (ins.guard and number in defined):
                    self.registers.setdefault(line, set()).add(number)
                    self.reads[ins.line] = line
            if not ins.guard:
                pending = frozenset(p for p in pending if p[0] not in defined)
            if ins.opcode == "bra":
                target = (self.labels[ins.operands[0].name], pending)
                return [target, (at + 1, pending)] if ins.guard else [target]
            if ins.opcode in ("ret", "exit", "trap") and not ins.guard:
                return []
            at += 1
        return []
