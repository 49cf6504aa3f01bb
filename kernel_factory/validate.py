"""Validate: run a built cell on the emulator and write down what was seen.

Small cells run chained and whole: each launch reads what the one before wrote. Larger ones run
launch by launch on a seeded sample of blocks that holds every corner and edge of the grid, from
the rounding model's values and against them. Every input set runs in lockstep; the random set
also runs warp-serial and under the race checker, which look at order, not at values.

Cells of SMs whose PTX differs in the header alone share one run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kernel_factory.built import BuiltCell
from kernel_factory.evidence import Evidence
from kernel_factory.proof import prove
from kernel_factory.store import Store, digest, sha256

KIND: Final = "proof"
_HEADER: Final = (".target", ".version", "//")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One emulated run: the cell whose PTX runs, and the seed that decides inputs and order."""

    root: Path
    cell: BuiltCell
    seed: int


def ptx_identity(ptx: str) -> str:
    """sha256 of a PTX text without header and comments: equal where only the .target line differs."""
    lines = (line for line in ptx.splitlines() if not line.strip().startswith(_HEADER))
    return sha256("\n".join(lines).encode())


def proof_key(store: Store, built: BuiltCell, reroll: int = 0) -> str:
    """What an emulated run depends on: the call, the code and the launches, but not the SM's name."""
    call = built.cell.key.rsplit("/", 1)[0]
    code = [ptx_identity(store.blob(artifact.ptx).decode()) for artifact in built.artifacts]
    launches = [{**launch, "cubin": "", "symbol": ""} for launch in built.plan.to_json()["launches"]]
    return digest([call, code, launches, built.plan.to_json()["buffers"], _method(), reroll])


def _method() -> str:
    """sha256 of the code that decides what a proof says: the emulator and the measuring."""
    folder = Path(__file__).parent
    files = sorted(folder.glob("emulator/**/*.py")) + [folder / name for name in ("proof.py", "reference.py", "sample.py")]
    files += sorted(folder.glob("families/*/model.py"))
    return digest([[path.name, sha256(path.read_bytes())] for path in files if "driver" not in path.parts])


def validate_all(
    root: Path,
    cells: Iterable[BuiltCell],
    executor: Executor | None = None,
    reroll: int = 0,
    progress: Callable[[BuiltCell, bool], None] = lambda cell, fresh: None,
) -> list[Evidence]:
    """Emulated evidence of every cell, each distinct proof run once."""
    store = Store(root=root)
    keyed = [(built, proof_key(store, built, reroll)) for built in cells]
    first: dict[str, BuiltCell] = {}
    for built, key in keyed:
        first.setdefault(key, built)
    requests = {key: Request(root=root, cell=built, seed=int(key[:12], 16)) for key, built in first.items()}
    own = executor is None
    pool: Executor = executor if executor is not None else ProcessPoolExecutor(os.cpu_count() or 1)
    try:
        futures = {pool.submit(prove_once, request, key): key for key, request in _longest_first(requests)}
        for future in as_completed(futures):
            _, fresh = future.result()
            progress(first[futures[future]], fresh)
        proofs = {futures[future]: future.result()[0] for future in futures}
    finally:
        if own:
            pool.shutdown(cancel_futures=True)
    return [evidence_of(store, built, proofs[key]) for built, key in keyed]


def _longest_first(requests: dict[str, Request]) -> list[tuple[str, Request]]:
    """Large cells first, so that the pool does not end on one."""
    return sorted(requests.items(), key=lambda item: -item[1].cell.cell.N * item[1].cell.cell.C)


def prove_once(request: Request, key: str) -> tuple[dict[str, Any], bool]:
    """The proof of that key from the store, or a new run; and whether it ran now."""
    store = Store(root=request.root)
    with store.making(KIND, key):
        body = store.record(KIND, key)
        if body is not None:
            return body, False
        ptx = tuple(store.blob(artifact.ptx).decode() for artifact in request.cell.artifacts)
        body = prove(request.cell, ptx, request.seed)
        store.put_record(KIND, key, body)
        return body, True


def evidence_of(store: Store, built: BuiltCell, proof: dict[str, Any]) -> Evidence:
    """A proof joined with one SM's own hashes and facts."""
    launches = tuple(
        {
            "kernel": launch.kernel,
            "cubin": artifact.cubin,
            "ptx": artifact.ptx,
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
        seed=proof["seed"],
        coverage=proof["coverage"],
        launches=launches,
        numerics=proof["numerics"],
        findings=proof["findings"],
    )
