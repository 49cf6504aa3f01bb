"""Source lines: which line of a kernel's Python each PTX line comes from.

The kernel is compiled once more with line information. Its instructions are the same; only directives come on top,
so that the n-th statement of one text is the n-th of the other. Where they are not the same, nothing is claimed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_factory import toolchain
from kernel_factory.artifact import Artifact
from kernel_factory.family import KernelSpec
from kernel_factory.store import Store

KIND = "source_lines"
_DIRECTIVE = re.compile(r"^\s*(\.loc|\.file|\.section|\.target|//|\$L__(tmp|func)\w*:|$)")
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"')


def located(store: Store, spec: KernelSpec, sm: str, key: str) -> str:
    """The PTX of a kernel with line information, from the store or made now; empty where it does not compile.

    ``key`` names the kernel's record. It takes as long as the compilation itself, and may run beside it.
    """
    body = store.record(KIND, key)
    if body is None:
        body = {"ptx": _compiled(spec, sm)}
        store.put_record(KIND, key, body)
    return str(body["ptx"])


def match(plain: str, located: str) -> dict[int, str]:
    """Places of the lines of ``plain``, from the same code with .loc directives."""
    files = {found[1]: Path(found[2]).name for line in located.splitlines() if (found := _FILE.match(line))}
    places: list[tuple[str, str]] = []
    here = ""
    for line in located.splitlines():
        if found := _LOCATION.match(line):
            here = f"{files.get(found[1], '')}:{found[2]}"
        elif not _DIRECTIVE.match(line):
            places.append((line.strip(), here))
    statements = [(n, line.strip()) for n, line in enumerate(plain.splitlines(), 1) if not _DIRECTIVE.match(line)]
    if [text for _, text in statements] != [text for text, _ in places]:
        return {}
    return {n: place for (n, _), (_, place) in zip(statements, places, strict=True) if place}


def _compiled(spec: KernelSpec, sm: str) -> str:
    request = Artifact(
        spec=spec, sm=sm, symbol="", cubin="", ptx="", host="", entry="", pointers=0, scalars=0, toolchain=""
    )
    with tempfile.TemporaryDirectory(prefix="kf-lines-") as folder:
        Path(folder, "request.json").write_text(json.dumps(request.to_json()))
        environment = toolchain.compiler_environment(sm, folder, KEEP="ptx,cubin", LINEINFO="1")
        command = [sys.executable, "-m", "kernel_factory.compile", folder]
        subprocess.run(command, env=environment, capture_output=True, cwd=folder, check=False)
        return "".join(file.read_text() for file in Path(folder).glob("*.ptx"))


def shared_memory(family: Path) -> list[str]:
    """Where a family's host functions ask for dynamic shared memory, as "kernel.py:38"."""
    lines = ((path.name, n, line) for path in sorted(family.glob("*.py")) for n, line in _numbered(path))
    return [f"{name}:{n}" for name, n, line in lines if re.match(r"\s*smem\s*=[^=]", line)]


def _numbered(path: Path) -> list[tuple[int, str]]:
    return list(enumerate(path.read_text().splitlines(), 1))
