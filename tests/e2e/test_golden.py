"""Golden vectors: recorded on the emulator, replayed through the wheel's driver layer, compared bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernel_factory import golden
from kernel_factory.built import BuiltCell
from kernel_factory.pipeline import Selection
from tests.e2e.conftest import ROOT


@pytest.fixture(scope="module")
def places(selection: Selection, built: list[BuiltCell], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The golden folders of one cell."""
    return golden.record(selection.workspace.store, built[2], 3, tmp_path_factory.mktemp("golden"))


def test_replay_on_the_emulated_driver(selection: Selection, places: list[Path]) -> None:
    """Each launch gives the recorded bits again."""
    environment = {**os.environ, "KF_STORE": str(selection.workspace.store_root)}
    command = [sys.executable, ROOT / "tools" / "golden.py", "replay", places[0].parent, "--emulated", "sm_90a"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 of ") == 3


def test_one_wrong_bit_is_told(places: list[Path]) -> None:
    """On integers one flipped bit is wrong; on random values it is counted."""
    for place, exact in zip(places, (False, True, False), strict=True):
        (file,) = place.glob("*.out")
        bits = np.frombuffer(file.read_bytes(), np.int16).copy()
        assert golden.compare(place, bits).right
        bits[bits != -1] ^= np.where(np.arange((bits != -1).sum()) == 0, 1, 0).astype(np.int16)
        found = golden.compare(place, bits)
        assert found.different == 1
        assert found.exact == exact
        assert found.right != exact


def test_the_integers_are_not_trivial(places: list[Path]) -> None:
    """The exact launch has a result that is neither zero nor constant."""
    (file,) = places[1].glob("*.out")
    assert len(np.unique(np.frombuffer(file.read_bytes(), np.int16))) > 50
