"""``python -m tests.conformance.mutations NAME …``: break foreign kernels on purpose, and see what notices.

Prints every mutant with its fate, then the counts; exit 1 where one survives.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from kernel_factory import mutants, mutate
from kernel_factory.emulator import PtxError, load

from .cases import Case, Launch, _in_mode, run_launch
from .report import collect

BLOCK_LIMIT = 30_000  # a broken kernel may loop for ever; the whole ones execute a few thousand blocks


def trial(launch: Launch) -> mutate.Trial:
    """A foreign kernel, ready to be mutated."""
    launch = replace(launch, block_limit=BLOCK_LIMIT)

    def attempt(text: str, mode: str) -> str | None:
        try:
            kernel = load(text).kernels[launch.kernel]
        except PtxError as error:
            return f"refused: {str(error)[:80]}"
        outcome = _in_mode(kernel, replace(launch, ptx=text), mode)
        return None if outcome.ok else f"{outcome.verdict}: {outcome.detail[:80]}"

    def races(text: str) -> mutate.Races | None:
        kernel = load(text).kernels[launch.kernel]
        return mutate.found_in(run_launch(kernel, replace(launch, ptx=text), "race")[1])

    return mutate.Trial(ptx=launch.ptx, attempt=attempt, races=races)


def run(case: Case) -> dict[str, int]:
    """Every mutant of one case; the counts by fate."""
    made = trial(case.build())
    whole = made.fate()
    if whole != mutate.Survived():
        raise SystemExit(f"{case.name}: the kernel itself is not right: {whole}")
    counts = dict.fromkeys(mutate.FATES, 0)

    def heard(mutant: mutants.Mutant, fate: mutate.Fate) -> None:
        kind = type(fate).__name__.lower()
        counts[kind] += 1
        told = ", ".join(f"{k} {v}" for k, v in vars(fate).items())
        line = f"  {kind:10} {mutant.kind:10} line {mutant.line:5} {mutant.statement[:70]}  {told}"
        print(line, flush=True)

    mutate.suite(made, heard)
    return counts


def main() -> int:
    """Run the named cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="names of cases, whole")
    names = parser.parse_args().names
    cases = {case.name: case for case in collect()[0]}
    survived = 0
    for name in names:
        if name not in cases:
            raise SystemExit(f"{name}: expected a case; `python -m tests.conformance.report -k {name[:4]}` lists them")
        print(name, flush=True)
        counts = run(cases[name])
        survived += counts["survived"]
        print(f"{name}: " + ", ".join(f"{n} {fate}" for fate, n in counts.items()), flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
