"""Bundle: what one SM's build hands on, in one tar: blobs, records, and the provenance of its cubins.

A bundle comes from another machine and is not believed: every file must have the hash that the provenance states,
every cubin the hash that an allow-list row names, every cell a proof that the policy admits. Anything missing, left
over or different raises, and nothing is packaged.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kf_runtime import manifest

from kernel_factory import allowlist, compile, package, pipeline, provenance, validate
from kernel_factory.admit import Rejected
from kernel_factory.allowlist import Row
from kernel_factory.artifact import Artifact
from kernel_factory.package import Packaged
from kernel_factory.pipeline import Selection
from kernel_factory.provenance import Origin, ProvenanceError
from kernel_factory.store import Store, canonical, sha256
from kernel_factory.workspace import Workspace

STATEMENT: Final = "provenance.json"
BUILT: Final = "built"
_KINDS: Final = "|".join((compile.KIND, BUILT, validate.KIND, validate.PARAMETERS))
_NAME: Final = re.compile(rf"blobs/[0-9a-f]{{64}}|records/({_KINDS})/[0-9a-f]{{64}}")


class BundleError(Exception):
    """A bundle that is damaged, incomplete, or not what the allow-lists name."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The admitted cells of one SM: ``files`` by their name in the tar, and the statement about them."""

    sm: str
    files: Mapping[str, bytes]
    statement: Mapping[str, Any]

    @property
    def artifacts(self) -> list[Artifact]:
        """The kernels that the artifact records describe."""
        prefix = f"records/{compile.KIND}/"
        return [Artifact.from_json(json.loads(data)) for name, data in self.files.items() if name.startswith(prefix)]

    def to_bytes(self) -> bytes:
        """The tar: equal bundles are equal bytes."""
        files = {**self.files, STATEMENT: json.dumps(self.statement, indent=1, sort_keys=True).encode() + b"\n"}
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for name in sorted(files):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(files[name]), 0o644
                tar.addfile(entry, io.BytesIO(files[name]))
        return out.getvalue()

    def put(self, store: Store) -> None:
        """Put everything into a store: blobs first, then the records that name them."""
        for name, data in sorted(self.files.items()):
            if name.startswith("blobs/"):
                store.put_blob(data)
            else:
                _, kind, key = name.split("/")
                store.put_record(kind, key, json.loads(data))


def make(selection: Selection, sm: str, origin: Origin) -> Bundle:
    """The bundle of the selected cells that are admitted. Raises NotBuilt, NotProved, PackageError or BundleError."""
    workspace, store = selection.workspace, selection.workspace.store
    families = {cell: family for family, cell in selection.rows}
    artifacts: dict[str, Artifact] = {}
    files: dict[str, bytes] = {}
    admitted = pipeline.admitted(selection)
    package.build_manifest(store, admitted)  # raises where a row names other cubins than were built
    for built, _ in admitted:
        found, key = pipeline.identity(workspace, families[built.cell], built.cell)
        files[f"records/{BUILT}/{key}"] = canonical(built.to_json())
        for artifact in found:
            artifacts[compile.record_key(families[built.cell], artifact.spec, sm)] = artifact
        validate.evidence_of(store, built)
        for kind, name in validate.records_of(store, built):
            files[f"records/{kind}/{name}"] = canonical(store.record(kind, name))
    if not artifacts:
        raise BundleError(f"{sm}: none of the selected cells is admitted; run `kf admit`")
    for key, artifact in artifacts.items():
        files[f"records/{compile.KIND}/{key}"] = canonical(artifact.to_json())
        files |= {f"blobs/{name}": store.blob(name) for name in (artifact.cubin, artifact.ptx, artifact.host)}
    hashes = {name: sha256(data) for name, data in files.items()}
    return Bundle(sm=sm, files=files, statement=provenance.statement(artifacts.values(), hashes, sm, origin))


def read(path: Path) -> Bundle:
    """The bundle of a tar whose name is its SM's. Raises BundleError unless it is whole and agrees with itself."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            files = {entry.name: _contents(tar, entry) for entry in tar}
        if STATEMENT not in files:
            raise BundleError(f"expected {STATEMENT}; found none among {len(files)} files; fetch or make it again")
        statement = json.loads(files.pop(STATEMENT))
        bundle = Bundle(sm=path.stem, files=files, statement=statement)
        provenance.require_ours(statement, bundle.sm)
        _require_same("files", provenance.files(statement), {name: sha256(data) for name, data in files.items()})
        made = {provenance.subject_name(artifact): artifact.cubin for artifact in bundle.artifacts}
        _require_same("cubins", provenance.subjects(statement), made)
        blobs = {name: f"blobs/{sha256(data)}" for name, data in files.items() if name.startswith("blobs/")}
        _require_same("blobs", {name: name for name in blobs}, blobs)
    except (OSError, tarfile.TarError, KeyError, TypeError, ValueError, ProvenanceError, BundleError) as error:
        raise BundleError(f"{path}: {error}") from error
    return bundle


def _contents(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(entry) if entry.isreg() else None
    if file is None or not (entry.name == STATEMENT or _NAME.fullmatch(entry.name)):
        raise BundleError(f"expected blobs, records and {STATEMENT}; found {entry.name!r}")
    return file.read()


def _require_same(what: str, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raises BundleError naming the first entry that two tables do not share."""
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise BundleError(
                f"{what}: {name}: expected {expected.get(name, 'nothing')}; found {found.get(name, 'nothing')}"
            )


def differences(bundle: Bundle, selection: Selection) -> list[str]:
    """Where the selection's own store has another cubin or PTX than the bundle, one line each."""
    ours = {(a.spec.key, a.sm): a for built, _ in pipeline.admitted(selection) for a in built.artifacts}
    theirs = {(a.spec.key, a.sm): a for a in bundle.artifacts}
    lines = []
    for name in sorted({*ours, *theirs}):
        for part in ("cubin", "ptx"):
            mine, other = (getattr(side.get(name), part, "nothing") for side in (ours, theirs))
            if mine != other:
                lines.append(f"{' for '.join(name)}: {part}: the bundle has {other}; rebuilt {mine}")
    return lines


def join(workspace: Workspace, bundles: Iterable[Bundle], sms: tuple[str, ...], patterns: tuple[str, ...]) -> Packaged:
    """Package the bundles of these SMs: exactly the rows of their allow-lists. Raises BundleError.

    The workspace's store should be new: what it holds besides counts as built.
    """
    given = list(bundles)
    _require_same("bundles", dict.fromkeys(sms, "one"), _counted(bundle.sm for bundle in given))
    rows = {sm: _rows(workspace, sm, patterns) for sm in sms}
    for bundle in given:
        named = {cubin: "a cubin" for row in rows[bundle.sm] for cubin in row.cubins}
        made = dict.fromkeys(provenance.subjects(bundle.statement).values(), "a cubin")
        try:
            _require_same("cubins of the allow-list", named, made)
        except BundleError as error:
            raise BundleError(f"bundle {bundle.sm}: {error}; run `kf admit` and commit the allow-lists") from error
    for bundle in given:
        bundle.put(workspace.store)
    return _package(pipeline.select(workspace, (), sms, patterns), [row for sm in sms for row in rows[sm]])


def _counted(names: Iterable[str]) -> dict[str, str]:
    counts: dict[str, str] = {}
    for name in names:
        counts[name] = "one" if name not in counts else "two"
    return counts


def _rows(workspace: Workspace, sm: str, patterns: tuple[str, ...]) -> list[Row]:
    """The rows of every op's allow-list on an SM."""
    ops = sorted(path.parent.name for path in workspace.allowlists.glob(f"*/{sm}.toml"))
    rows = [row for op in ops for row in allowlist.read(workspace.allowlists, op, sm)]
    return [row for row in rows if pipeline.matches(row.cell, patterns)]


def _package(selection: Selection, rows: list[Row]) -> Packaged:
    """Judge the proofs again, package, and compare what was packaged with the rows."""
    workspace, wanted = selection.workspace, {row.cell for row in rows}
    kept = tuple((family, cell) for family, cell in selection.rows if cell in wanted)
    ours = Selection(workspace=workspace, rows=kept)
    _require_same("cells", {cell.key: "built" for cell in wanted}, {cell.key: "built" for _, cell in kept})
    for evidence, verdict in pipeline.judge(workspace, pipeline.emulated(ours)):
        if isinstance(verdict, Rejected):
            raise BundleError(f"{evidence.cell}: its proof is not admitted: {'; '.join(verdict.reasons)}")
    packaged = pipeline.pack(ours)
    entries = manifest.load(workspace.data).entries
    _require_same("cells", {cell.key: "packaged" for cell in wanted}, {cell.key: "packaged" for cell in entries})
    return packaged
