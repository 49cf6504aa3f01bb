"""Watching: run something again whenever a folder's files change, in a child that imports them afresh.

The parent has the slow imports (torch, the emulator) behind it and imports no family, so that a child begins where
the author's own files do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

PAUSE = 0.2  # seconds between looks


def watch(folder: Path, run: Callable[[], None]) -> None:
    """Run now and at every change of a file in ``folder``, until interrupted. Errors are shown, not raised."""
    if not folder.is_dir():
        raise click.ClickException(f"{folder}: expected a family's folder; `kf new` makes one")
    before = None
    try:
        while True:
            now = _stamp(folder)
            if now != before:
                before = now
                start = time.perf_counter()
                right = in_child(run)
                click.echo(
                    f"{'right' if right else 'wrong'} after {time.perf_counter() - start:.1f} s; watching {folder}"
                )
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        click.echo("stopped")


def _stamp(folder: Path) -> dict[str, int]:
    """The files of a folder and when each was last written; editors' own files aside."""
    names = [path for path in folder.iterdir() if path.suffix in (".py", ".toml") and not path.name.startswith(".")]
    return {path.name: path.stat().st_mtime_ns for path in names if path.exists()}


def in_child(run: Callable[[], None]) -> bool:
    """Whether ``run`` ends well in a forked child."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except click.ClickException as error:
            error.show()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException as error:  # a syntax error in a file that is being written, for one
            click.echo(f"{type(error).__name__}: {error}")
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0
