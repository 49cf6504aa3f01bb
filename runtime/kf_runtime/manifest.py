"""Manifest: the one record that reaches the runtime. Schema 1, standard library only.

``data/manifest.json`` lists cubins by sha256, plans by digest and entries by cell key;
``data/manifest.sha256`` holds the sha256 of its bytes and is checked before they are parsed.
The factory writes both with ``to_bytes`` and ``sidecar``; the runtime reads them with ``load``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kf_runtime.cell import Cell
from kf_runtime.errors import ManifestError
from kf_runtime.plan import Plan

SCHEMA: Final = 1
FILE: Final = "manifest.json"
SIDECAR: Final = "manifest.sha256"
LEVELS: Final = ("emulated", "device", "timed")
#: What an entry admits that says nothing of its parameters.
BF16_ALONE: Final = ("bf16",)


@dataclass(frozen=True, kw_only=True)
class KernelFacts:
    """What a cubin says of one kernel: registers a thread, static shared memory in bytes."""

    registers: int
    static_shared: int


@dataclass(frozen=True, kw_only=True)
class CubinRecord:
    """One cubin of the wheel. ``file`` is relative to the manifest's folder."""

    sha256: str
    size: int
    sm: str
    kernels: Mapping[str, KernelFacts]
    ptx_sha256: str
    toolchain: str
    file: str = ""

    def __post_init__(self) -> None:
        if not self.file:
            object.__setattr__(self, "file", f"cubins/{self.sha256}.cubin")


@dataclass(frozen=True, kw_only=True, order=True)
class Proof:
    """One product that a cell was proved on, and how far: emulated, device or timed."""

    product: str
    level: str

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"Proof.level: expected one of {', '.join(LEVELS)}; found {self.level!r}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One admitted cell: its plan's digest, the products it was proved on, the evidence's sha256.

    ``parameter_dtypes``: the dtypes in which a call's parameters may come; other than the cell's own, they are
    rounded to it within the call.
    """

    cell: Cell
    plan: str
    products: tuple[Proof, ...]
    evidence: str
    parameter_dtypes: tuple[str, ...] = BF16_ALONE

    def proved_on(self, product: str) -> bool:
        """Whether the evidence names this product."""
        return any(proof.product == product for proof in self.products)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Every admitted cell with its plan and cubins. ``required_driver``: SM to CUDA version (13000 is 13.0)."""

    generator: str
    cubins: Mapping[str, CubinRecord]
    plans: Mapping[str, Plan]
    entries: Mapping[Cell, Entry]
    required_driver: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in self.entries.values():
            if entry.plan not in self.plans:
                raise ValueError(f"entry {entry.cell}: plan: expected a digest of `plans`; found {entry.plan!r}")
        for digest, plan in self.plans.items():
            for launch in plan.launches:
                record = self.cubins.get(launch.cubin)
                if record is None or launch.symbol not in record.kernels:
                    raise ValueError(
                        f"plan {digest}, launch {launch.kernel}: expected a cubin and symbol of `cubins`; "
                        f"found {launch.cubin!r}, {launch.symbol!r}"
                    )

    @property
    def sms(self) -> tuple[str, ...]:
        """The SMs that have entries, sorted."""
        return tuple(sorted({cell.sm for cell in self.entries}))

    def entry(self, cell: Cell) -> Entry | None:
        """The entry of exactly this cell."""
        return self.entries.get(cell)

    def serving(self, cell: Cell) -> Entry | None:
        """The entry whose kernels a call of this cell would run: its own, or that of its parameters rounded.

        Whether the entry admits parameters of the call's dtype is ``parameter_dtypes``.
        """
        return self.entries.get(cell) or self.entries.get(cell.rounded())

    def on_sm(self, sm: str) -> tuple[Entry, ...]:
        """The entries of one SM, in key order."""
        return tuple(self.entries[cell] for cell in sorted(c for c in self.entries if c.sm == sm))

    def nearest(self, cell: Cell) -> Cell | None:
        """The admitted cell of the same op and SM that differs least."""
        near = [c for c in self.entries if c.op == cell.op and c.sm == cell.sm]
        return min(near, key=lambda c: (cell.distance(c), c.key), default=None)

    def plan_of(self, entry: Entry) -> Plan:
        """The plan of an entry."""
        return self.plans[entry.plan]


def plan_digest(plan: Plan) -> str:
    """The sha256 of the plan's canonical JSON."""
    return hashlib.sha256(_canonical(plan.to_json())).hexdigest()


def build(
    *,
    generator: str,
    cubins: Iterable[CubinRecord],
    cells: Iterable[tuple[Cell, Plan, tuple[Proof, ...], str]],
    required_driver: Mapping[str, int] | None = None,
    parameter_dtypes: Mapping[Cell, tuple[str, ...]] | None = None,
) -> Manifest:
    """A Manifest from (cell, plan, proofs, evidence sha256) rows; equal plans are stored once.

    ``parameter_dtypes`` of cells that admit more than BF16.
    """
    dtypes = parameter_dtypes or {}
    rows = [(cell, plan, plan_digest(plan), proofs, evidence) for cell, plan, proofs, evidence in cells]
    return Manifest(
        generator=generator,
        cubins={record.sha256: record for record in cubins},
        plans={digest: plan for _, plan, digest, _, _ in rows},
        entries={
            cell: Entry(
                cell=cell,
                plan=digest,
                products=tuple(sorted(proofs)),
                evidence=evidence,
                parameter_dtypes=dtypes.get(cell, BF16_ALONE),
            )
            for cell, _, digest, proofs, evidence in rows
        },
        required_driver=dict(required_driver or {}),
    )


def to_bytes(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: canonical, so that equal manifests are equal bytes."""
    return _canonical(
        {
            "schema": SCHEMA,
            "generator": manifest.generator,
            "cubins": {sha: _cubin_json(record) for sha, record in manifest.cubins.items()},
            "plans": {digest: plan.to_json() for digest, plan in manifest.plans.items()},
            "entries": {cell.key: _entry_json(entry) for cell, entry in manifest.entries.items()},
            "required_driver": dict(manifest.required_driver),
        }
    )


def sidecar(data: bytes) -> bytes:
    """The bytes of ``manifest.sha256`` for these bytes of ``manifest.json``."""
    return f"{hashlib.sha256(data).hexdigest()}  {FILE}\n".encode()


def load(path: Path) -> Manifest:
    """The manifest at ``path``: manifest.json, or the folder that holds it. Raises ManifestError."""
    file = path / FILE if path.is_dir() else path
    data = _read(file)
    recorded = _read(file.with_name(SIDECAR)).split()
    digest = hashlib.sha256(data).hexdigest()
    if recorded[:1] != [digest.encode()]:
        found = f"{recorded[0].decode(errors='replace') if recorded else 'nothing'} in {SIDECAR}"
        raise ManifestError(file, what="sha256", expected=digest, found=found)
    return from_bytes(data, file)


def from_bytes(data: bytes, name: object = FILE) -> Manifest:
    """The inverse of ``to_bytes``. Raises ManifestError for bytes that are no manifest of schema 1."""
    try:
        tree = json.loads(data)
        schema = tree["schema"]
    except (ValueError, TypeError, KeyError) as cause:
        raise ManifestError(name, what="content", expected="a JSON object with a schema", found=cause) from cause
    if schema != SCHEMA:
        raise ManifestError(name, what="schema", expected=SCHEMA, found=schema)
    try:
        return _manifest_of(tree)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as cause:
        found = f"{type(cause).__name__}: {cause}"
        raise ManifestError(name, what="content", expected="the records of schema 1", found=found) from cause


def _manifest_of(tree: dict[str, Any]) -> Manifest:
    return Manifest(
        generator=tree["generator"],
        cubins={sha: _cubin_of(sha, record) for sha, record in tree["cubins"].items()},
        plans={digest: Plan.from_json(plan) for digest, plan in tree["plans"].items()},
        entries={cell: _entry_of(cell, tree["entries"][cell.key]) for cell in map(Cell.parse, tree["entries"])},
        required_driver=tree.get("required_driver", {}),
    )


def _cubin_json(record: CubinRecord) -> dict[str, Any]:
    fields = {name: value for name, value in vars(record).items() if name != "sha256"}
    return {**fields, "kernels": {symbol: vars(facts) for symbol, facts in record.kernels.items()}}


def _cubin_of(sha: str, data: dict[str, Any]) -> CubinRecord:
    kernels = {symbol: KernelFacts(**facts) for symbol, facts in data["kernels"].items()}
    return CubinRecord(**{**data, "sha256": sha, "kernels": kernels})


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "plan": entry.plan,
        "products": [{"product": p.product, "level": p.level} for p in entry.products],
        "evidence": entry.evidence,
        "parameter_dtypes": list(entry.parameter_dtypes),
    }


def _entry_of(cell: Cell, data: dict[str, Any]) -> Entry:
    return Entry(
        cell=cell,
        plan=data["plan"],
        products=tuple(Proof(**proof) for proof in data["products"]),
        evidence=data["evidence"],
        parameter_dtypes=tuple(data.get("parameter_dtypes", BF16_ALONE)),
    )


def _canonical(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as cause:
        raise ManifestError(file, what="file", expected="a readable file", found=cause) from cause
