"""Bundles of one SM: what joins into a wheel is exactly what was proved and admitted; a changed byte joins nothing."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kf_runtime import manifest

from kernel_factory import bundle, provenance
from kernel_factory.bundle import Bundle, BundleError
from kernel_factory.package import Packaged, PackageError
from kernel_factory.provenance import Origin
from kernel_factory.store import canonical, sha256
from kernel_factory.validate import NotProved
from kernel_factory.workspace import Workspace
from tests.conftest import SMALL, Small
from tests.e2e.conftest import ROOT

SM = "sm_90a"
ORIGIN = Origin(
    repository="https://example.org/kf", commit="0" * 40, clean=True, builder="urn:test", run="1", command="make"
)
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def made(small: Small) -> Bundle:
    """The bundle of the small set."""
    return bundle.make(small.selection, SM, ORIGIN)


@pytest.fixture
def workspace(small: Small, tmp_path: Path) -> Workspace:
    """The small set's allow-lists; a store and a data folder that hold nothing yet."""
    return replace(small.selection.workspace, store_root=tmp_path / "store", data=tmp_path / "data")


def _written(made: Bundle, folder: Path, name: str = SM) -> Path:
    path = folder / f"{name}.tar"
    path.write_bytes(made.to_bytes())
    return path


def _join(workspace: Workspace, path: Path, sms: tuple[str, ...] = (SM,)) -> Packaged:
    return bundle.join(workspace, [bundle.read(path)], sms, SMALL)


def _restated(made: Bundle, files: Mapping[str, bytes]) -> Bundle:
    """A bundle of these files whose statement is true of them: what a forger would send."""
    bare = replace(made, files=files)
    hashes = {name: sha256(data) for name, data in files.items()}
    return replace(bare, statement=provenance.statement(bare.artifacts, hashes, SM, ORIGIN))


def _first(made: Bundle, start: str) -> str:
    return next(name for name in sorted(made.files) if name.startswith(start))


def _cubin(made: Bundle) -> str:
    return f"blobs/{made.artifacts[0].cubin}"


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_join_packages_exactly_the_admitted(made: Bundle, small: Small, workspace: Workspace, tmp_path: Path) -> None:
    """Through the tar and an empty store: the same manifest, to the byte, as packaging where it was built."""
    packaged = _join(workspace, _written(made, tmp_path))
    assert packaged.cells == len(small.built) == 3
    assert (workspace.data / manifest.FILE).read_bytes() == (small.data / manifest.FILE).read_bytes()
    assert {cell.key for cell in manifest.load(workspace.data).entries} == {b.cell.key for b in small.built}


def test_statement_names_every_cubin(made: Bundle, small: Small) -> None:
    """in-toto v1 with SLSA provenance v1: cubins as subjects, commit, sources, toolchain and command; equal bytes."""
    assert made.statement["_type"] == "https://in-toto.io/Statement/v1"
    assert made.statement["predicateType"] == "https://slsa.dev/provenance/v1"
    digests = {row["digest"]["sha256"] for row in made.statement["subject"]}
    assert digests == {artifact.cubin for built in small.built for artifact in built.artifacts}
    definition = made.statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"sm": SM, "command": "make"}
    assert definition["resolvedDependencies"][0]["digest"] == {"gitCommit": "0" * 40}
    assert "nvidia-cutlass-dsl 4.7.0" in definition["internalParameters"]["toolchains"][0]
    assert made.to_bytes() == bundle.make(small.selection, SM, ORIGIN).to_bytes()


def _cubin_changed(made: Bundle) -> Bundle:
    return replace(made, files={**made.files, _cubin(made): _flipped(made.files[_cubin(made)])})


def _cubin_changed_and_hashed(made: Bundle) -> Bundle:
    return _restated(made, _cubin_changed(made).files)


def _cubin_forged(made: Bundle) -> Bundle:
    """A new cubin under its own hash, named by the artifact record and by the statement."""
    files = dict(made.files)
    record = next(n for n in files if n.startswith("records/artifact/") and _cubin(made)[6:] in files[n].decode())
    forged = _flipped(files.pop(_cubin(made)))
    files[f"blobs/{sha256(forged)}"] = forged
    files[record] = canonical({**json.loads(files[record]), "cubin": sha256(forged)})
    return _restated(made, files)


def _without_a_kernel(made: Bundle) -> Bundle:
    gone = _first(made, "records/artifact/")
    return _restated(made, {name: data for name, data in made.files.items() if name != gone})


def _without_a_proof(made: Bundle) -> Bundle:
    gone = _first(made, "records/proof/")
    return _restated(made, {name: data for name, data in made.files.items() if name != gone})


def _with_a_finding(made: Bundle) -> Bundle:
    name = _first(made, "records/proof/")
    proof = json.loads(made.files[name])
    proof["findings"]["race"] = ["a race"]
    return _restated(made, {**made.files, name: canonical(proof)})


def _with_a_stray_file(made: Bundle) -> Bundle:
    return replace(made, files={**made.files, "blobs/" + "0" * 64: b"stray"})


def _with_a_path(made: Bundle) -> Bundle:
    return _restated(made, {**made.files, "../../outside": b"stray"})


def _of_other_sources(made: Bundle) -> Bundle:
    statement: dict[str, Any] = json.loads(json.dumps(made.statement))
    for row in statement["predicate"]["buildDefinition"]["resolvedDependencies"]:
        if row.get("name") == provenance.SOURCES:
            row["digest"]["sha256"] = "0" * 64
    return replace(made, statement=statement)


def _of_another_form(made: Bundle) -> Bundle:
    return replace(made, statement={**made.statement, "predicateType": "https://slsa.dev/provenance/v0.2"})


def _without_a_statement(made: Bundle) -> Bundle:
    return replace(made, statement={})


FORGED: list[tuple[Callable[[Bundle], Bundle], str]] = [
    (_cubin_changed, "files: blobs/.*: expected .*; found"),
    (_cubin_changed_and_hashed, "blobs: .*: expected .*; found"),
    (_cubin_forged, "cubins of the allow-list: .*(expected nothing; found a cubin|expected a cubin; found nothing)"),
    (_without_a_kernel, "cubins of the allow-list: .*found nothing"),
    (_without_a_proof, "not proved"),
    (_with_a_finding, "its proof is not admitted: mode race: 1 findings"),
    (_with_a_stray_file, "files: blobs/0*: expected nothing; found"),
    (_with_a_path, "expected blobs, records and provenance.json; found '../../outside'"),
    (_of_other_sources, "sources: expected .*; found 0{64}; build the bundle from this commit"),
    (_of_another_form, "predicateType: expected https://slsa.dev/provenance/v1; found"),
    (_without_a_statement, "_type: expected .*; found None"),
]


@pytest.mark.parametrize(("forge", "reason"), FORGED, ids=[forge.__name__[1:] for forge, _ in FORGED])
def test_changed_bundle_joins_nothing(
    made: Bundle, workspace: Workspace, tmp_path: Path, forge: Callable[[Bundle], Bundle], reason: str
) -> None:
    """Each change alone is refused with its reason, and no data folder appears."""
    with pytest.raises((BundleError, NotProved), match=reason):
        _join(workspace, _written(forge(made), tmp_path))
    assert not workspace.data.exists()


def test_links_are_refused(made: Bundle, tmp_path: Path) -> None:
    """A tar entry that is no plain file is refused before it is read."""
    path = _written(made, tmp_path)
    entry = tarfile.TarInfo("blobs/" + "1" * 64)
    entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(path, "a") as tar:
        tar.addfile(entry, io.BytesIO())
    with pytest.raises(BundleError, match="found 'blobs/1111"):
        bundle.read(path)


def test_bundle_of_another_sm_is_refused(made: Bundle, tmp_path: Path) -> None:
    """A bundle under another SM's name is refused by its statement."""
    with pytest.raises(BundleError, match="sm: expected sm_80; found sm_90a"):
        bundle.read(_written(made, tmp_path, "sm_80"))


def test_compare_takes_the_bundle_of_its_own_sm(made: Bundle, tmp_path: Path) -> None:
    """`tools/bundle.py compare` with the tar of another SM is one sentence, not a line a kernel."""
    command = [sys.executable, ROOT / "tools" / "bundle.py", "compare", "--sm", "sm_80", _written(made, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: --sm: expected {SM}, as ") and done.stderr.endswith("; found sm_80\n")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: b"", "empty file"),
        (lambda data: data[: len(data) // 2], "unexpected end of data"),
        (gzip.compress, "invalid header"),
    ],
    ids=["empty", "cut", "compressed"],
)
def test_what_is_no_whole_tar_is_refused(
    made: Bundle, tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    """A file that is empty, cut short or compressed is refused in one line."""
    path = _written(made, tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BundleError, match=reason) as caught:
        bundle.read(path)
    assert "\n" not in str(caught.value)


def test_every_sm_needs_its_bundle(made: Bundle, workspace: Workspace, tmp_path: Path) -> None:
    """A join of two SMs with one bundle packages neither."""
    with pytest.raises(BundleError, match="bundles: sm_80: expected one; found nothing"):
        _join(workspace, _written(made, tmp_path), (SM, "sm_80"))
    assert not workspace.data.exists()


def test_rows_that_changed_since_are_refused(made: Bundle, small: Small, workspace: Workspace, tmp_path: Path) -> None:
    """Allow-lists that name other cubins refuse the bundle at the join, and the making of another."""
    lists = tmp_path / "allowlists"
    old = next(small.selection.workspace.allowlists.glob(f"*/{SM}.toml"))
    new = lists / old.parent.name / old.name
    new.parent.mkdir(parents=True)
    new.write_text(old.read_text().replace(made.artifacts[0].cubin, "0" * 64))
    other = replace(workspace, allowlists=lists)
    with pytest.raises(BundleError, match=r"cubins of the allow-list: 0{64}: expected a cubin; found nothing"):
        _join(other, _written(made, tmp_path))
    with pytest.raises(PackageError, match="the allow-list names cubins"):
        bundle.make(
            replace(small.selection, workspace=replace(small.selection.workspace, allowlists=lists)), SM, ORIGIN
        )
