"""Scaffold: a new family's folder, right as it stands.

An op's starting point is a folder of ``scaffolds/``: its cells, and the sources that teach. Where it has no sources,
the op's own family is copied, so that a new design of a large op begins from one that works.
"""

from __future__ import annotations

import keyword
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from kernel_factory.family import Family, discover

SCAFFOLDS: Final = Path(__file__).with_name("scaffolds")
_PLACEHOLDER: Final = "my_norm"
_INIT: Final = '''"""{name}: a family of {op}."""

from kernel_factory.families.{name} import plan
from kernel_factory.family import Family

FAMILY = Family(
    name="{name}",
    op="{op}",
    package=__name__,
    plan=plan.plan,{supersedes}
)
'''


class ScaffoldError(Exception):
    """A family that cannot be made: its name, its op, or its folder."""


def ops() -> tuple[str, ...]:
    """The ops that a family can be started for."""
    return tuple(sorted(folder.name for folder in SCAFFOLDS.iterdir() if (folder / "cells.toml").exists()))


def create(families: Path, name: str, op: str) -> Path:
    """Write the folder of a new family, whole or not at all. Raises ScaffoldError."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        expected = "lower-case letters, digits and underscores, a letter first, and no Python keyword"
        raise ScaffoldError(f"name: expected {expected}; found {name!r}")
    if op not in ops():
        raise ScaffoldError(f"op: expected one of {', '.join(ops())}; found {op!r}")
    target = families / name
    if target.exists():
        raise ScaffoldError(f"{target}: expected no such folder; found one; choose another name")
    rivals = [family for family in discover().values() if family.op == op]
    sources = _sources(op, name, rivals)
    names = "".join(f'"{rival.name}", ' for rival in rivals).rstrip()
    supersedes = f"\n    supersedes=({names})," if rivals else ""
    sources["__init__.py"] = _INIT.format(name=name, op=op, supersedes=supersedes)
    sources["cells.toml"] = (SCAFFOLDS / op / "cells.toml").read_text()
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=families))
    try:
        for file, text in sources.items():
            (draft / file).write_text(text)
        draft.chmod(0o755)
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _sources(op: str, name: str, rivals: list[Family]) -> dict[str, str]:
    """The sources by file name, with the new family's name in place of the old one."""
    lessons = sorted((SCAFFOLDS / op).glob("*.py.txt"))
    if lessons:
        return {file.name.removesuffix(".txt"): _renamed(file, _PLACEHOLDER, name) for file in lessons}
    if not rivals:
        raise ScaffoldError(f"op: {op} has no family to start from, and no lesson under {SCAFFOLDS / op}")
    origin = rivals[0]
    return {file.name: _renamed(file, origin.name, name) for file in sorted(origin.folder.glob("*.py"))}


def _renamed(file: Path, old: str, new: str) -> str:
    return re.sub(rf"\b{old}\b", new, file.read_text())
