"""Mutate: break a kernel's PTX on purpose, and see whether validation notices.

A mutant drops or weakens one synchronisation, shifts one index, or changes one swizzle or
descriptor constant. It is killed when a check reports a finding or the numbers leave the bars. A
survivor is excused only if it is redundant: dropping it TOGETHER with the synchronisation that
covers it is caught.

``Trial`` knows nothing of families: anything that can run a PTX text in a mode and say what it
noticed can be mutated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

from kernel_factory import emulator
from kernel_factory.bench import MODES, Target, Tensors, run_target, within_bars

SYNCHRONISATIONS: Final = (
    "bar.sync",
    "bar.warp.sync",
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
_ADDRESS: Final = re.compile(r"\[(%\w+)(?:\+(-?\d+))?\]")
_SWIZZLE: Final = re.compile(r"^(\s*xor\.b32\s+%\w+,\s*%\w+,\s*)(\d+);")
_DESCRIPTOR: Final = re.compile(r"^(\s*(?:or|mov)\.b64\s+%\w+,\s*(?:%\w+,\s*)?)(-?\d{15,});")


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


@dataclass(frozen=True, kw_only=True)
class Redundant:
    """No mode noticed, and dropping this together with line ``cover`` is noticed."""

    cover: int


Fate = Killed | Survived | Redundant


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A kernel to break. ``attempt(ptx, mode)`` runs a text and says what it noticed, or None.

    ``races(ptx)`` gives everything that the race checker finds, as (kind, line, other line).
    """

    ptx: str
    attempt: Callable[[str, str], str | None]
    races: Callable[[str], frozenset[tuple[str, int, int]]]

    @classmethod
    def of_target(cls, target: Target, inputs: Tensors, staged: Any, ptx: str) -> Trial:
        """One launch of a cell: a sample of its blocks, on the rounding model's values."""

        def ran(text: str, mode: str) -> tuple[dict[str, float], emulator.Result]:
            bench, index = target.bench, target.index
            kernel = emulator.load(text).kernels[target.launch.symbol]
            kernels = (*bench.kernels[:index], kernel, *bench.kernels[index + 1 :])
            return run_target(replace(target, bench=replace(bench, kernels=kernels)), inputs, staged, mode)

        def attempt(text: str, mode: str) -> str | None:
            figures, result = ran(text, mode)
            if result.findings:
                return f"{result.findings[0].kind} at line {result.findings[0].line}"
            norm, row = figures["model_norm"], figures["model_worst_row"]
            return None if within_bars(figures) else f"error {norm:.2e}, worst row {row:.2e}"

        return cls(ptx=ptx, attempt=attempt, races=lambda text: found_in(ran(text, "race")[1]))

    def fate(self, mutant: Mutant) -> Killed | Survived:
        """Run a mutant in every mode until one notices."""
        for mode in MODES:
            why = self.attempt(mutant.ptx, mode)
            if why is not None:
                return Killed(mode=mode, why=why)
        return Survived()


def suite(trial: Trial, heard: Callable[[Mutant, Fate], None] = lambda mutant, fate: None) -> list[tuple[Mutant, Fate]]:
    """Every mutant of a trial with its fate; survivors that are redundant are told apart.

    ``heard`` is told each fate once it is known: kills as they come, the rest at the end.
    """
    fates: list[tuple[Mutant, Fate]] = []
    for mutant in mutants(trial.ptx):
        fates.append((mutant, trial.fate(mutant)))
        if isinstance(fates[-1][1], Killed):
            heard(*fates[-1])
    survivors = [m for m, fate in fates if isinstance(fate, Survived) and m.kind in ("drop", "weaken")]
    covers = covering(trial, survivors)
    told = [(m, _excuse(m, fate, covers)) for m, fate in fates]
    for mutant, fate in told:
        if not isinstance(fate, Killed):
            heard(mutant, fate)
    return told


def _excuse(mutant: Mutant, fate: Fate, covers: dict[int, int]) -> Fate:
    covered = isinstance(fate, Survived) and mutant.kind in ("drop", "weaken") and mutant.lines[0] in covers
    return Redundant(cover=covers[mutant.lines[0]]) if covered else fate


def mutants(ptx: str) -> Iterator[Mutant]:
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


def without(ptx: str, *lines: int) -> str:
    """The PTX with these lines blanked, so that all others keep their numbers."""
    return "\n".join("" if i in lines else text for i, text in enumerate(ptx.splitlines(), start=1)) + "\n"


def _changed(ptx: str, line: int, text: str) -> str:
    rows = ptx.splitlines()
    rows[line - 1] = text
    return "\n".join(rows) + "\n"


def drops(ptx: str) -> Iterator[Mutant]:
    """A mutant for every synchronisation, dropped."""
    for line, text in statements(ptx, SYNCHRONISATIONS):
        yield Mutant(kind="drop", lines=(line,), statement=text, ptx=without(ptx, line))


def weakenings(ptx: str) -> Iterator[Mutant]:
    """A mutant for every wait that leaves one more group in flight."""
    for line, text in statements(ptx, WEAKENED):
        looser = re.sub(r"(\d+);", lambda m: f"{int(m[1]) + 1};", ptx.splitlines()[line - 1], count=1)
        if looser != ptx.splitlines()[line - 1]:
            yield Mutant(kind="weaken", lines=(line,), statement=text, ptx=_changed(ptx, line, looser))


def shifts(ptx: str) -> Iterator[Mutant]:
    """For every kind of indexed access, its first and last statement moved by 16 bytes."""
    for opcode in INDEXED:
        found = [row for row in statements(ptx, (opcode,)) if _ADDRESS.search(row[1])]
        for line, text in dict.fromkeys([*found[:1], *found[-1:]]):
            moved = _ADDRESS.sub(lambda m: f"[{m[1]}+{int(m[2] or 0) + 16}]", ptx.splitlines()[line - 1], count=1)
            yield Mutant(kind="shift", lines=(line,), statement=text, ptx=_changed(ptx, line, moved))


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
                yield Mutant(kind=kind, lines=(number,), statement=line.strip(), ptx=_changed(ptx, number, text))


def found_in(result: emulator.Result) -> frozenset[tuple[str, int, int]]:
    """What a run found, as (kind, line, other line)."""
    return frozenset((finding.kind, finding.line, finding.other_line) for finding in result.findings)


def covering(trial: Trial, survivors: list[Mutant]) -> dict[int, int]:
    """Survivors that are redundant: line -> the line that covers it.

    Dropping both is caught, and one of these holds, tried in this order. Either of two survivors is
    enough. Without the cover, the survivor's absence shows a race that the cover's absence alone
    does not show. Or the cover is the nearest needed synchronisation before it (for a warp barrier,
    after it): a barrier behind a wait that already ends every access of the whole warp group, or one
    that the compiler or its author put there to keep loads in place, orders nothing that is left.
    """
    covered: dict[int, int] = {}
    alone = {mutant.lines[0] for mutant in survivors}
    for one, two in combinations(survivors, 2):
        if isinstance(trial.fate(_pair(trial.ptx, one.lines[0], two.lines[0])), Killed):
            covered.setdefault(one.lines[0], two.lines[0])
            covered.setdefault(two.lines[0], one.lines[0])
    needed = [line for line, _ in statements(trial.ptx, SYNCHRONISATIONS) if line not in alone]
    bare = {line: trial.races(without(trial.ptx, line)) for line in needed} if alone - set(covered) else {}
    for mutant in survivors:
        line = mutant.lines[0]
        shown = (other for other in needed if trial.races(without(trial.ptx, line, other)) - bare[other])
        cover = covered.get(line) or next(shown, None) or _nearest(mutant, needed)
        if cover is not None and isinstance(trial.fate(_pair(trial.ptx, line, cover)), Killed):
            covered[line] = cover
    return covered


def _nearest(mutant: Mutant, needed: list[int]) -> int | None:
    """The needed synchronisation that stands closest: after a warp barrier, before anything else; loops wrap round."""
    line = mutant.lines[0]
    if mutant.statement.startswith("bar.warp.sync"):
        return next((other for other in needed if other > line), needed[-1] if needed else None)
    before = [other for other in needed if other < line]
    return before[-1] if before else (needed[-1] if needed else None)


def _pair(ptx: str, one: int, two: int) -> Mutant:
    return Mutant(kind="drop pair", lines=(one, two), statement="", ptx=without(ptx, one, two))
