"""``kf``: the command line. Reads options, calls the pipeline, prints."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kernel_factory import (
    cli_run,
    compile,
    executors,
    package,
    pipeline,
    report,
    scaffold,
)
from kernel_factory import mutate as mutation
from kernel_factory import validate as validate_stage
from kernel_factory.admit import Admitted, Rejected
from kernel_factory.pipeline import Selection
from kernel_factory.store import write_atomically
from kernel_factory.workspace import find

console = cli_run.console
_CLEAR = (
    *pipeline.CLEAR,
    executors.ExecutorError,
    package.PackageError,
    validate_stage.NotProved,
    validate_stage.Unrunnable,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every stage is told: filters, parallelism, and the form of its answer."""

    families: tuple[str, ...]
    sms: tuple[str, ...]
    patterns: tuple[str, ...]
    jobs: int
    as_json: bool

    @property
    def selection(self) -> Selection:
        return pipeline.select(find(), self.families, self.sms, self.patterns)

    def say(self, data: dict[str, Any], text: str) -> None:
        """Print the data, or the text filled from it."""
        click.echo(json.dumps(data) if self.as_json else text.format(**data))


def _stage(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options as one ``Options``, and turn a stage's own errors into clear ones."""

    def command(
        families: tuple[str, ...], sms: tuple[str, ...], patterns: tuple[str, ...], jobs: int, as_json: bool, **own: Any
    ) -> None:
        options = Options(families=families, sms=sms, patterns=patterns, jobs=jobs, as_json=as_json)
        try:
            function(options, **own)
        except _CLEAR as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            told = f"{error}; what was done is kept: mend this, then run the command again"
            raise click.ClickException(told) from error

    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print data instead of text."),
        click.option("-j", "--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes at once."),
        click.option("--cell", "patterns", multiple=True, help="Only keys that hold this text or glob; repeatable."),
        click.option("--sm", "sms", multiple=True, help="Only this SM; repeatable."),
        click.option("--family", "families", multiple=True, help="Only this family; repeatable."),
    ):
        command = option(command)
    return command


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal; silence elsewhere."""
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda *_: bar.advance(task)


@click.group()
def main() -> None:
    """Build, prove, admit and package kernels, on a machine without a GPU."""


@main.command()
@_stage
def cells(options: Options) -> None:
    """List the cells that the families cover."""
    rows = [{"family": family.name, "cell": cell.key} for family, cell in options.selection.rows]
    click.echo(json.dumps(rows) if options.as_json else "\n".join(f"{r['family']}  {r['cell']}" for r in rows))


_executor = click.option("--executor", "where", default=executors.LOCAL, help=f"{executors.FORM} instead of -j.")


@main.command()
@_executor
@_stage
def build(options: Options, where: str) -> None:
    """Compile every kernel of the cells and capture every launch."""
    selection = options.selection
    specs = selection.specs()
    fresh: list[bool] = []
    with _bar("compile", len(specs)) as step, _bar("capture", len(selection.rows)) as captured:

        def compiled(_: Any, new: bool) -> None:
            fresh.append(new)
            step()

        with executors.choose(where, ThreadPoolExecutor(options.jobs), selection.workspace.store_root) as pool:
            pipeline.build(selection, pool, compiled, captured)
    data = {"cells": len(selection.rows), "kernels": len(specs), "compiled": sum(fresh)}
    options.say(data, "{cells} cells from {kernels} kernels; {compiled} compiled now")


@main.command()
@click.option("--seed", type=click.IntRange(0), default=0, help="Re-roll inputs and schedules; 0 is the recorded run.")
@click.option("--mutate", is_flag=True, help="Break the kernels on purpose instead, and see whether it is noticed.")
@click.option("--second-opinion", is_flag=True, help="Ask sentryward, a static verifier, instead.")
@_executor
@_stage
def validate(options: Options, seed: int, mutate: bool, second_opinion: bool, where: str) -> None:
    """Prove every cell on the emulator."""
    selection = options.selection
    if second_opinion:
        _second_opinion(options, selection)
        return
    if mutate:
        _mutate(options, selection)
        return
    ran: list[int] = []
    runs: list[int] = []
    tasks = pipeline.proof_tasks(selection, seed)
    workers = ProcessPoolExecutor(options.jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_DFL))
    pool = executors.choose(where, workers, selection.workspace.store_root)  # Ctrl-C: one word, not one trace a worker
    with _bar("prove", len(tasks)) as step, pool:

        def proved(task: Any, fresh: int) -> None:
            ran.append(fresh)
            runs.append(len(task.parts))
            step()

        found = pipeline.prove(selection, pool, seed, proved)
    findings = [text for evidence in found for texts in evidence.findings.values() for text in texts]
    data = {"cells": len(found), "runs": sum(runs), "ran": sum(ran), "findings": len(findings)}
    options.say(data, "{cells} cells share {runs} emulated runs; {ran} ran now; {findings} findings")
    if findings and not options.as_json:
        click.echo("\n".join(findings[:5]))


def _second_opinion(options: Options, selection: Selection) -> None:
    """Ask about every distinct kernel; exit 1 where a fault is found, not where it gives up."""
    opinions = []
    for name, opinion in pipeline.second_opinions(selection):
        opinions.append({"kernel": name, **vars(opinion)})
        if not options.as_json:
            click.echo(f"{opinion.result:15} {name}  {'; '.join(opinion.said)[:100]}")
        if opinion.objects:
            raise SystemExit(1)
    if options.as_json:
        click.echo(json.dumps(opinions))


def _mutate(options: Options, selection: Selection) -> None:
    """Run the mutation suite over every distinct kernel; exit 1 where a mutant survives unexcused."""
    rows = []
    for name, trial in pipeline.trials(selection):
        if not options.as_json:
            click.echo(name)
        for mutant, fate in mutation.suite(trial):
            kind = type(fate).__name__.lower()
            rows.append({"kernel": name, "mutant": mutant.kind, "line": mutant.line, "fate": kind, **vars(fate)})
            if not options.as_json:
                told = ", ".join(f"{k} {v}" for k, v in vars(fate).items())
                click.echo(f"  {kind:10} {mutant.kind:10} line {mutant.line:5} {mutant.statement[:60]}  {told}")
    counts = {kind: sum(row["fate"] == kind for row in rows) for kind in mutation.FATES}
    if options.as_json:
        click.echo(json.dumps({**counts, "mutants": rows}))
    else:
        click.echo(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if counts["survived"]:
        raise SystemExit(1)


@main.command()
@click.option(
    "--device",
    "files",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    help="Take this device evidence in.",
)
@click.option("--check", is_flag=True, help="Fail where the committed evidence or lists differ.")
@_stage
def admit(options: Options, files: tuple[Path, ...], check: bool) -> None:
    """Judge the evidence by the policy and write the allow-lists."""
    selection = options.selection
    pipeline.take_in(selection.workspace, files)
    result = pipeline.admit(selection)
    rejected = {e.cell.key: list(v.reasons) for e, v in result.verdicts if isinstance(v, Rejected)}
    declined = {e.cell.key: list(v.declined) for e, v in result.verdicts if isinstance(v, Admitted) and v.declined}
    admitted = len(result.verdicts) - len(rejected)
    data = {
        "cells": len(result.verdicts),
        "admitted": admitted,
        "float32_parameters": admitted - len(declined),
        "float32_parameters_declined": declined,
        "rejected": rejected,
        "changed_evidence": result.changed_evidence,
        "changed_lists": result.changed_lists,
    }
    options.say(data, "{admitted} of {cells} cells admitted, {float32_parameters} with float32 parameters too")
    if not options.as_json:
        for key, reasons in declined.items():
            click.echo(f"BF16 parameters alone {key}\n  " + "\n  ".join(reasons))
        for key, reasons in rejected.items():
            click.echo(f"rejected {key}\n  " + "\n  ".join(reasons))
        for key in result.changed_evidence:
            click.echo(f"evidence differs from the committed: {key}")
    if rejected or (check and (result.changed_evidence or result.changed_lists)):
        raise SystemExit(1)


@main.command("package")
@_stage
def package_command(options: Options) -> None:
    """Put the admitted cells into the wheel's data folder."""
    selection = options.selection
    packaged = pipeline.pack(selection)
    if not (options.families or options.sms or options.patterns):
        write_atomically(selection.workspace.lock, pipeline.lock_bytes(selection))
    text = "{cells} cells, {cubins} cubins of {cubin_bytes} bytes, a manifest of {manifest_bytes} bytes"
    options.say(asdict(packaged), text)


@main.command("inspect")
@_stage
def inspect_command(options: Options) -> None:
    """Print what the cubins of the cells say of themselves."""
    built = pipeline.built_cells(options.selection)
    if options.as_json:
        click.echo(json.dumps([{"cell": b.cell.key, "facts": [f.to_json() for f in b.facts]} for b in built]))
        return
    table = Table("kernel", "SM", "registers", "stack", "shared", "threads", "code")
    rows = {
        (a.spec.key, a.sm): (f.registers, f.stack_bytes, f.static_shared + f.dynamic_shared, f.threads, f.code_bytes)
        for b in built
        for a, f in zip(b.artifacts, b.facts, strict=True)
    }
    for (kernel, sm), figures in sorted(rows.items()):
        table.add_row(kernel, sm, *map(str, figures))
    console.print(table)


@main.command()
@_stage
def verify(options: Options) -> None:
    """Rebuild every cubin from nothing and compare its hash with cubins.lock."""
    selection = options.selection
    try:
        rows = json.loads(selection.workspace.lock.read_text())
        locked = {(row["kernel"], row["sm"]): row["cubin"] for row in rows}
    except (ValueError, KeyError, TypeError) as error:
        told = f"{selection.workspace.lock}: expected the rows that `kf package` writes; found {error}; restore it"
        raise click.ClickException(told) from error
    with tempfile.TemporaryDirectory(prefix="kf-verify-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        specs = selection.specs()
        with _bar("rebuild", len(specs)) as step:
            artifacts = compile.compile_all(Path(folder), specs, pool, step)
    wrong = [
        f"{a.spec.key} for {a.sm}: cubins.lock has {locked.get((a.spec.key, a.sm), 'nothing')}; rebuilt {a.cubin}"
        for a in artifacts
        if locked.get((a.spec.key, a.sm)) != a.cubin
    ]
    options.say({"rebuilt": len(artifacts), "different": wrong}, "{rebuilt} cubins rebuilt")
    if wrong:
        raise click.ClickException("\n".join(wrong))


@main.command("report")
@_stage
def report_command(options: Options) -> None:
    """Print per SM what was admitted, and the worst figures. Every figure here is the emulator's."""
    selection = options.selection
    pairs = pipeline.emulated(selection)
    verdicts = pipeline.judge(selection.workspace, pairs)
    judged = [
        report.Judged(built=built, evidence=evidence, verdict=verdict)
        for (built, _), (evidence, verdict) in zip(pairs, verdicts, strict=True)
    ]
    sizes = {a.cubin: len(selection.workspace.store.blob(a.cubin)) for built, _ in pairs for a in built.artifacts}
    rows = report.summarise(judged, sizes)
    if options.as_json:
        click.echo(json.dumps([asdict(row) for row in rows]))
        return
    table = Table(
        "SM",
        "admitted",
        "worst error",
        "worst row",
        "traffic",
        "most re-read",
        "wavefronts",
        "spills",
        "registers",
        "cubins",
        "KB",
    )
    for row in rows:
        table.add_row(
            row.sm,
            f"{row.admitted}/{row.cells}",
            f"{row.worst_error:.2e} ({row.worst_error_set})",
            f"{row.worst_row:.2e}",
            ", ".join(f"{kernel} {ratio:.3f}" for kernel, ratio in row.traffic.items()),
            f"{row.rereads.kernel} {row.rereads.operand} x{row.rereads.times:.1f} (N={row.rereads.n})",
            f"{row.wavefronts:.3f}",
            str(row.spilled),
            str(row.registers),
            str(row.cubins),
            f"{row.cubin_bytes / 1024:.0f}",
        )
    console.print(table)
    console.print(
        "traffic: sectors requested over distinct sectors within the blocks that ran, parameters aside. "
        "re-read: a contraction reads each operand once per tile across the other, ceil(N / tile) times."
    )


@main.command()
@click.argument("name")
@click.option("--op", required=True, help=f"The op that it serves: {', '.join(scaffold.ops())}.")
def new(name: str, op: str) -> None:
    """Start a family: one folder that builds, proves and is admitted as it stands."""
    try:
        folder = scaffold.create(find().families, name, op)
    except (scaffold.ScaffoldError, *pipeline.CLEAR) as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"{folder}: read kernel.py, then\n"
        f"  kf cells --family {name}\n"
        f"  kf run {name} --cell KEY\n"
        f"  kf build --family {name} && kf validate --family {name} && kf admit --family {name}"
    )


main.add_command(cli_run.run_command)

if __name__ == "__main__":
    main()
