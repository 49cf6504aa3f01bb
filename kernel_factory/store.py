"""Store: content-addressed blobs, and records that commit them.

A blob is named by its sha256. A record is one JSON file named by the digest of what it was
made FROM; it is renamed into place after every blob it names is on disk, so the record is the
commit marker: a kill at any moment leaves blobs nobody names, never a record without its blobs.
Two processes that make the same record write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

UNFINISHED: Final = ".tmp-"  # how the name of a file begins until it is renamed into place


class StoreError(Exception):
    """The store holds something other than what its name says."""


def sha256(data: bytes) -> str:
    """Hexadecimal sha256."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    return sha256(canonical(value))


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside ``path`` and rename: a reader sees the old bytes or the new ones, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk names no file by itself
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True, kw_only=True)
class Store:
    """A folder of ``blobs/`` and ``records/<kind>/``."""

    root: Path

    def put_blob(self, data: bytes) -> str:
        """Store bytes, in place of damaged ones too; their sha256 is returned."""
        name = sha256(data)
        if not self.holds(name):
            write_atomically(self._blob(name), data)
        return name

    def holds(self, name: str) -> bool:
        """Whether the bytes of that sha256 are here, whole."""
        path = self._blob(name)
        return path.exists() and sha256(path.read_bytes()) == name

    def blob(self, name: str) -> bytes:
        """The bytes of that sha256. Raises StoreError if they are missing or differ."""
        path = self._blob(name)
        if not path.exists():
            raise StoreError(f"blob {name}: expected in {self.root}; found none; run `kf build` to make it again")
        data = path.read_bytes()
        if sha256(data) != name:
            raise StoreError(f"blob {name}: its bytes hash to {sha256(data)}; run `kf build` to make it again")
        return data

    def put_record(self, kind: str, key: str, body: dict[str, Any]) -> None:
        """Commit a record under the digest of its inputs."""
        write_atomically(self._record(kind, key), canonical({"body": body, "digest": digest(body)}))

    def record(self, kind: str, key: str) -> dict[str, Any] | None:
        """The record, or None where there is none. Raises StoreError if it was damaged."""
        path = self._record(kind, key)
        if not path.exists():
            return None
        try:
            data: dict[str, Any] = json.loads(path.read_bytes())
            body: dict[str, Any] = data["body"]
            intact = digest(body) == data["digest"]
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            raise StoreError(f"record {kind}/{key}: damaged; delete {path} and run the stage again")
        return body

    def drop_record(self, kind: str, key: str) -> None:
        """Forget a record, so that it is made again."""
        self._record(kind, key).unlink(missing_ok=True)

    @contextmanager
    def making(self, kind: str, key: str) -> Iterator[None]:
        """Hold the lock under which a record is made, so that two processes do not both work on it."""
        path = self._record(kind, key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path):
            yield

    def _blob(self, name: str) -> Path:
        return self.root / "blobs" / name[:2] / name

    def _record(self, kind: str, key: str) -> Path:
        return self.root / "records" / kind / f"{key}.json"
