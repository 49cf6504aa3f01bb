"""Second opinion: `sentryward`, a static verifier of synchronization and memory races, on the same PTX.

It knows nothing of our emulator and tries every schedule, for the first blocks of a launch. What
it says stands beside the emulator's findings; nothing in admission reads it. Alpha software: it
answers "unsupported" for much that is not Blackwell code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kf_runtime.plan import Launch

SCHEMA: Final = "spverify.kernel-input/v1"
SECONDS: Final = 60
_PARAMETER: Final = re.compile(r"\.param [^\n]*?([\w$]+_param_\d+)")
_SCALARS: Final = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """``result`` is sentryward's word (``race_free``, ``potential_race``, ``unsupported``, ``timeout`` …)."""

    kernel: str
    result: str
    synchronization: str
    memory: str
    said: tuple[str, ...]

    @property
    def objects(self) -> bool:
        """Whether it found a fault, as opposed to giving up."""
        return self.result in ("not_wellsynced", "potential_race", "invalid_lifecycle")


def configuration(launch: Launch, ptx: str, blocks: int = 1) -> dict[str, Any]:
    """The input document for the first ``blocks`` blocks of a launch along x: dimensions and scalar parameters."""
    names = _PARAMETER.findall(ptx[ptx.index(".entry") :].split(")\n")[0])
    addressed = {slot.parameter for slot in launch.slots}
    scalars = [
        {"parameter": name, "type": _SCALARS[len(image)], "value": int.from_bytes(image, "little")}
        for i, (name, image) in enumerate(zip(names, launch.images, strict=True))
        if i not in addressed and len(image) in _SCALARS
    ]
    dimensions: dict[str, Any] = {
        "grid_dim": [min(blocks, launch.grid[0]), 1, 1],
        "block_dim": list(launch.block),
        "dynamic_shared_bytes": launch.shared_bytes,
    }
    return {"schema": SCHEMA, "launch": dimensions, "arguments": scalars}


def ask(launch: Launch, ptx: str, blocks: int = 1, seconds: int = SECONDS) -> Opinion:
    """Run sentryward on one launch's PTX. Raises FileNotFoundError where it is not installed."""
    with tempfile.TemporaryDirectory(prefix="kf-second-") as folder:
        (Path(folder) / "kernel.ptx").write_text(ptx)
        (Path(folder) / "input.json").write_text(json.dumps(configuration(launch, ptx, blocks)))
        command = [str(_program()), "kernel.ptx", "--input", "input.json", "--timeout", str(seconds)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    return Opinion(
        kernel=launch.kernel,
        result=answer["result"],
        synchronization=answer["checks"]["synchronization"],
        memory=answer["checks"]["memory"],
        said=tuple(str(item.get("message") or item.get("code")) for item in answer["diagnostics"]),
    )


def _program() -> Path:
    program = Path(sys.executable).with_name("sentryward")
    if not program.exists():
        raise FileNotFoundError(
            "sentryward: expected beside this Python; found none; run `pip install sentryward==0.1.1`"
        )
    return program
