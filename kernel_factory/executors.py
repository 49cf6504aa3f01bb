"""Executors: where `kf build` and `kf validate` run their tasks: a local pool, or a Dask cluster.

There is no scheduler here. A task is safe to run again, because the store's records commit it and the store's
locks keep two processes off one record; so Dask may give a dead worker's task to another. What this module adds to
Dask's executor is refusal: a worker with other sources, without the store's folder or with several threads raises,
and a cluster that kills a task's workers, or has none left, ends the campaign with a sentence.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kernel_factory import toolchain
from kernel_factory.store import write_atomically

LOCAL: Final = "local"
FORM: Final = "dask://HOST:PORT"
CONNECT_S: Final = 10
ALONE_S: Final = 60  # how long a cluster may have no worker; Dask's nanny restarts one in about two seconds


class ExecutorError(Exception):
    """The executor cannot be had, or its workers cannot do the work."""


def choose(where: str, local: Executor, store_root: Path) -> Executor:
    """``local`` itself, or the cluster that ``where`` names. Raises ExecutorError."""
    if where == LOCAL:
        return local
    scheme, _, address = where.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "dask" or not host or not port.isdigit():
        raise ExecutorError(f"--executor: expected {LOCAL} or {FORM}; found {where!r}")
    return DaskExecutor(address, store_root)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a worker has in common with the process that hands out tasks: sources, toolchain, the store's folder."""

    sources: str
    beacon: Path

    @classmethod
    def through(cls, store_root: Path) -> Shared:
        """These sources, and a file in the store that a worker must see."""
        beacon = store_root / f"campaign-{os.getpid()}-{uuid.uuid4().hex}"
        write_atomically(beacon, b"")
        return cls(sources=_sources(), beacon=beacon)

    def require(self, place: str, threads: int) -> None:
        """Raises ExecutorError where this process is no fit worker."""
        if self.sources != _sources():
            raise ExecutorError(
                f"{place}: its kernel_factory sources or toolchain differ from this checkout's; "
                "give it the same commit and restart it"
            )
        if not self.beacon.exists():
            raise ExecutorError(
                f"{place}: expected the store at {self.beacon.parent}; found none of this campaign there; "
                "put KF_STORE on a file system that all machines mount at one path"
            )
        if threads != 1:
            raise ExecutorError(f"{place}: expected one thread; found {threads}; start it with `--nthreads 1`")


def _sources() -> str:
    return f"{toolchain.sources()} {toolchain.require()}"


def _on_worker(shared: Shared, function: Callable[..., Any], *args: Any) -> Any:
    from distributed import get_worker

    worker = get_worker()
    shared.require(worker.address, worker.state.nthreads)
    return function(*args)


class DaskExecutor(Executor):
    """Dask's own ``Client.get_executor()``, whose failures are an ExecutorError and whose waits end."""

    def __init__(self, address: str, store_root: Path) -> None:
        try:
            from distributed import Client
        except ImportError as error:
            raise ExecutorError(
                f"--executor {FORM}: the package distributed is missing; run `pip install -e '.[dask]'`"
            ) from error
        self._address = address
        try:
            self._client = Client(f"tcp://{address}", timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ExecutorError(
                f"--executor dask://{address}: no Dask scheduler answers there; start one with `dask scheduler`"
            ) from error
        self._inner = self._client.get_executor(pure=False)
        self._shared = Shared.through(store_root)
        self._pending: set[Future[Any]] = set()
        self._settling = threading.Lock()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._end_when_alone, daemon=True)
        self._watch.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ``Executor.submit``; ``function`` and ``args`` are pickled. Keyword arguments are not passed on."""
        if kwargs:
            raise TypeError(f"submit: expected positional arguments; found {', '.join(kwargs)}")
        outer: Future[Any] = Future()
        name = " ".join(str(getattr(arg, "key", arg)) for arg in args if not isinstance(arg, Path))
        self._pending.add(outer)
        inner = self._inner.submit(_on_worker, self._shared, function, *args, key=f"{name}-{uuid.uuid4().hex}")
        inner.add_done_callback(lambda done: self._settle(outer, done))
        return outer

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster; tasks that still run there end by themselves, and their records count."""
        if wait and not cancel_futures:
            futures_wait(list(self._pending))
        self._over.set()
        self._watch.join()
        self._client.close(timeout=CONNECT_S)
        self._shared.beacon.unlink(missing_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(cancel_futures=error is not None)

    def _settle(self, outer: Future[Any], inner: Future[Any]) -> None:
        """Give ``outer`` the outcome of ``inner``, a Dask failure in our words."""
        try:
            self._finish(outer, result=inner.result())
        except CancelledError:
            self._finish(outer, error=ExecutorError(f"dask://{self._address}: the scheduler dropped the work"))
        except Exception as error:  # whatever a task raised is its caller's
            self._finish(outer, error=self._plain(error))

    def _finish(self, outer: Future[Any], *, result: Any = None, error: Exception | None = None) -> None:
        with self._settling:
            if outer in self._pending:
                self._pending.remove(outer)
                outer.set_exception(error) if error else outer.set_result(result)

    def _plain(self, error: Exception) -> Exception:
        from distributed import KilledWorker

        if not isinstance(error, KilledWorker):
            return error
        task, workers = str(error.task).rpartition("-")[0], error.allowed_failures + 1
        return ExecutorError(
            f"{task}: {workers} workers died while they ran it, the last at {error.last_worker.address}; "
            "read that worker's log (memory runs out most often), then run the command again: what is done is kept"
        )

    def _end_when_alone(self) -> None:
        """Fail what is pending once the cluster has had no worker, or the scheduler no answer, for ALONE_S."""
        alone = 0
        while not self._over.wait(1):
            alone = 0 if self._has_workers() else alone + 1
            if alone >= ALONE_S:
                error = ExecutorError(
                    f"dask://{self._address}: no worker for {ALONE_S} s; start some with `dask worker`, "
                    "then run the command again: what is done is kept"
                )
                for outer in list(self._pending):
                    self._finish(outer, error=error)

    def _has_workers(self) -> bool:
        return self._client.status == "running" and bool(self._client.scheduler_info(n_workers=1)["workers"])
