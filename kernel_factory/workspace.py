"""Workspace: where a checkout keeps its store, allow-lists and packaged data. Reads the environment once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kernel_factory.store import Store


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The folders of one checkout."""

    root: Path
    store_root: Path
    allowlists: Path
    data: Path
    lock: Path

    @property
    def store(self) -> Store:
        """The content-addressed store."""
        return Store(root=self.store_root)

    @property
    def policy(self) -> Path:
        """What each op demands of its evidence."""
        return self.allowlists / "policy.toml"

    @property
    def families(self) -> Path:
        """One folder a family."""
        return self.root / "kernel_factory" / "families"

    @property
    def evidence(self) -> Path:
        """Committed evidence files."""
        return self.allowlists / "evidence"


def find() -> Workspace:
    """The workspace of this checkout. ``KF_STORE``, ``KF_ALLOWLISTS`` and ``KF_DATA`` move its parts."""
    root = Path(__file__).resolve().parent.parent
    return Workspace(
        root=root,
        store_root=Path(
            os.environ.get("KF_STORE") or root / ".store"
        ).absolute(),  # workers get it, whose folder differs
        allowlists=Path(os.environ.get("KF_ALLOWLISTS") or root / "allowlists"),
        data=Path(os.environ.get("KF_DATA") or root / "runtime" / "kf_runtime" / "data"),
        lock=root / "cubins" / "cubins.lock",
    )
