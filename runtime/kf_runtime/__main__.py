"""``python -m kf_runtime doctor|list|explain|verify [--json]``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from kf_runtime import dispatch, inspection
from kf_runtime.errors import KfError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 where all is well, 1 where something is wrong, 2 for a bad command line."""
    options = _parser().parse_args(argv)
    try:
        report = options.run(options)
    except KfError as error:
        report = inspection.Report(lines=(f"error: {error}",), data={"error": str(error)}, ok=False)
    print(json.dumps(report.data, indent=2, sort_keys=True) if options.json else "\n".join(report.lines))
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kf_runtime", description="What this wheel runs here, and why.")
    commands = parser.add_subparsers(required=True, metavar="doctor|list|explain|verify")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print data instead of text")
    _add(commands, common, "doctor", "what a user most needs to know on this machine", lambda o: inspection.doctor())
    listing = _add(commands, common, "list", "the admitted cells, with cubins, evidence and products", _list)
    listing.add_argument("--sm", help="only this SM, for example sm_90a")
    _add(commands, common, "verify", "re-hash the manifest and every cubin", lambda o: inspection.verify())
    explain = _add(commands, common, "explain", "the route of one cell, and why", _explain)
    explain.add_argument("cell", nargs="?", help="a cell key; or use the options below")
    explain.add_argument("--shape", help="pair shape B,N,N,C")
    explain.add_argument("--hidden", type=int, help="hidden width D (default: C)")
    explain.add_argument("--direction", default="outgoing", choices=("outgoing", "incoming"))
    explain.add_argument("--no-mask", action="store_true")
    explain.add_argument("--biases", action="store_true", help="the projections carry biases")
    explain.add_argument("--sm", help="default: this machine's")
    return parser


def _add(commands: Any, common: argparse.ArgumentParser, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, parents=[common])
    parser.set_defaults(run=run)
    return parser


def _list(options: argparse.Namespace) -> inspection.Report:
    return inspection.listing(dispatch.current().manifest(), options.sm)


def _explain(options: argparse.Namespace) -> inspection.Report:
    if options.cell:
        return inspection.explain_key(options.cell)
    return inspection.explain_shape(
        options.shape, options.hidden, options.direction, mask=not options.no_mask, biases=options.biases, sm=options.sm
    )


if __name__ == "__main__":
    sys.exit(main())
