"""Bundles of one SM: write one, compare one with a rebuild, join all into the wheel's data. `make` calls it.

python tools/bundle.py pack    --sm SM [--cell TEXT] --out FOLDER
python tools/bundle.py compare --sm SM [--cell TEXT] BUNDLE
python tools/bundle.py join    --sm SM ... [--cell TEXT] FOLDER
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernel_factory import bundle, pipeline
from kernel_factory.package import PackageError
from kernel_factory.pipeline import NotBuilt, SelectionError
from kernel_factory.provenance import Origin
from kernel_factory.store import StoreError, write_atomically
from kernel_factory.validate import NotProved
from kernel_factory.workspace import find

_CLEAR = (bundle.BundleError, NotBuilt, NotProved, PackageError, SelectionError, StoreError, ValueError)


@click.group()
def main() -> None:
    """Bundles of one SM."""


def _options(function: Callable[..., None]) -> Callable[..., None]:
    cell = click.option("--cell", "patterns", multiple=True, help="Only keys that hold this text or glob.")
    return click.option("--sm", "sms", multiple=True, required=True)(cell(function))


@main.command()
@_options
@click.option("--out", type=click.Path(path_type=Path), required=True)
def pack(sms: tuple[str, ...], patterns: tuple[str, ...], out: Path) -> None:
    """Write FOLDER/<sm>.tar from the store."""
    for sm in sms:
        made = bundle.make(pipeline.select(find(), (), (sm,), patterns), sm, _origin(sm, patterns))
        write_atomically(out / f"{sm}.tar", made.to_bytes())
        click.echo(f"{out / sm}.tar: {len(made.statement['subject'])} cubins, {len(made.files)} files")


@main.command()
@_options
@click.argument("file", type=click.Path(exists=True, path_type=Path))
def compare(sms: tuple[str, ...], patterns: tuple[str, ...], file: Path) -> None:
    """Compare a bundle with what this store holds; exit 1 where a hash differs."""
    given = bundle.read(file)
    if sms != (given.sm,):
        raise click.ClickException(f"--sm: expected {given.sm}, as {file} says; found {', '.join(sms)}")
    found = bundle.differences(given, pipeline.select(find(), (), sms, patterns))
    if found:
        raise click.ClickException("\n".join(found))
    click.echo(f"{given.sm}: {len(given.artifacts)} kernels rebuilt, every cubin and PTX the same")


@main.command()
@_options
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def join(sms: tuple[str, ...], patterns: tuple[str, ...], folder: Path) -> None:
    """Unpack the SMs' bundles and package exactly the admitted cells."""
    packaged = bundle.join(find(), [bundle.read(path) for path in sorted(folder.glob("*.tar"))], sms, patterns)
    click.echo(f"{packaged.cells} cells of {len(sms)} SMs, {packaged.cubins} cubins of {packaged.cubin_bytes} bytes")


def _origin(sm: str, patterns: tuple[str, ...]) -> Origin:
    """This checkout, and the workflow run where there is one."""
    given = os.environ.get
    server = f"{given('GITHUB_SERVER_URL', '')}/"
    run = f"{server}{given('GITHUB_REPOSITORY')}/actions/runs/{given('GITHUB_RUN_ID')}/{given('GITHUB_RUN_ATTEMPT')}"
    hosted = "GITHUB_ACTIONS" in os.environ
    return Origin(
        repository=f"git+{server}{given('GITHUB_REPOSITORY')}" if hosted else "urn:kernel-factory:local-checkout",
        commit=_git("rev-parse", "HEAD"),
        clean=not _git("status", "--porcelain", "--", "kernel_factory", "runtime"),
        builder=f"{server}{given('GITHUB_WORKFLOW_REF')}" if hosted else "urn:kernel-factory:local",
        run=run if hosted else "urn:kernel-factory:local-run",
        command=" ".join(["make", "sm-build", f"SM={sm}", *(f"CELLS={text}" for text in patterns)]),
    )


def _git(*arguments: str) -> str:
    command: list[Any] = ["git", "-C", find().root, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _clear() -> None:
    try:
        main(standalone_mode=False)
    except _CLEAR as error:
        raise SystemExit(f"Error: {error}") from error
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    _clear()
