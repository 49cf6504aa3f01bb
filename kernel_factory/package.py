"""Package: admitted cells -> manifest.json and cubins in the wheel's data folder, and cubins.lock.

Cubins are written before the manifest that names them, and the manifest's sidecar last: the
runtime refuses a manifest without its sidecar, so a kill in the middle packages nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kf_runtime import manifest as manifests
from kf_runtime.manifest import CubinRecord, KernelFacts, Manifest, Proof

from kernel_factory.allowlist import Row
from kernel_factory.built import BuiltCell
from kernel_factory.store import UNFINISHED, Store, write_atomically

GENERATOR = "kernel-factory 0.1.0"
REQUIRED_DRIVER = 13000  # cubins come from CUDA 13 tools: any driver of that major version loads them


class PackageError(Exception):
    """An allow-list row and the built cell differ."""


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """What went into the wheel: cells, distinct cubins and their bytes."""

    cells: int
    cubins: int
    cubin_bytes: int
    manifest_bytes: int


def build_manifest(store: Store, admitted: list[tuple[BuiltCell, Row]]) -> Manifest:
    """The manifest of these cells. Raises PackageError where a row names other cubins than were built."""
    for built, row in admitted:
        hashes = tuple(artifact.cubin for artifact in built.artifacts)
        if hashes != row.cubins:
            raise PackageError(
                f"{built.cell}: the allow-list names cubins {', '.join(h[:12] for h in row.cubins)}; built were "
                f"{', '.join(h[:12] for h in hashes)}; run `kf validate` and `kf admit`"
            )
    return manifests.build(
        generator=GENERATOR,
        cubins=[_record(store, built, i) for built, _ in admitted for i in range(len(built.artifacts))],
        cells=[
            (
                built.cell,
                built.plan,
                tuple(Proof(product=p.product, level=p.level) for p in row.proofs),
                row.proofs[0].evidence,
            )
            for built, row in admitted
        ],
        parameter_dtypes={built.cell: row.parameter_dtypes for built, row in admitted},
        required_driver={built.cell.sm: REQUIRED_DRIVER for built, _ in admitted},
    )


def write(store: Store, data: Path, manifest: Manifest) -> Packaged:
    """Put cubins, manifest and sidecar into ``data``; drop cubins that it does not name, and a killed run's files."""
    for record in manifest.cubins.values():
        path = data / record.file
        blob = store.blob(record.sha256)
        if not path.exists() or path.read_bytes() != blob:
            write_atomically(path, blob)
    text = manifests.to_bytes(manifest)
    (data / manifests.SIDECAR).unlink(missing_ok=True)
    write_atomically(data / manifests.FILE, text)
    write_atomically(data / manifests.SIDECAR, manifests.sidecar(text))
    named = {record.file for record in manifest.cubins.values()}
    for path in (*(data / "cubins").glob("*"), *data.glob(f"{UNFINISHED}*")):
        if f"cubins/{path.name}" not in named:
            path.unlink()
    return Packaged(
        cells=len(manifest.entries),
        cubins=len(manifest.cubins),
        cubin_bytes=sum(record.size for record in manifest.cubins.values()),
        manifest_bytes=len(text),
    )


def lock(admitted: list[tuple[BuiltCell, Row]], store: Store) -> bytes:
    """The bytes of cubins.lock: per cubin its hash, size, SM, kernel spec and toolchain."""
    rows: dict[str, dict[str, Any]] = {}
    for built, _ in admitted:
        for artifact in built.artifacts:
            rows[artifact.cubin] = {
                "cubin": artifact.cubin,
                "ptx": artifact.ptx,
                "size": len(store.blob(artifact.cubin)),
                "sm": artifact.sm,
                "kernel": artifact.spec.key,
                "toolchain": artifact.toolchain,
            }
    ordered = sorted(rows.values(), key=lambda row: (row["kernel"], row["sm"]))
    return ("[\n" + ",\n".join(json.dumps(row, sort_keys=True) for row in ordered) + "\n]\n").encode()


def _record(store: Store, built: BuiltCell, index: int) -> CubinRecord:
    artifact, facts = built.artifacts[index], built.facts[index]
    return CubinRecord(
        sha256=artifact.cubin,
        size=len(store.blob(artifact.cubin)),
        sm=artifact.sm,
        kernels={artifact.symbol: KernelFacts(registers=facts.registers, static_shared=facts.static_shared)},
        ptx_sha256=artifact.ptx,
        toolchain=artifact.toolchain,
    )
