"""``python -m tests.conformance.report [-k WORD] [--package NAME]``: run the foreign kernels, print what came of each.

Per package: kernels run, right, wrong, findings, unsupported opcodes by name, and kernels that did not compile.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from .cases import Case, attempt

SOURCES = ("cuda", "triton", "liger", "quack")
_PAST_THE_END = (
    "lanes past the last column multiply a weight register that no load has filled; the product is not stored"
)
EXPLAINED = {"rmsnorm-odd-sm_90a": _PAST_THE_END, "layernorm-odd-sm_90a": _PAST_THE_END}


def collect(packages: tuple[str, ...] = SOURCES) -> tuple[list[Case], dict[str, str]]:
    """The cases of every source that is installed, and why the others are not."""
    import importlib

    found, missing = [], {}
    for name in packages:
        try:
            found += importlib.import_module(f".{name}_cases", __package__).cases()
        except ImportError as error:
            missing[name] = f"{error}; pip install -e '.[conformance]'"
    return found, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="run only cases whose name holds this word")
    parser.add_argument("--package", default="", help="one of " + ", ".join(SOURCES))
    options = parser.parse_args()
    cases, missing = collect((options.package,) if options.package else SOURCES)
    totals: dict[str, Counter] = {}
    for case in cases:
        if options.k in case.name:
            began = time.perf_counter()
            outcome = attempt(case)
            totals.setdefault(case.package, Counter())[outcome.verdict] += 1
            print(f"{outcome.verdict:12}{case.package:8}{case.name:40}{time.perf_counter() - began:6.1f} s", flush=True)
            if not outcome.ok:
                print("    " + outcome.detail.replace("\n", "\n    "), flush=True)
                if case.name in EXPLAINED:
                    print("    explained: " + EXPLAINED[case.name], flush=True)
    for package, reason in missing.items():
        print(f"{package}: not run: {reason}")
    for package, counts in totals.items():
        words = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
        print(f"{package}: {sum(counts.values())} kernels: {words}")


if __name__ == "__main__":
    main()
