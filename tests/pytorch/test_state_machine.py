"""Thousands of drawn calls on the emulated driver; 10,000 of them with KF_LONG=1, some hundred in `make test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.conftest import Small
from tests.pytorch.conftest import ROOT

LONG = bool(os.environ.get("KF_LONG"))


def test_drawn_calls(small: Small) -> None:
    """No wrong result, no route but the explained one, no deadlock, no growth of memory or handles."""
    examples, steps, real = (120, 50, 520) if LONG else (8, 15, 4)
    command = [sys.executable, "-m", "tests.pytorch.machine", str(examples), str(steps), str(real)]
    environment = {**os.environ, "KF_DATA": str(small.data), "KF_STORE": str(small.selection.workspace.store_root)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    print(counts)
    assert counts["calls"] >= (10_000 if LONG else 200)
    assert counts["real"] >= (500 if LONG else 4)
    assert min(counts["generic"], counts["kernels"], counts["faults"], counts["threads"]) > 0
    assert counts["grown_mib"] < 600
