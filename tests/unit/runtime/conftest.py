"""Fixtures of the runtime's tests: a fake driver, and a dispatcher of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kf_runtime import dispatch, driver
from kf_runtime.campaign import Mode, Settings
from kf_runtime.dispatch import Dispatcher
from runtime_fakes import FakeDriver, copy_launch


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A fake driver behind ``kf_runtime.driver``, as if its libcuda were mapped."""
    instance = FakeDriver(on_launch=copy_launch)
    monkeypatch.setattr(driver, "bindings", lambda: instance)
    monkeypatch.setattr(driver, "is_mapped", lambda: True)
    driver._primary_context.cache_clear()
    return instance


@pytest.fixture
def install() -> Iterator[Callable[..., Dispatcher]]:
    """Installs a Dispatcher for the test: ``install(folder, mode)``."""
    before = dispatch.current()

    def put(folder: Path, mode: Mode = Mode.AUTO) -> Dispatcher:
        dispatcher = Dispatcher(Settings(mode=mode), folder)
        dispatch.install(dispatcher)
        return dispatcher

    yield put
    dispatch.install(before)
