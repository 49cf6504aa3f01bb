"""A campaign on a real Dask cluster on loopback: a worker killed in the middle loses nothing and repeats nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest

from kernel_factory import executors
from kernel_factory.executors import DaskExecutor, ExecutorError
from tests.e2e.conftest import ROOT

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

CELL = "/B1.N64.C64.D64/outgoing/*mask/"  # two cells that share kernels


def _cluster(workers: int) -> distributed.LocalCluster:
    return distributed.LocalCluster(
        processes=True, n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[distributed.LocalCluster]:
    """Two worker processes, whose nanny starts a dead one again."""
    with _cluster(2) as running:
        yield running


def _pids(cluster: distributed.LocalCluster) -> list[int]:
    return [worker.process.pid for worker in cluster.workers.values() if worker.process and worker.process.pid]


def _kf(cluster: distributed.LocalCluster, store: Path, command: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "KF_STORE": str(store),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime"))),
    }
    where = cluster.scheduler_address.replace("tcp", "dask")
    arguments = [command, "--sm", "sm_90a", "--cell", CELL, "--executor", where, "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "kernel_factory.cli", *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    answer: dict[str, int] = json.loads(out.splitlines()[-1])
    return answer


def _locked(store: Path, kind: str) -> bool:
    return any((store / "records" / kind).glob("*.lock"))


class Writes:
    """Every file that was a record of a kind while this watched: a record written twice has two inodes."""

    def __init__(self, store: Path, kind: str) -> None:
        self.seen: dict[str, set[int]] = {}
        self._folder, self._over = store / "records" / kind, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._over.wait(0.005):
            for path in self._folder.glob("*.json"):
                self.seen.setdefault(path.name, set()).add(path.stat().st_ino)

    def __enter__(self) -> Writes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.1)
        self._over.set()
        self._thread.join()


def _kill_one_at_work(cluster: distributed.LocalCluster, at_work: Callable[[psutil.Process], bool]) -> None:
    """SIGKILL to the first worker that is seen at work."""
    for _ in range(3000):
        for pid in _pids(cluster):
            if at_work(psutil.Process(pid)):
                psutil.Process(pid).kill()
                return
        time.sleep(0.02)
    raise AssertionError("no worker was seen at work within a minute")


def test_killed_workers_lose_nothing(cluster: distributed.LocalCluster, tmp_path: Path) -> None:
    """`kf build` and `kf validate` with a worker killed in each: they end well, each record is written once,
    and the next campaign has nothing to do."""
    with Writes(tmp_path, "artifact") as artifacts:
        build = _kf(cluster, tmp_path, "build")
        _kill_one_at_work(cluster, lambda worker: bool(worker.children()))  # its compiler is running
        answer = _answer(build)
    assert answer["cells"] == 2
    assert answer["compiled"] <= answer["kernels"] == len(artifacts.seen) == 4
    assert {len(inodes) for inodes in artifacts.seen.values()} == {1}

    with Writes(tmp_path, "proof") as proofs:
        validate = _kf(cluster, tmp_path, "validate")
        _kill_one_at_work(cluster, lambda worker: _locked(tmp_path, "proof") and worker.cpu_percent(0.3) > 20)
        answer = _answer(validate)
    assert (answer["cells"], answer["findings"]) == (2, 0)
    assert answer["ran"] <= answer["runs"] == len(proofs.seen) == 2
    assert {len(inodes) for inodes in proofs.seen.values()} == {1}

    assert _answer(_kf(cluster, tmp_path, "build"))["compiled"] == 0
    assert _answer(_kf(cluster, tmp_path, "validate"))["ran"] == 0
    assert not list(tmp_path.glob("campaign-*"))


def _die() -> None:
    os.kill(os.getpid(), 9)


def test_task_that_kills_its_workers_is_an_error(cluster: distributed.LocalCluster, tmp_path: Path) -> None:
    """Dask gives a task up after `allowed-failures` workers died of it; the error counts them and says what next."""
    address = cluster.scheduler_address.removeprefix("tcp://")
    with (
        pytest.raises(ExecutorError, match=r"4 workers died .* what is done is kept"),
        DaskExecutor(address, tmp_path) as pool,
    ):
        pool.submit(_die).result(timeout=120)


def test_cluster_without_workers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks do not wait for workers that never come."""
    monkeypatch.setattr(executors, "ALONE_S", 2)
    with (
        _cluster(0) as empty,
        pytest.raises(ExecutorError, match="no worker for 2 s"),
        DaskExecutor(empty.scheduler_address.removeprefix("tcp://"), tmp_path) as pool,
    ):
        future: Future[str] = pool.submit(str, "never")
        future.result(timeout=60)


def test_lost_scheduler_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler killed under a running task: an error, not a wait."""
    monkeypatch.setattr(executors, "ALONE_S", 2)
    scheduler = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert scheduler.stderr is not None
    address = next(line.split("tcp://")[1].strip() for line in scheduler.stderr if "Scheduler at:" in line)
    try:
        with pytest.raises(ExecutorError, match=r"dask://127\.0\.0\.1"), DaskExecutor(address, tmp_path) as pool:
            future: Future[str] = pool.submit(str, "never")
            scheduler.kill()
            future.result(timeout=60)
    finally:
        scheduler.kill()
        scheduler.wait()
