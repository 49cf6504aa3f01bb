"""Provenance: an in-toto statement of what a bundle's cubins were made from, by whom and how.

The form is in-toto Statement v1 (https://in-toto.io/Statement/v1) with the predicate SLSA provenance v1
(https://slsa.dev/spec/v1.0/provenance). Subjects are cubins; byproducts are all files of the bundle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kernel_factory import toolchain
from kernel_factory.artifact import Artifact

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://slsa.dev/provenance/v1"
BUILD: Final = "urn:kernel-factory:sm-bundle:1"
SOURCES: Final = "kernel_factory and kf_runtime sources"


class ProvenanceError(Exception):
    """A statement that is missing, of another form, or about other sources than these."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who built, from which commit, with which command. ``clean``: the sources are those of the commit.

    ``repository``, ``builder`` and ``run`` are URIs.
    """

    repository: str
    commit: str
    clean: bool
    builder: str
    run: str
    command: str


def subject_name(artifact: Artifact) -> str:
    """What a statement calls a cubin."""
    return f"{artifact.spec.key} for {artifact.sm}"


def statement(artifacts: Iterable[Artifact], files: Mapping[str, str], sm: str, origin: Origin) -> dict[str, Any]:
    """The statement about these cubins. ``files``: every other name in the bundle, with its sha256."""
    made = {subject_name(artifact): artifact for artifact in artifacts}
    return {
        "_type": STATEMENT,
        "subject": [_resource(name, made[name].cubin) for name in sorted(made)],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {"sm": sm, "command": origin.command},
                "internalParameters": {"toolchains": sorted({a.toolchain for a in made.values()})},
                "resolvedDependencies": [
                    {
                        "uri": origin.repository,
                        "digest": {"gitCommit": origin.commit},
                        "annotations": {"clean": origin.clean},
                    },
                    _resource(SOURCES, toolchain.sources()),
                    {"uri": f"pkg:pypi/nvidia-cutlass-dsl@{toolchain.DSL_VERSION}"},
                    {"uri": f"pkg:pypi/apache-tvm-ffi@{toolchain.TVM_FFI_VERSION}"},
                ],
            },
            "runDetails": {
                "builder": {"id": origin.builder},
                "metadata": {"invocationId": origin.run},
                "byproducts": [_resource(name, files[name]) for name in sorted(files)],
            },
        },
    }


def subjects(data: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of every cubin that a statement names. Raises ProvenanceError for another form."""
    return _named(data, lambda found: found["subject"])


def files(data: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of every file that a statement names. Raises ProvenanceError for another form."""
    return _named(data, lambda found: found["predicate"]["runDetails"]["byproducts"])


def require_ours(data: Mapping[str, Any], sm: str) -> None:
    """Raises ProvenanceError unless the statement is of this form, of this SM, and about exactly these sources."""
    for field, expected in (("_type", STATEMENT), ("predicateType", PREDICATE)):
        _require(field, expected, data.get(field))
    try:
        definition = data["predicate"]["buildDefinition"]
        named = {d.get("name"): d["digest"].get("sha256") for d in definition["resolvedDependencies"] if "digest" in d}
        found_sm, kind = definition["externalParameters"]["sm"], definition["buildType"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ProvenanceError(f"provenance: expected SLSA provenance v1; found none: {error!r}") from error
    _require("buildType", BUILD, kind)
    _require("sm", sm, found_sm)
    _require(SOURCES, toolchain.sources(), named.get(SOURCES))


def _require(what: str, expected: str, found: object) -> None:
    if found != expected:
        raise ProvenanceError(
            f"provenance: {what}: expected {expected}; found {found}; build the bundle from this commit"
        )


def _named(data: Mapping[str, Any], part: Any) -> dict[str, str]:
    try:
        rows = part(data)
        found = {row["name"]: row["digest"]["sha256"] for row in rows}
    except (KeyError, TypeError) as error:
        raise ProvenanceError(f"provenance: expected resources with name and sha256; found none: {error!r}") from error
    if len(found) != len(rows):
        raise ProvenanceError("provenance: expected one entry a name; found a name twice")
    return found


def _resource(name: str, sha256: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": sha256}}
