"""Survivors told apart: what another synchronisation covers, what orders nothing, and what nothing explains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kernel_factory import mutants, mutate
from kernel_factory.mutate import Equivalent, Killed, Redundant, Survived, Trial

PTX = """\
\tbar.sync \t0;
\tbar.sync \t1;
\tbar.sync \t2;
\tbar.warp.sync \t-1;
\tmbarrier.arrive.shared.b64 %rd1, [%r1];
\tld.shared.b32 %r1, [%r2];
"""


def trial(*pairs: tuple[set[int], ...], stops: int = 0) -> Trial:
    """A kernel whose access number i is ordered as long as all lines of one of the sets in ``pairs[i]`` are there.

    Without the line ``stops`` it does not reach its end.
    """

    def races(text: str) -> mutate.Races | None:
        gone = {i for i, line in enumerate(text.splitlines(), start=1) if not line}
        if stops in gone:
            return None
        return Counter({("race", 100 + i): 1 for i, ways in enumerate(pairs) if all(way & gone for way in ways)})

    def attempt(text: str, mode: str) -> str | None:
        found = races(text)
        return "deadlock" if found is None else "race" if mode == "race" and found else None

    return Trial(ptx=PTX, attempt=attempt, races=races)


def fates(made: Trial) -> dict[int, mutate.Fate]:
    return {mutant.line: fate for mutant, fate in mutate.suite(made) if mutant.kind == "drop"}


def test_a_synchronisation_that_alone_orders_something_is_killed() -> None:
    """By the mode that notices."""
    assert fates(trial(({1},)))[1] == Killed(mode="race", why="race")


def test_two_that_order_the_same_cover_each_other() -> None:
    """Either may go, both may not."""
    found = fates(trial(({1}, {2})))
    assert found[1] == Redundant(covers=(2,), shows="race at line 100")
    assert found[2] == Redundant(covers=(1,), shows="race at line 100")


def test_a_needed_neighbour_is_no_cover() -> None:
    """Dropping both is caught, but so is the neighbour alone: that says nothing about the survivor."""
    made = trial(({1},))
    first, second, *_ = mutants.drops(PTX)
    assert isinstance(made.fate(first, second), Killed)
    assert isinstance(fates(made)[2], Equivalent)


def test_a_killed_one_covers_what_its_absence_alone_does_not_show() -> None:
    """Line 1 orders two accesses, line 2 the second of them again."""
    found = fates(trial(({1},), ({1}, {2})))
    assert isinstance(found[1], Killed)
    assert found[2] == Redundant(covers=(1,), shows="race at line 101")


def test_the_smallest_cover_is_named() -> None:
    """Three that order the same: two of them must go before the third matters."""
    assert fates(trial(({1}, {2}, {3})))[1] == Redundant(covers=(2, 3), shows="race at line 100")


def test_a_chain_is_covered_where_its_other_links_are_left() -> None:
    """Lines 1 and 4 together order what line 2 orders: without line 2, both links are missed."""
    found = fates(trial(({1, 4}, {2})))
    assert {line: fate.covers for line, fate in found.items() if isinstance(fate, Redundant)} == {
        1: (2,),
        2: (1,),
        4: (2,),
    }


def test_one_that_stops_the_kernel_covers_nothing() -> None:
    """A kernel that hangs without a line has not shown its races: line 5 cannot speak for line 1."""
    pairs = (({5},), ({5}, {1}))
    assert fates(trial(*pairs))[1] == Redundant(covers=(5,), shows="race at line 101")
    assert isinstance(fates(trial(*pairs, stops=5))[1], Equivalent)


def test_where_nothing_else_can_go_a_survivor_stays_one() -> None:
    """A kernel that stops without any second line shows nothing of what the first one is for."""
    whole = trial()
    made = replace(whole, races=lambda text: whole.races(text) if text.splitlines().count("") < 2 else None)
    first = next(mutants.drops(PTX))
    assert mutate.excuses(made, [first]) == {first: Survived()}


@pytest.mark.parametrize("kind", ["shift", "parity"])
def test_only_synchronisation_is_excused(kind: str) -> None:
    """A shifted index or another constant that nothing notices has survived."""
    mutant = mutants.Mutant(kind=kind, line=6, statement="")
    assert mutate.excuses(trial(), [mutant]) == {mutant: Survived()}


def test_mutations_keep_line_numbers() -> None:
    """Two at once change their own two lines and no other."""
    first, second, *_ = mutants.drops(PTX)
    assert mutants.broken(PTX, first, second).splitlines() == ["", "", *PTX.splitlines()[2:]]


@pytest.mark.parametrize(
    ("wait", "passed"),
    [
        ("\tmbarrier.try_wait.parity.shared.b64 P1, [%r86], %r319, 10000000; ", "mov.pred P1, -1;"),
        ("\tmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p82, [%r84+64], %r319;", "mov.pred %p82, -1;"),
        ("\tmbarrier.test_wait.shared.b64 %p1, [%r1], %rd2;", "mov.pred %p1, -1;"),
    ],
)
def test_a_dropped_wait_passes_at_once(wait: str, passed: str) -> None:
    """Its predicate is true: a loop around it ends, and what peeked goes on."""
    (mutant,) = mutants.drops(wait)
    assert (mutant.kind, mutant.text.strip()) == ("drop", passed)
