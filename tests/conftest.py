"""Fixtures that several suites share: the small set of cells, built and proved once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from filelock import FileLock

from kernel_factory import pipeline
from kernel_factory.built import BuiltCell
from kernel_factory.evidence import Evidence
from kernel_factory.pipeline import Selection
from kernel_factory.workspace import find

SMALL = (
    "/B1.N64.C128.D128/outgoing/mask/",
    "/B1.N100.C128.D128/incoming/nomask/",
    "/B1.N64.C64.D64/incoming/mask/",
)


@dataclass(frozen=True)
class Small:
    """The small set: its selection (with allow-lists and data of its own), cells, evidence and verdicts."""

    selection: Selection
    built: list[BuiltCell]
    evidence: list[Evidence]
    admission: pipeline.Admission

    @property
    def data(self) -> Path:
        """The folder with its manifest and cubins."""
        return self.selection.workspace.data


@pytest.fixture(scope="session")
def selection(tmp_path_factory: pytest.TempPathFactory) -> Selection:
    """The small set on sm_90a. The store is the checkout's own; nothing else of it is written."""
    folder = tmp_path_factory.mktemp("small")
    here = find()
    workspace = replace(here, allowlists=folder / "allowlists", data=folder / "data", lock=folder / "cubins.lock")
    workspace.policy.parent.mkdir()
    workspace.policy.write_bytes(here.policy.read_bytes())
    return pipeline.select(workspace, ("trimul_mma",), ("sm_90a",), SMALL)


@pytest.fixture(scope="session")
def built(selection: Selection) -> list[BuiltCell]:
    """The small set compiled and captured; one process at a time does the work."""
    selection.workspace.store_root.mkdir(exist_ok=True)
    with FileLock(selection.workspace.store_root / "small.lock"), ThreadPoolExecutor(2) as pool:
        return pipeline.build(selection, pool, lambda *_: None, lambda *_: None)


@pytest.fixture(scope="session")
def small(selection: Selection, built: list[BuiltCell]) -> Small:
    """The small set proved, admitted and packaged."""
    with FileLock(selection.workspace.store_root / "small.lock"), ProcessPoolExecutor(2) as pool:
        evidence = pipeline.prove(selection, pool)
    admission = pipeline.admit(selection)
    pipeline.pack(selection)
    return Small(selection, built, evidence, admission)


@pytest.fixture(autouse=True)
def _no_campaign(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A campaign mode or a JIT family in the developer's shell does not reach the tests."""
    for name in ("CUEQ_TRIMUL_KF_CAMPAIGN", "KF_JIT"):
        monkeypatch.delenv(name, raising=False)
    yield
