"""Validate: which emulated runs the built cells need, each run once, and the evidence that follows.

Runs are shared wherever nothing that is run differs: SMs whose PTX differs in its header alone
share everything; cells too large to run whole share single launches, so that both directions and
all SMs prove one projection. Records in the store are named by what was run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kf_runtime.cell import Cell

from kernel_factory import parameters
from kernel_factory.bench import Bench
from kernel_factory.built import BuiltCell
from kernel_factory.emulator.errors import LaunchError, PtxError
from kernel_factory.evidence import Evidence
from kernel_factory.family import discover
from kernel_factory.proof import CHAINED_UP_TO, chained, merge, sampled
from kernel_factory.store import Store, digest, sha256

KIND: Final = "proof"
PARAMETERS: Final = "float32-parameters"
_HEADER: Final = (".target", ".version", "//")
_METHOD: Final = ("bench.py", "proof.py", "reference.py", "sample.py")


class NotProved(Exception):
    """A cell's emulated runs are not in the store."""


class Unrunnable(Exception):
    """A cell's kernels are nothing that the emulator could run: an opcode that it lacks, a launch that cannot be."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One emulated run: a whole cell (``index`` None) or one of its launches, named by ``key``."""

    key: str
    built: BuiltCell
    index: int | None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Parts that share inputs; one process does them together. ``calls`` are their cells, without the SM."""

    root: Path
    parts: tuple[Part, ...]
    calls: tuple[Cell, ...]
    seed: int

    @property
    def key(self) -> str:
        """What an error calls the task: the first of its cells."""
        return str(self.parts[0].built.cell)


def is_chained(built: BuiltCell) -> bool:
    """Whether a cell is small enough to run whole."""
    return built.cell.N <= CHAINED_UP_TO


def seed_of(built: BuiltCell, reroll: int = 0) -> int:
    """The seed of a call: its key without SM and direction, and the hash of the family's sources."""
    return int(
        digest([replace(built.cell, sm="sm_0", direction="outgoing").key, _sources(built.family), reroll])[:12], 16
    )


@lru_cache
def _sources(family: str) -> str:
    return discover()[family].source_digest()


def parts(store: Store, built: BuiltCell, reroll: int = 0) -> list[Part]:
    """The runs that a cell's evidence consists of."""
    launches = [_launch_identity(store, built, i) for i in range(len(built.artifacts))]
    call = [replace(built.cell, sm="sm_0").key, seed_of(built, reroll), _method(built.family)]
    if is_chained(built):
        return [Part(key=digest([call, launches]), built=built, index=None)]
    return [Part(key=digest([call[1:], launch]), built=built, index=i) for i, launch in enumerate(launches)]


def _launch_identity(store: Store, built: BuiltCell, index: int) -> list[Any]:
    """What decides a launch's outcome on given inputs: its code, its launch, its buffers."""
    launch = built.plan.to_json()["launches"][index]
    buffers = [vars(built.plan.buffer(name)) for name in sorted({slot[2] for slot in launch["slots"]})]
    code = _ptx_identity(store, built.artifacts[index].ptx)
    return [code, {**launch, "cubin": "", "symbol": ""}, buffers]


@lru_cache(maxsize=4096)
def _ptx_identity(store: Store, name: str) -> str:
    return ptx_identity(store.blob(name).decode())


def ptx_identity(ptx: str) -> str:
    """sha256 of a PTX text without header and comments: equal where only the .target line differs."""
    lines = (line for line in ptx.splitlines() if not line.strip().startswith(_HEADER))
    return sha256("\n".join(lines).encode())


@lru_cache
def _method(family: str) -> str:
    """sha256 of the code that decides what a proof says: the emulator, the measuring, the family's model."""
    folder = Path(__file__).parent
    files = [path for path in sorted(folder.glob("emulator/**/*.py")) if "driver" not in path.parts]
    files += [folder / name for name in _METHOD] + [Path(str(discover()[family].expectation.__file__))]
    return digest([[path.name, sha256(path.read_bytes())] for path in files])


def validate_all(
    root: Path,
    cells: Iterable[BuiltCell],
    executor: Executor | None = None,
    reroll: int = 0,
    progress: Callable[[Task, int], None] = lambda task, ran: None,
) -> list[Evidence]:
    """Emulated evidence of every cell; what the store lacks is run."""
    store, cells = Store(root=root), list(cells)
    own = executor is None
    pool: Executor = executor if executor is not None else ProcessPoolExecutor(os.cpu_count() or 1)
    try:
        futures = {pool.submit(run_task, task): task for task in tasks(root, cells, reroll)}
        for future in as_completed(futures):
            progress(futures[future], future.result())
    finally:
        if own:
            pool.shutdown(cancel_futures=True)
    return [evidence_of(store, built, reroll) for built in cells]


def tasks(root: Path, cells: list[BuiltCell], reroll: int = 0) -> list[Task]:
    """The distinct runs of these cells, grouped by what they share, the largest first."""
    store = Store(root=root)
    groups: dict[str, dict[str, Part]] = {}
    calls: dict[str, dict[Cell, None]] = {}
    seeds: dict[str, int] = {}
    for built in cells:
        call = built.cell if is_chained(built) else replace(built.cell, direction="outgoing")
        group = f"{built.family} {replace(call, sm='sm_0').key}"
        seeds[group] = seed_of(built, reroll)
        calls.setdefault(group, {})[parameters.call_of(built.cell)] = None
        for part in parts(store, built, reroll):
            groups.setdefault(group, {}).setdefault(part.key, part)
    found = [
        Task(root=root, parts=tuple(group.values()), calls=tuple(calls[name]), seed=seeds[name])
        for name, group in groups.items()
    ]
    return sorted(found, key=lambda task: -_weight(task.parts[0].built))


def _weight(built: BuiltCell) -> int:
    cell = built.cell
    return cell.B * cell.N**2 * cell.C * (4 if is_chained(built) else 1)


def run_task(task: Task) -> int:
    """Run what the store lacks of a task; how many parts ran."""
    store = Store(root=task.root)
    with store.making(KIND, digest([part.key for part in task.parts])):
        _measure_parameters(store, task)
        missing = [part for part in task.parts if store.record(KIND, part.key) is None]
        if not missing:
            return 0
        benches = [Bench.of(part.built, _texts(store, part.built), task.seed) for part in missing]
        for part, body in zip(missing, _run(task, missing, benches), strict=True):
            store.put_record(KIND, part.key, body)
        return len(missing)


def _run(task: Task, missing: list[Part], benches: list[Bench]) -> list[dict[str, Any]]:
    """The bodies of the parts' records, in their order. Raises Unrunnable."""
    try:
        if missing[0].index is None:
            return chained(benches)
        return sampled([(bench, part.index or 0) for bench, part in zip(benches, missing, strict=True)])
    except (PtxError, LaunchError) as error:  # a PtxError does not cross a process border
        raise Unrunnable(f"{task.key}: {error}") from error


def _legible(figures: dict[str, float]) -> dict[str, float]:
    """Six digits: the last ones of a float64 sum depend on CPU and thread count, and tell nothing."""
    return {name: float(f"{value:.6g}") for name, value in figures.items()}


def _measure_parameters(store: Store, task: Task) -> None:
    """What float32 parameters cost the task's calls in accuracy, where the store does not know; no emulated run."""
    family = task.parts[0].built.family
    missing = [
        cell for cell in task.calls if store.record(PARAMETERS, _parameters_key(family, cell, task.seed)) is None
    ]
    if missing:
        figures = parameters.measure(missing, discover()[family].expectation, task.seed)
        for cell, body in zip(missing, figures, strict=True):
            store.put_record(PARAMETERS, _parameters_key(family, cell, task.seed), body)


def _parameters_key(family: str, cell: Cell, seed: int) -> str:
    return digest([parameters.call_of(cell).key, seed, parameters.method(discover()[family].folder / "model.py")])


def _texts(store: Store, built: BuiltCell) -> tuple[str, ...]:
    return tuple(store.blob(artifact.ptx).decode() for artifact in built.artifacts)


def records_of(store: Store, built: BuiltCell, reroll: int = 0) -> list[tuple[str, str]]:
    """Kind and key of the records that a cell's evidence is made of: its runs, then what float32 parameters cost."""
    runs = [(KIND, part.key) for part in parts(store, built, reroll)]
    return [*runs, (PARAMETERS, _parameters_key(built.family, built.cell, seed_of(built, reroll)))]


def evidence_of(store: Store, built: BuiltCell, reroll: int = 0) -> Evidence:
    """A cell's runs joined with its own hashes and facts. Raises NotProved where a run is missing."""
    *bodies, float32_parameters = (store.record(*name) for name in records_of(store, built, reroll))
    known = [body for body in bodies if body is not None]
    if len(known) < len(bodies) or float32_parameters is None:
        raise NotProved(f"{built.cell}: not proved from the present bytes; run `kf validate`")
    kernels = [launch.kernel for launch in built.plan.launches]
    proof = known[0] if is_chained(built) else merge(kernels, known)
    launches = tuple(
        {
            "kernel": launch.kernel,
            "cubin": artifact.cubin,
            "ptx": artifact.ptx,
            "fraction": proof.get("fraction", {}).get(launch.kernel, 1.0),
            "facts": facts.to_json(),
            "counters": proof["counters"][launch.kernel],
        }
        for launch, artifact, facts in zip(built.plan.launches, built.artifacts, built.facts, strict=True)
    )
    return Evidence(
        cell=built.cell,
        level="emulated",
        product=built.product,
        toolchain=built.artifacts[0].toolchain,
        seed=seed_of(built, reroll),
        coverage="chained" if is_chained(built) else "per-launch",
        launches=launches,
        numerics={name: _legible(figures) for name, figures in proof["numerics"].items()},
        findings=proof["findings"],
        float32_parameters=float32_parameters,
    )
