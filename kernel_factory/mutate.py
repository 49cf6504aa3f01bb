"""Mutate: break a kernel's PTX on purpose, and see whether validation notices.

A mutant drops one synchronisation or shifts one index. It is killed when a check reports a
finding or the result leaves the policy's bars. A survivor is excused only if the synchronisation
is redundant: dropping it TOGETHER with another survivor, which covers it, is caught.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

from kernel_factory import emulator
from kernel_factory.bench import MODES, Target, Tensors, run_target

SYNCHRONISATIONS: Final = ("bar.sync", "barrier.sync", "bar.warp.sync", "cp.async.wait_group", "cp.async.wait_all")
INDEXED: Final = ("ld.global", "st.global", "ld.shared", "st.shared", "ldmatrix", "cp.async.cg", "cp.async.ca")
_STATEMENT: Final = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)")
_ADDRESS: Final = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")
NORM_BAR: Final = 1.5e-3
ROW_BAR: Final = 1e-2


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One broken kernel: what was done, on which PTX lines, and the text that results."""

    kind: str
    lines: tuple[int, ...]
    statement: str
    ptx: str


@dataclass(frozen=True, kw_only=True)
class Killed:
    """The mode that noticed, and what it said."""

    mode: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Survived:
    """No mode noticed."""


Fate = Killed | Survived


def statements(ptx: str, opcodes: tuple[str, ...]) -> list[tuple[int, str]]:
    """Line numbers (from 1) and texts of the statements whose opcode starts with one of ``opcodes``."""
    found = []
    for number, line in enumerate(ptx.splitlines(), start=1):
        match = _STATEMENT.match(line)
        if match and match.group(1).startswith(opcodes):
            found.append((number, line.strip()))
    return found


def without(ptx: str, *lines: int) -> str:
    """The PTX with these lines blanked, so that all others keep their numbers."""
    return "\n".join("" if i in lines else text for i, text in enumerate(ptx.splitlines(), start=1)) + "\n"


def drops(ptx: str) -> Iterator[Mutant]:
    """A mutant for every synchronisation, dropped."""
    for line, text in statements(ptx, SYNCHRONISATIONS):
        yield Mutant(kind="drop", lines=(line,), statement=text, ptx=without(ptx, line))


def shifts(ptx: str) -> Iterator[Mutant]:
    """For every kind of indexed access, its first and last statement moved by 16 bytes."""
    for opcode in INDEXED:
        found = [row for row in statements(ptx, (opcode,)) if _ADDRESS.search(row[1])]
        for line, text in dict.fromkeys([*found[:1], *found[-1:]]):
            rows = ptx.splitlines()
            rows[line - 1] = _ADDRESS.sub(lambda m: f"[{m[1]}+{int(m[2] or 0) + 16}]", rows[line - 1], count=1)
            yield Mutant(kind="shift", lines=(line,), statement=text, ptx="\n".join(rows) + "\n")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One launch of a cell, ready to be run broken: a sample of its blocks, on the rounding model's values."""

    target: Target
    inputs: Tensors
    staged: Any

    def fate(self, mutant: Mutant) -> Fate:
        """Run a mutant in every mode until one notices."""
        bench, index = self.target.bench, self.target.index
        kernel = emulator.load(mutant.ptx).kernels[self.target.launch.symbol]
        kernels = (*bench.kernels[:index], kernel, *bench.kernels[index + 1 :])
        broken = replace(self.target, bench=replace(bench, kernels=kernels))
        for mode in MODES:
            figures, result = run_target(broken, self.inputs, self.staged, mode)
            if result.findings:
                return Killed(mode=mode, why=f"{result.findings[0].kind} at line {result.findings[0].line}")
            norm, row = figures["model_norm"], figures["model_worst_row"]
            if not (norm <= NORM_BAR and row <= ROW_BAR):
                return Killed(mode=mode, why=f"error {norm:.2e}, worst row {row:.2e}")
        return Survived()


def covering(trial: Trial, ptx: str, survivors: list[Mutant]) -> dict[int, int]:
    """Survivors that are redundant: line -> the line that covers it. Dropping both is caught.

    Two survivors cover each other where either alone is enough. A warp barrier that survives the
    race checker orders no memory (the compiler, or its author, put it there to keep loads in place):
    what it could order is covered by the next synchronisation.
    """
    covered: dict[int, int] = {}
    candidates = [(one.lines[0], two.lines[0]) for one, two in combinations(survivors, 2)]
    order = [line for line, _ in statements(ptx, SYNCHRONISATIONS)]
    alone = {mutant.lines[0] for mutant in survivors}
    needed = [line for line in order if line not in alone]
    for mutant in survivors:
        line = mutant.lines[0]
        after = [other for other in needed if other > line] or needed[-1:]
        if mutant.statement.startswith("bar.warp.sync") and after:
            candidates.append((line, after[0]))
    for one, two in candidates:
        both = Mutant(kind="drop pair", lines=(one, two), statement="", ptx=without(ptx, one, two))
        if isinstance(trial.fate(both), Killed):
            covered.setdefault(one, two)
            if two in alone:
                covered.setdefault(two, one)
    return covered
