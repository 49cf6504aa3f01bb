"""``kf run``: one cell, for its author."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from kf_runtime.cell import Cell
from kf_runtime.errors import CellKeyError
from rich.console import Console
from rich.text import Text

from kernel_factory import capture, inspect, jit_trial, pipeline, source_lines, trial_view, watching
from kernel_factory.workspace import find

console = Console(width=None if Console().is_terminal else 180)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was asked for."""

    family: str
    key: str
    jit: bool
    html: Path | None

    def __call__(self) -> None:
        """Run, show, exit 1 where the cell is wrong or would be rejected. Raises ClickException where it cannot run."""
        try:
            cell = Cell.parse(self.key)
            launches = pipeline.try_cell(find(), self.family, cell)
            called = pipeline.try_jit(find(), self.family, cell) if self.jit else None
        except (*pipeline.CLEAR, jit_trial.JitTrialError, CellKeyError, ValueError, OSError) as error:
            raise click.ClickException(f"{error}{self._hint(error)}") from error
        title = f"{self.family}: {cell}"
        if called is not None:
            console.print(_told(called))
        trial_view.show(console, title, launches)
        if self.html is not None:
            try:
                trial_view.save_html(self.html, title, launches)
            except OSError as error:
                raise click.ClickException(f"--html: {error}") from error
        if not all(launch.admissible for launch in launches) or (called is not None and not called.right):
            raise SystemExit(1)

    def _hint(self, error: Exception) -> str:
        """Where to look in the sources, for errors that know no line."""
        if not isinstance(error, (capture.CaptureError, inspect.InspectError)) or "shared memory" not in str(error):
            return ""
        places = ", ".join(source_lines.shared_memory(find().families / self.family))
        return f"\n(shared memory is asked for at {places})"


def _told(called: jit_trial.JitTrial) -> Text:
    bits = "the cubin's bits" if called.right else f"{called.different} elements differ from the cubin's"
    return Text(f"JIT form: {bits}; error against the oracle {called.oracle_norm:.2e}", "" if called.right else "red")


@click.command("run")
@click.argument("family")
@click.option("--cell", "key", required=True, help="The cell's key; it need not be in cells.toml.")
@click.option("--jit", is_flag=True, help="Also call it through kf_runtime in its JIT form, and compare bits.")
@click.option("--watch", is_flag=True, help="Run again whenever a file of the family is saved; Ctrl-C ends it.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Also write a page.")
def run_command(family: str, key: str, jit: bool, watch: bool, html: Path | None) -> None:
    """Run one cell on the emulator and show what it did; exit 1 where it is wrong or the policy would reject it."""
    run = Run(family=family, key=key, jit=jit, html=html)
    if watch:
        watching.watch(find().families / family, run)
    else:
        run()
