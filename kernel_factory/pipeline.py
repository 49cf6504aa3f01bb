"""Pipeline: the stages composed, for the command line. No printing here, no stage imports another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from kf_runtime.cell import Cell
from kf_runtime.plan import Launch, Plan

from kernel_factory import admit as admission
from kernel_factory import (
    allowlist,
    capture,
    compile,
    inspect,
    jit_trial,
    mutate,
    package,
    policy,
    sample,
    second_opinion,
    source_lines,
    toolchain,
    trial,
    validate,
)
from kernel_factory import evidence as evidences
from kernel_factory.admit import Admitted, Verdict
from kernel_factory.allowlist import Proved, Row
from kernel_factory.artifact import Artifact
from kernel_factory.bench import Bench, Target
from kernel_factory.built import BuiltCell
from kernel_factory.cells import CellsError
from kernel_factory.evidence import Evidence
from kernel_factory.family import Family, FamilyError, Step, discover
from kernel_factory.proof import CHAINED_UP_TO
from kernel_factory.selection import Selection as Selection
from kernel_factory.selection import SelectionError as SelectionError
from kernel_factory.selection import matches as matches
from kernel_factory.selection import require, require_reference
from kernel_factory.selection import select as select
from kernel_factory.store import StoreError, digest, sha256
from kernel_factory.workspace import Workspace

Progress = Callable[..., None]


class NotBuilt(Exception):
    """A later stage was asked for a cell that `kf build` has not made from the present sources."""


#: Errors that say all an author needs to know.
CLEAR = (
    allowlist.AllowlistError,
    capture.CaptureError,
    compile.CompileError,
    CellsError,
    evidences.EvidenceError,
    FamilyError,
    inspect.InspectError,
    NotBuilt,
    policy.PolicyError,
    SelectionError,
    StoreError,
    toolchain.ToolchainError,
)


# ------------------------------------------------------------------ build


def build(selection: Selection, executor: Executor, compiled: Progress, captured: Progress) -> list[BuiltCell]:
    """Compile every kernel, then capture every cell's launches. What the store has lost is made again."""
    _forget_what_is_lost(selection)
    compile.compile_all(selection.workspace.store_root, selection.specs(), executor, compiled)
    return [_capture_cell(selection.workspace, family, cell, captured) for family, cell in selection.rows]


def _forget_what_is_lost(selection: Selection) -> None:
    """Take back the records of kernels whose bytes are missing or damaged, so that they are compiled again."""
    store = selection.workspace.store
    owners = {family.name: family for family, _ in selection.rows}
    for spec, sm in selection.specs():
        key = compile.record_key(owners[spec.family], spec, sm)
        with store.making(compile.KIND, key):
            body = store.record(compile.KIND, key)
            if body is not None and not all(store.holds(body[name]) for name in ("cubin", "ptx", "host")):
                store.drop_record(compile.KIND, key)


def built_cells(selection: Selection) -> list[BuiltCell]:
    """The cells as `kf build` left them. Raises NotBuilt naming the first that is missing."""
    return [_read_built(selection.workspace, family, cell) for family, cell in selection.rows]


def _artifact(workspace: Workspace, family: Family, step: Step, cell: Cell) -> Artifact:
    body = workspace.store.record(compile.KIND, compile.record_key(family, step.spec, cell.sm))
    if body is None:
        raise NotBuilt(f"{cell}: kernel {step.spec.key} is not built from the present sources; run `kf build`")
    return Artifact.from_json(body)


def identity(workspace: Workspace, family: Family, cell: Cell) -> tuple[tuple[Artifact, ...], str]:
    """A cell's artifacts, and the name of its record: cell, bytes, plan, and the way launches are captured."""
    plan = family.planned(cell)
    asked = [[vars(b) for b in plan.buffers], [[step.operands, step.scalars] for step in plan.steps]]
    artifacts = tuple(_artifact(workspace, family, step, cell) for step in plan.steps)
    method = [sha256(Path(module.__file__ or "").read_bytes()) for module in (capture, inspect)]
    return artifacts, digest([cell.key, [a.to_json() for a in artifacts], asked, method])


def _read_built(workspace: Workspace, family: Family, cell: Cell) -> BuiltCell:
    _, key = identity(workspace, family, cell)
    body = workspace.store.record("built", key)
    if body is None:
        raise NotBuilt(f"{cell}: its launches are not captured; run `kf build`")
    return BuiltCell.from_json(body)


def _capture_cell(workspace: Workspace, family: Family, cell: Cell, captured: Progress) -> BuiltCell:
    artifacts, key = identity(workspace, family, cell)
    body = workspace.store.record("built", key)
    if body is None:
        body = _captured(workspace, family, cell, artifacts).to_json()
        workspace.store.put_record("built", key, body)
    captured(cell)
    return BuiltCell.from_json(body)


def _captured(workspace: Workspace, family: Family, cell: Cell, artifacts: tuple[Artifact, ...]) -> BuiltCell:
    plan, store = family.planned(cell), workspace.store
    launches = tuple(_launch(workspace, step, a) for step, a in zip(plan.steps, artifacts, strict=True))
    facts = tuple(
        inspect.inspect(store.blob(a.cubin), store.blob(a.ptx).decode(), launch)
        for a, launch in zip(artifacts, launches, strict=True)
    )
    whole = Plan(buffers=plan.buffers, launches=launches)
    return BuiltCell(cell=cell, family=family.name, plan=whole, artifacts=artifacts, facts=facts)


def _launch(workspace: Workspace, step: Step, artifact: Artifact) -> Launch:
    if (len(step.operands), len(step.scalars)) != (artifact.pointers, artifact.scalars):
        raise capture.CaptureError(
            f"{step.spec.key}: the plan gives {len(step.operands)} pointers and {len(step.scalars)} integers; "
            f"the host function takes {artifact.pointers} and {artifact.scalars}"
        )
    cubin = workspace.store.blob(artifact.cubin)
    host = capture.HostCode(
        object_bytes=workspace.store.blob(artifact.host),
        entry=artifact.entry,
        cubin=artifact.cubin,
        kernel=inspect.only_kernel(cubin, artifact.symbol),
        sm=artifact.sm,
    )
    return capture.capture(host, step)


def try_cell(workspace: Workspace, family: str, cell: Cell) -> list[trial.LaunchTrial]:
    """Build one cell, shipped or not, and run it for its author. Raises SelectionError for an unknown family."""
    require("family", (family,), discover())
    owner, store = discover()[family], workspace.store
    specs = [step.spec for step in owner.planned(cell).steps]
    require_reference(cell)
    with ThreadPoolExecutor(4) as pool:
        keys = [compile.record_key(owner, spec, cell.sm) for spec in specs]
        located = [
            pool.submit(source_lines.located, store, spec, cell.sm, key) for spec, key in zip(specs, keys, strict=True)
        ]
        bench, texts = _bench(workspace, owner, cell)
        demands = policy.policy_of(workspace.policy, cell.op)
        bars = trial.Bars(wavefronts=demands.wavefronts, traffic=demands.traffic)
        launches = trial.run(bench, texts, bars)
        sources = [source_lines.match(text, lines.result()) for text, lines in zip(texts, located, strict=True)]
    return [replace(launch, sources=places) for launch, places in zip(launches, sources, strict=True)]


def _bench(workspace: Workspace, family: Family, cell: Cell) -> tuple[Bench, tuple[str, ...]]:
    """The bench of one cell, built now where it is not, and its PTX."""
    selection = Selection(workspace=workspace, rows=((family, cell),))
    with ThreadPoolExecutor(2) as pool:
        (built,) = build(selection, pool, lambda *_: None, lambda *_: None)
    texts = tuple(workspace.store.blob(artifact.ptx).decode() for artifact in built.artifacts)
    return Bench.of(built, texts, validate.seed_of(built)), texts


def try_jit(workspace: Workspace, family: str, cell: Cell) -> jit_trial.JitTrial:
    """Call one cell through the runtime in its JIT form. Raises SelectionError where that would take minutes."""
    if cell.N > CHAINED_UP_TO:
        raise SelectionError(f"{cell}: expected N of at most {CHAINED_UP_TO} with --jit, which runs whole cells")
    bench, _ = _bench(workspace, discover()[family], cell)
    return jit_trial.run(bench, workspace.store_root)


# ------------------------------------------------------------------ validate, admit, package


def proof_tasks(selection: Selection, reroll: int = 0) -> list[validate.Task]:
    """The emulated runs that the selected cells need."""
    return validate.tasks(selection.workspace.store_root, built_cells(selection), reroll)


def prove(
    selection: Selection, executor: Executor, reroll: int = 0, proved: Progress = lambda *_: None
) -> list[Evidence]:
    """Emulated evidence of every selected cell, from the store or run now."""
    cells = built_cells(selection)
    return validate.validate_all(selection.workspace.store_root, cells, executor, reroll, proved)


def emulated(selection: Selection) -> list[tuple[BuiltCell, Evidence]]:
    """The cells with the evidence that this store holds. Raises NotProved where `kf validate` has not run."""
    store = selection.workspace.store
    return [(built, validate.evidence_of(store, built)) for built in built_cells(selection)]


def judge(workspace: Workspace, pairs: list[tuple[BuiltCell, Evidence]]) -> list[tuple[Evidence, Verdict]]:
    """The verdict on every piece of emulated evidence."""
    demands = {op: policy.policy_of(workspace.policy, op) for op in {built.cell.op for built, _ in pairs}}
    return [(evidence, admission.admit(evidence, demands[built.cell.op])) for built, evidence in pairs]


def _distinct(selection: Selection) -> Iterator[tuple[BuiltCell, tuple[str, ...], list[int]]]:
    """Built cells with their PTX and the launches whose code no cell before had. SMs that share PTX share one."""
    store = selection.workspace.store
    seen: set[str] = set()
    for built in built_cells(selection):
        texts = tuple(store.blob(artifact.ptx).decode() for artifact in built.artifacts)
        fresh = [i for i, text in enumerate(texts) if validate.ptx_identity(text) not in seen]
        seen |= {validate.ptx_identity(text) for text in texts}
        if fresh:
            yield built, texts, fresh


def second_opinions(selection: Selection) -> Iterator[tuple[str, second_opinion.Opinion]]:
    """What the static verifier says of every distinct kernel of the selected cells."""
    for built, texts, fresh in _distinct(selection):
        for i in fresh:
            opinion = second_opinion.ask(built.plan.launches[i], texts[i])
            yield f"{built.artifacts[i].spec.key} at {built.cell}", opinion


MUTATED_BLOCKS = 4  # corners and edges of the grid come first


def trials(selection: Selection) -> Iterator[tuple[str, mutate.Trial]]:
    """Every distinct kernel of the selected cells, ready to be mutated, with its name."""
    for built, texts, fresh in _distinct(selection):
        bench = Bench.of(built, texts, validate.seed_of(built))
        inputs = bench.reference.inputs(built.cell, "random", bench.seed)
        staged = bench.expectation.Staged(built.cell, inputs, torch.float32)
        for i in fresh:
            blocks = sample.choose(built.plan.launches[i].grid, MUTATED_BLOCKS, bench.seed)
            target = Target(bench=bench, index=i, blocks=blocks)
            yield (
                f"{built.artifacts[i].spec.key} at {built.cell}",
                mutate.Trial.of_target(target, inputs, staged, texts[i]),
            )


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What `kf admit` did: verdicts, evidence files that differ from the committed ones, lists that changed."""

    verdicts: list[tuple[Evidence, Verdict]]
    changed_evidence: list[str]
    changed_lists: list[str]


def admit(selection: Selection) -> Admission:
    """Judge this store's evidence, write the evidence files and the allow-lists of the selected cells.

    A list keeps its rows for cells that were not selected. Device evidence whose cubins are
    still the built ones adds its product to the row.
    """
    workspace = selection.workspace
    pairs = emulated(selection)
    verdicts = judge(workspace, pairs)
    changed = [e.cell.key for _, e in pairs if _changed(workspace, e)]
    for _, evidence in pairs:
        evidences.write(workspace.evidence, evidence)
    lists = []
    for op, sm in sorted({(built.cell.op, built.cell.sm) for built, _ in pairs}):
        rows = {row.cell: row for row in allowlist.read(workspace.allowlists, op, sm)}
        for evidence, verdict in verdicts:
            if (evidence.cell.op, evidence.cell.sm) != (op, sm):
                continue
            rows.pop(evidence.cell, None)
            if isinstance(verdict, Admitted):
                rows[evidence.cell] = _row(workspace, evidence, verdict)
        if allowlist.write(workspace.allowlists, op, sm, list(rows.values())):
            lists.append(f"{op}/{sm}")
    return Admission(verdicts=verdicts, changed_evidence=changed, changed_lists=lists)


def _changed(workspace: Workspace, evidence: Evidence) -> bool:
    path = evidences.path_of(workspace.evidence, evidence.cell, evidence.level)
    return path.exists() and not evidences.same(evidences.read(path), evidence)


def _row(workspace: Workspace, evidence: Evidence, verdict: Admitted) -> Row:
    proofs = [Proved(product=evidence.product, level=evidence.level, evidence=evidence.digest)]
    proofs += [
        Proved(product=e.product, level=e.level, evidence=e.digest)
        for e in _device_evidence(workspace, evidence.cell)
        if e.cubins == evidence.cubins
    ]
    return Row(
        cell=evidence.cell,
        cubins=evidence.cubins,
        proofs=tuple(proofs),
        parameter_dtypes=verdict.parameter_dtypes,
    )


def _device_evidence(workspace: Workspace, cell: Cell) -> Iterator[Evidence]:
    demands = policy.policy_of(workspace.policy, cell.op)
    for level in ("device", "timed"):
        path = evidences.path_of(workspace.evidence, cell, level)
        if path.exists():
            found = evidences.read(path)
            if isinstance(admission.admit(found, demands), Admitted):
                yield found


def take_in(workspace: Workspace, files: Iterable[Path]) -> list[Evidence]:
    """Copy device evidence, as the device check writes it, into the committed evidence."""
    taken = [found for file in files for found in evidences.read_many(file)]
    for found in taken:
        if found.level == "emulated" or found.product.startswith("KF Emulated"):
            raise SelectionError(f"{found.cell}: expected evidence of a real device; found product {found.product!r}")
    for found in taken:
        evidences.write(workspace.evidence, found)
    return taken


def pack(selection: Selection) -> package.Packaged:
    """Put the admitted ones of the selected cells into the wheel's data folder."""
    workspace = selection.workspace
    found = admitted(selection)
    if not found:
        raise SelectionError("none of the selected cells is admitted; run `kf admit`")
    return package.write(workspace.store, workspace.data, package.build_manifest(workspace.store, found))


def lock_bytes(selection: Selection) -> bytes:
    """The bytes of cubins.lock for the admitted ones of the selected cells."""
    return package.lock(admitted(selection), selection.workspace.store)


def admitted(selection: Selection) -> list[tuple[BuiltCell, Row]]:
    """The selected cells that an allow-list admits, with their rows. Raises NotBuilt."""
    workspace = selection.workspace
    rows: dict[Cell, Row] = {}
    for op, sm in sorted({(cell.op, cell.sm) for _, cell in selection.rows}):
        rows |= {row.cell: row for row in allowlist.read(workspace.allowlists, op, sm)}
    return [(built, rows[built.cell]) for built in built_cells(selection) if built.cell in rows]
