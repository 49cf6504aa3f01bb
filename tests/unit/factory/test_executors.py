"""Where tasks run: the local pool by default, a Dask cluster by URL, and a sentence where neither can be had."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_factory import cli, executors
from kernel_factory.executors import ExecutorError, Shared, choose


def test_local_is_the_pool_itself(tmp_path: Path) -> None:
    """The default costs nothing: the very pool comes back."""
    with ThreadPoolExecutor(1) as pool:
        assert choose("local", pool, tmp_path) is pool


@pytest.mark.parametrize("where", ["dask", "dask://", "dask://host", "dask://host:port", "ray://host:1", "host:8786"])
def test_bad_url_is_named(where: str, tmp_path: Path) -> None:
    """The error shows the form that was expected and the text that came."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(ExecutorError, match=r"dask://HOST:PORT; found") as caught:
        choose(where, pool, tmp_path)
    assert repr(where) in str(caught.value)


def test_missing_dask_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra, the error is the pip command."""
    monkeypatch.setitem(sys.modules, "distributed", None)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ExecutorError, match=r"pip install -e '\.\[dask\]'"):
        choose("dask://127.0.0.1:1", pool, tmp_path)


@pytest.mark.built
def test_no_scheduler_is_a_clear_error(built: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command line: exit 1 and one sentence, no traceback."""
    monkeypatch.setattr(executors, "CONNECT_S", 1)
    arguments = ["validate", "--sm", "sm_90a", "--cell", "/B1.N64.C64.D64/incoming/mask/"]
    done = CliRunner().invoke(cli.main, [*arguments, "--executor", "dask://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "Error: --executor dask://127.0.0.1:1: no Dask scheduler answers there" in done.output


def test_unfit_workers_are_refused(tmp_path: Path) -> None:
    """Other sources, another store, several threads: each is said; a fit worker passes."""
    shared = Shared.through(tmp_path)
    shared.require("worker", 1)
    with pytest.raises(ExecutorError, match="same commit"):
        replace(shared, sources="other").require("worker", 1)
    with pytest.raises(ExecutorError, match="one thread; found 4"):
        shared.require("worker", 4)
    shared.beacon.unlink()
    with pytest.raises(ExecutorError, match="all machines mount"):
        shared.require("worker", 1)
