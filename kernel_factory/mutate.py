"""Mutate: break a kernel's PTX on purpose, and see whether validation notices.

A mutant drops or weakens one synchronisation, shifts one index, or changes one swizzle or descriptor constant. It is
killed when a check reports a finding or the numbers leave the bars. Survivors are told apart (``Fate``); only a
dropped or weakened synchronisation can be excused, by what the race checker says of it:

- *redundant*: others, dropped, leave something to order, and this one ordered it. Without those and this one, more
  accesses race than without those alone. (That both together are caught would say nothing where the others alone are.)
- *equivalent*: it orders no two accesses of the whole run: nothing more is found without it, whether nothing else is
  dropped, any one other, all of any kind, or as many as the kernel reaches its end without.

``Trial`` knows nothing of families: anything that can run a PTX text in a mode and say what it
noticed can be mutated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kernel_factory import emulator
from kernel_factory.bench import MODES, Target, Tensors, run_target, within_bars
from kernel_factory.mutants import Mutant, broken, drops, every


@dataclass(frozen=True, kw_only=True)
class Killed:
    """The mode that noticed, and what it said."""

    mode: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Redundant:
    """No mode noticed; without ``covers`` (PTX lines) its absence adds ``shows`` (a finding and its line)."""

    covers: tuple[int, ...]
    shows: str


@dataclass(frozen=True, kw_only=True)
class Equivalent:
    """No mode noticed, and there is nothing to notice."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Survived:
    """No mode noticed, and nothing says why."""


Fate = Killed | Redundant | Equivalent | Survived
FATES: Final = ("killed", "redundant", "equivalent", "survived")

Races = Counter[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A kernel to break. ``attempt(ptx, mode)`` runs a text and says what it noticed, or None.

    ``races(ptx)`` counts what the race checker finds, by kind and line; None where the kernel does not reach its end.
    """

    ptx: str
    attempt: Callable[[str, str], str | None]
    races: Callable[[str], Races | None]
    _known: dict[frozenset[Mutant], Races | None] = field(default_factory=dict)

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

    def fate(self, *mutants: Mutant) -> Killed | Survived:
        """Run the kernel with these mutations in every mode until one notices."""
        text = broken(self.ptx, *mutants)
        for mode in MODES:
            why = self.attempt(text, mode)
            if why is not None:
                return Killed(mode=mode, why=why)
        return Survived()

    def found(self, *mutants: Mutant) -> Races | None:
        """The races of the kernel with these mutations; each set of them runs once."""
        key = frozenset(mutants)
        if key not in self._known:
            self._known[key] = self.races(broken(self.ptx, *mutants))
        return self._known[key]


def found_in(result: emulator.Result) -> Races | None:
    """What a whole run found: how often, by kind and line."""
    if not result.complete:
        return None
    races: Races = Counter()
    for finding in result.findings:
        races[finding.kind, finding.line] += finding.count
    return races


def suite(trial: Trial, heard: Callable[[Mutant, Fate], None] = lambda mutant, fate: None) -> list[tuple[Mutant, Fate]]:
    """Every mutant of a trial with its fate.

    ``heard`` is told each fate once it is known: kills as they come, the rest at the end.
    """
    fates: list[tuple[Mutant, Fate]] = []
    for mutant in every(trial.ptx):
        fates.append((mutant, trial.fate(mutant)))
        if isinstance(fates[-1][1], Killed):
            heard(*fates[-1])
    survivors = [mutant for mutant, fate in fates if isinstance(fate, Survived)]
    excused = excuses(trial, survivors)
    told = [(mutant, excused.get(mutant, fate)) for mutant, fate in fates]
    for mutant, fate in told:
        if not isinstance(fate, Killed):
            heard(mutant, fate)
    return told


def excuses(trial: Trial, survivors: list[Mutant]) -> dict[Mutant, Fate]:
    """Why nothing notices each survivor; Survived where nothing says why."""
    alone = {mutant.line for mutant in survivors}
    others = [other for other in drops(trial.ptx) if trial.found(other) is not None]
    others.sort(key=lambda other: other.line not in alone)  # one that survives too is the plainest cover
    most: list[Mutant] = []
    for other in others if survivors else []:
        most += [other] if trial.found(*most, other) is not None else []
    return {
        mutant: _excuse(trial, mutant, others, most) if mutant.kind in ("drop", "weaken") else Survived()
        for mutant in survivors
    }


def _excuse(trial: Trial, mutant: Mutant, others: list[Mutant], most: list[Mutant]) -> Fate:
    others, most = ([other for other in some if other.line != mutant.line] for some in (others, most))
    for cover in [*_covers(mutant, others), most]:
        if shows(trial, mutant, cover):
            least = _least(trial, mutant, cover)
            return Redundant(covers=tuple(sorted(c.line for c in least)), shows=shows(trial, mutant, least))
    if not most or trial.found(mutant, *most) is None or trial.found(*most) is None:
        return Survived()
    return Equivalent(why=f"adds no finding without any one other, any kind of them, or {len(most)} of them together")


def _covers(mutant: Mutant, others: list[Mutant]) -> Iterator[list[Mutant]]:
    """What may stand in for a synchronisation: any one other, a kind of them, its own kind and another."""
    yield from ([other] for other in others)
    kinds = dict.fromkeys(_opcode(other) for other in others)
    for pair in [*((kind,) for kind in kinds), *((kind, _opcode(mutant)) for kind in kinds)]:
        yield [other for other in others if _opcode(other) in pair]


def shows(trial: Trial, mutant: Mutant, cover: list[Mutant]) -> str:
    """A finding that ``mutant`` adds to those of a kernel without ``cover``, or an empty string."""
    without = trial.found(*cover)
    both = trial.found(mutant, *cover)
    if without is None or both is None:
        return ""
    added = both - without
    return "{} at line {}".format(*min(added)) if added else ""


def _least(trial: Trial, mutant: Mutant, cover: list[Mutant]) -> list[Mutant]:
    """The cover without those that it does not need."""
    for other in list(cover):
        fewer = [each for each in cover if each is not other]
        if shows(trial, mutant, fewer):
            cover = fewer
    return cover


def _opcode(mutant: Mutant) -> str:
    return mutant.statement.split()[0 if not mutant.statement.startswith("@") else 1]
