"""Registers of tcgen05.ld that are read before tcgen05.wait::ld (PTX ISA 9.7.16.8): found in the text, once a kernel.

A load fills its registers at some moment before the wait. The analysis follows every path: a load makes its
registers pending, the wait (or another write) settles them, a read while pending is an *early read*. In strict kernels
(tensor_core) the loads that an early read can see give poison, and in race mode the read is a finding.

Other kernels rely on the assembler, which lets an instruction that computes with a loaded register stall until the
load is done: such a *use* settles the load, for the race checker too. A copy (``mov``, which NVVM packs registers
with) need not stall: what it copies to is pending like its source. So a load whose wait is gone is in flight until its
first use, and memory that is handed on before then (an arrival, for the next product to write) is handed on too early.
"""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import definitions_and_uses
from .ptx.records import Instruction, KernelText


@dataclass(frozen=True, kw_only=True)
class EarlyReads:
    """``registers`` by line of the load; ``reads`` by line of the reading instruction: line of the load.

    ``uses`` by line of the first instruction on a path that computes with a pending register: lines of the loads.
    """

    registers: dict[int, frozenset[int]]
    reads: dict[int, int]
    uses: dict[int, tuple[int, ...]]


def is_load(ins: Instruction) -> bool:
    return ins.opcode == "tcgen05" and ins.modifiers[0] == "ld"


def is_wait(ins: Instruction) -> bool:
    return ins.opcode == "tcgen05" and ins.modifiers[0] == "wait::ld"


def early_reads(kernel: KernelText) -> EarlyReads:
    """Analyse a kernel; the result is kept with its text."""
    known = getattr(kernel, "early_reads", None)
    if known is None:
        loads = any(map(is_load, kernel.instructions))
        known = _early_reads(kernel) if loads else EarlyReads(registers={}, reads={}, uses={})
        kernel.early_reads = known
    return known


def _early_reads(kernel: KernelText) -> EarlyReads:
    strict, tracked = _Analysis(kernel), _Tracked(kernel)
    strict.follow()
    tracked.follow()
    return EarlyReads(
        registers={k: frozenset(v) for k, v in strict.registers.items()},
        reads=strict.reads,
        uses={k: tuple(sorted(v)) for k, v in tracked.uses.items()},
    )


class _Analysis:
    """By the manual: any read of a pending register is early."""

    def __init__(self, kernel: KernelText) -> None:
        self.code, self.labels = kernel.instructions, kernel.labels
        self.touched = [definitions_and_uses(ins) for ins in self.code]
        self.registers: dict[int, set[int]] = {}
        self.reads: dict[int, int] = {}

    def follow(self) -> None:
        starts = [i for i, ins in enumerate(self.code) if is_load(ins)]
        todo = [(i + 1, frozenset((n, self.code[i].line) for n in self.touched[i][0])) for i in starts]
        seen: dict[int, set] = {}
        while todo:
            at, pending = todo.pop()
            todo += self._run(at, pending, seen)

    def _step(self, at: int, pending: frozenset) -> frozenset:
        """What is pending behind an instruction."""
        ins, (defined, used) = self.code[at], self.touched[at]
        for number, line in pending:
            if number in used and not (ins.guard and number in defined):
                self.registers.setdefault(line, set()).add(number)
                self.reads[ins.line] = line
        return pending if ins.guard else frozenset(p for p in pending if p[0] not in defined)

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
            pending = self._step(at, pending)
            if ins.opcode == "bra":
                target = (self.labels[ins.operands[0].name], pending)
                return [target, (at + 1, pending)] if ins.guard else [target]
            if ins.opcode in ("ret", "exit", "trap") and not ins.guard:
                return []
            at += 1
        return []


class _Tracked(_Analysis):
    """As the assembler has it: a copy passes on that its source is pending, any other read settles the load."""

    def __init__(self, kernel: KernelText) -> None:
        super().__init__(kernel)
        self.uses: dict[int, set[int]] = {}

    def _step(self, at: int, pending: frozenset) -> frozenset:
        ins, (defined, used) = self.code[at], self.touched[at]
        read = {line for number, line in pending if number in used and not (ins.guard and number in defined)}
        left = pending if ins.guard else frozenset(p for p in pending if p[0] not in defined)
        if ins.opcode == "mov":
            return left | {(number, line) for number in defined for line in read}
        if read:
            self.uses.setdefault(ins.line, set()).update(read)
        return frozenset(p for p in left if p[1] not in read)
