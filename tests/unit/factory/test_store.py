"""The store: bytes are verified, records commit, two processes and a kill corrupt nothing."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_factory.cli import main
from kernel_factory.store import Store, StoreError, digest, sha256, write_atomically


def test_blob_round_trip(tmp_path: Path) -> None:
    """A blob comes back under its sha256."""
    store = Store(root=tmp_path)
    assert store.blob(store.put_blob(b"cubin")) == b"cubin"
    assert store.put_blob(b"cubin") == sha256(b"cubin")


def test_damaged_blob_is_refused(tmp_path: Path) -> None:
    """One flipped byte is an error that says what to do, never wrong bytes."""
    store = Store(root=tmp_path)
    name = store.put_blob(b"cubin")
    (tmp_path / "blobs" / name[:2] / name).write_bytes(b"cubim")
    with pytest.raises(StoreError, match="kf build"):
        store.blob(name)


def test_a_damaged_blob_is_written_again(tmp_path: Path) -> None:
    """Who makes the bytes anew, as the error says, gets them back."""
    store = Store(root=tmp_path)
    name = store.put_blob(b"cubin")
    (tmp_path / "blobs" / name[:2] / name).write_bytes(b"cub")
    assert not store.holds(name)
    store.put_blob(b"cubin")
    assert store.holds(name) and store.blob(name) == b"cubin"


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where there was no space, and neither a half-written file nor a temporary one stays."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/blobs/"):
            store.put_blob(b"cubin")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.blob(store.put_blob(b"cubin")) == b"cubin"


def test_a_store_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kf build` says which path, that nothing is lost, and what to do; no traceback."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KF_STORE", str(tmp_path / "file"))
    done = CliRunner().invoke(main, ["build", "--family", "trimul_mma", "--sm", "sm_90a", "--cell", "B1.N64.C64"])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "Not a directory" in done.output and "run the command again" in done.output


def test_missing_blob_names_the_next_step(tmp_path: Path) -> None:
    """A missing blob names the command that makes it."""
    with pytest.raises(StoreError, match="kf build"):
        Store(root=tmp_path).blob("0" * 64)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"body": {"a": 2}, "digest": "x"}'])
def test_damaged_record_is_refused(tmp_path: Path, damage: bytes) -> None:
    """An empty, cut or edited record is an error."""
    store = Store(root=tmp_path)
    store.put_record("kind", "key", {"a": 1})
    (tmp_path / "records" / "kind" / "key.json").write_bytes(damage)
    with pytest.raises(StoreError, match="damaged"):
        store.record("kind", "key")


def test_absent_record_is_none(tmp_path: Path) -> None:
    """No record is not an error: it is work to do."""
    assert Store(root=tmp_path).record("kind", "key") is None


def test_digest_ignores_key_order() -> None:
    """Equal values have equal digests whatever their order."""
    assert digest({"a": 1, "b": [1, 2]}) == digest(json.loads('{"b": [1, 2], "a": 1}'))
    assert digest({"a": 1}) != digest({"a": 2})


def _write_for_ever(path: Path, byte: int) -> None:
    while True:
        write_atomically(path, bytes([byte]) * 100_000)


def test_kill_in_the_middle_leaves_whole_files(tmp_path: Path) -> None:
    """Two writers killed at random moments: a reader sees all bytes of one of them."""
    path = tmp_path / "file"
    for round_ in range(6):
        writers = [multiprocessing.Process(target=_write_for_ever, args=(path, byte)) for byte in (65, 66)]
        for writer in writers:
            writer.start()
        time.sleep(0.05 + 0.01 * round_)
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
        data = path.read_bytes()
        assert len(data) == 100_000
        assert len(set(data)) == 1


def _count(root: Path, log: Path) -> None:
    store = Store(root=root)
    with store.making("kind", "key"):
        if store.record("kind", "key") is None:
            time.sleep(0.1)
            with log.open("a") as file:
                file.write("made\n")
            store.put_record("kind", "key", {"a": 1})


def test_two_processes_make_a_record_once(tmp_path: Path) -> None:
    """The second process waits for the first and finds its record."""
    log = tmp_path / "log"
    makers = [multiprocessing.Process(target=_count, args=(tmp_path, log)) for _ in range(3)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert log.read_text() == "made\n"
