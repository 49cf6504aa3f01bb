"""`kf build|validate|package` killed at random moments, and a build twice at once: no corruption, no double work.

Six kills in `make test`, 50 with KF_LONG=1. Every other one is aimed at a write: it falls within 20 ms of a new file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from kf_runtime import manifest as manifests
from kf_runtime.errors import ManifestError

from kernel_factory.store import UNFINISHED, Store, sha256
from tests.e2e.conftest import ROOT

LONG = bool(os.environ.get("KF_LONG"))
STAGES = ("build", "validate", "package")
MADE_BY = {"build": ("artifact", "built"), "validate": ("proof", "float32-parameters"), "package": ()}  # record kinds
WRITES = {"build": 20, "validate": 4, "package": 3}  # about as many files as each makes, locks among them
CELLS = "/B1.N64.C64.D64/outgoing/*mask/"  # two cells, four kernels
ONE = "/B1.N64.C64.D64/outgoing/nomask/"


@dataclass(frozen=True)
class Checkout:
    """A store, allow-lists and data in one folder, and `kf` at work on them."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def start(self, stage: str, cells: str = CELLS, stderr: int | None = None) -> subprocess.Popen[str]:
        """The stage as the leader of a process group of its own."""
        environment = {
            **os.environ,
            "KF_STORE": str(self.store),
            "KF_ALLOWLISTS": str(self.folder / "allowlists"),
            "KF_DATA": str(self.data),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "runtime"))),
        }
        command = [sys.executable, "-m", "kernel_factory.cli", stage, "--sm", "sm_90a", "--cell", cells, "--json"]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
        )

    def run(self, stage: str, cells: str = CELLS) -> dict[str, int]:
        """The stage's answer; it must succeed."""
        return _answer(self.start(stage, cells))

    def records(self, stage: str) -> dict[str, bytes]:
        """The records that a stage makes, by file name."""
        return {
            f"{kind}/{path.name}": path.read_bytes()
            for kind in MADE_BY[stage]
            for path in (self.store / "records" / kind).glob("*.json")
        }

    def packaged(self) -> dict[str, bytes]:
        """Every file of the data folder, temporary ones too."""
        files = (path for path in self.data.rglob("*") if path.is_file())
        return {path.relative_to(self.data).as_posix(): path.read_bytes() for path in files}

    def inodes(self) -> set[int]:
        """The files that are here now. A file keeps its inode as it is renamed into place."""
        found: set[int] = set()
        for folder, _, _ in os.walk(self.folder):
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                found |= {entry.inode() for entry in entries if entry.is_file()}
        return found


def _answer(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate()
    assert process.returncode == 0
    answer: dict[str, int] = json.loads(out.splitlines()[-1])
    return answer


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of every stage, and how long each took, in seconds."""

    checkout: Checkout
    seconds: dict[str, float]

    def before(self, stage: str, folder: Path) -> Checkout:
        """A copy of this checkout as it was before the stage ran. Data holds an older package of one cell."""
        copy = Checkout(folder / "checkout")
        shutil.copytree(self.checkout.folder, copy.folder)
        if stage == "build":
            shutil.rmtree(copy.store)
        for kind in MADE_BY[stage] if stage == "validate" else ():
            shutil.rmtree(copy.store / "records" / kind)
        shutil.rmtree(copy.data)
        (copy.folder / "older").rename(copy.data)
        return copy


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Two builds at once, each kernel compiled by one of them; then the other stages."""
    checkout = Checkout(tmp_path_factory.mktemp("reference"))
    (checkout.folder / "allowlists").mkdir()
    shutil.copy(ROOT / "allowlists" / "policy.toml", checkout.folder / "allowlists")
    seconds = {}

    def timed(stage: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        work()
        seconds[stage] = time.monotonic() - began

    def together() -> None:
        one, two = (_answer(process) for process in (checkout.start("build"), checkout.start("build")))
        assert one["compiled"] + two["compiled"] == one["kernels"] == 4

    timed("build", together)
    timed("validate", lambda: checkout.run("validate"))
    checkout.run("admit")
    checkout.run("package", ONE)
    checkout.data.rename(checkout.folder / "older")
    timed("package", lambda: checkout.run("package"))
    return Reference(checkout, seconds)


def _wait(draw: random.Random, process: subprocess.Popen[str], checkout: Checkout, longest: float) -> None:
    """Until a random moment of the stage."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(draw.uniform(0, longest))


def _wait_for_write(draw: random.Random, process: subprocess.Popen[str], checkout: Checkout, writes: int) -> None:
    """Until a random one of the stage's new files appears, finished or not, and up to 20 ms more."""
    before, wanted = checkout.inodes(), draw.randint(1, writes)
    while process.poll() is None and len(checkout.inodes() - before) < wanted:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.02))


def _assert_nothing_half_written(checkout: Checkout, allowed: list[bytes]) -> None:
    """Records are whole and so are the blobs they name; what a runtime would load is one of the whole packages."""
    store = Store(root=checkout.store)
    for kind in ("artifact", "built", "proof", "float32-parameters"):
        for path in (checkout.store / "records" / kind).glob("*.json"):
            body = store.record(kind, path.stem)
            assert body is not None
            if kind == "artifact":
                assert all(store.blob(body[part]) for part in ("cubin", "ptx", "host"))
    try:
        manifest = manifests.load(checkout.data)
    except ManifestError:
        return  # without its sidecar: the runtime refuses it
    assert (checkout.data / manifests.FILE).read_bytes() in allowed
    for record in manifest.cubins.values():
        assert sha256((checkout.data / record.file).read_bytes()) == record.sha256


def _killed(reference: Reference, stage: str, folder: Path, draw: random.Random, aimed: bool) -> Checkout:
    """A checkout whose stage was killed at a random moment; where the stage was faster, another moment is drawn."""
    for attempt in range(10):
        checkout = reference.before(stage, folder / str(attempt))
        process = checkout.start(stage)
        if aimed:
            _wait_for_write(draw, process, checkout, WRITES[stage])
        else:
            _wait(draw, process, checkout, reference.seconds[stage])
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == -signal.SIGKILL:
            return checkout
    raise AssertionError(f"{stage}: expected to be running at one of ten moments; it had ended each time")


def test_what_the_store_lost_is_built_again(reference: Reference, tmp_path: Path) -> None:
    """A cubin cut short and a PTX that is gone: `kf build`, as the errors of the other stages say, brings both back."""
    checkout = Checkout(tmp_path / "checkout")
    shutil.copytree(reference.checkout.folder, checkout.folder)
    bodies = [json.loads(data)["body"] for data in checkout.records("build").values()]
    first, second = sorted((body for body in bodies if "cubin" in body), key=lambda body: body["symbol"])[:2]
    blobs = checkout.store / "blobs"
    (blobs / first["cubin"][:2] / first["cubin"]).write_bytes(b"")
    (blobs / second["ptx"][:2] / second["ptx"]).unlink()
    assert checkout.run("build")["compiled"] == 2
    assert checkout.records("build") == reference.checkout.records("build")
    _assert_nothing_half_written(checkout, [checkout.packaged()[manifests.FILE]])
    assert checkout.run("build")["compiled"] == 0


@pytest.mark.parametrize("stage", ["build", "validate"])
def test_an_interrupt_is_a_word(reference: Reference, tmp_path: Path, stage: str) -> None:
    """Ctrl-C reaches the stage and its workers, busy and idle: no traceback of any, and nothing is half-written."""
    checkout = reference.before(stage, tmp_path)
    before = checkout.inodes()
    process = checkout.start(stage, ONE, stderr=subprocess.STDOUT)
    while process.poll() is None and not checkout.inodes() - before:  # at work: it has taken a lock
        time.sleep(0.005)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and said.split() == ["Aborted!"]
    older = (reference.checkout.folder / "older" / manifests.FILE).read_bytes()
    _assert_nothing_half_written(checkout, [older])
    checkout.run(stage)
    assert checkout.records(stage) == reference.checkout.records(stage)


@pytest.mark.parametrize("trial", range(50 if LONG else 6))
def test_killed_stage_is_completed_by_the_next(
    reference: Reference, tmp_path: Path, trial: int, record_property: Callable[[str, object], None]
) -> None:
    """SIGKILL to the stage and all its children: nothing is half-written; the next run ends with the same bytes."""
    stage = STAGES[trial % len(STAGES)]
    checkout = _killed(reference, stage, tmp_path, random.Random(trial), aimed=trial % 2 == 1)
    unfinished = [name for _, _, names in os.walk(checkout.folder) for name in names if name.startswith(UNFINISHED)]
    record_property("left", f"{stage}: {len(checkout.records(stage))} records, {len(unfinished)} unfinished files")

    whole = reference.checkout.packaged()
    older = (reference.checkout.folder / "older" / manifests.FILE).read_bytes()
    _assert_nothing_half_written(checkout, [older, whole[manifests.FILE]])
    checkout.run(stage)
    assert checkout.records(stage) == reference.checkout.records(stage)
    if stage == "build":
        assert checkout.run(stage)["compiled"] == 0
    elif stage == "validate":
        assert checkout.run(stage)["ran"] == 0
    else:
        assert checkout.packaged() == whole
