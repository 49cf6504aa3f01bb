"""Toolchain: the versions and sources that decide a cubin's bytes, and the names of the SMs."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kf_runtime import cell

DSL_VERSION: Final = "4.7.0"
TVM_FFI_VERSION: Final = "0.1.14.post0"
SMS: Final = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")

# Largest dynamic shared memory of one block, in bytes (CUDA C++ Programming Guide, Compute Capabilities).
SHARED_LIMIT: Final = {
    "sm_80": 166912,
    "sm_89": 101376,
    "sm_90a": 232448,
    "sm_100a": 232448,
    "sm_103a": 232448,
    "sm_120a": 101376,
}


class ToolchainError(Exception):
    """The installed compiler is not the one that cubins are made with."""


def require() -> str:
    """Check the pinned DSL and name the toolchain. Raises ToolchainError with both versions."""
    found = version("nvidia-cutlass-dsl")
    if found != DSL_VERSION:
        raise ToolchainError(
            f"nvidia-cutlass-dsl: expected {DSL_VERSION}; found {found}; "
            f"run `pip install 'nvidia-cutlass-dsl[cu13]=={DSL_VERSION}'`"
        )
    return f"nvidia-cutlass-dsl {found} ({version('nvidia-cutlass-dsl-libs-cu13')} cu13)"


@lru_cache
def sources() -> str:
    """sha256 of the factory's and the runtime's sources, computed once: a process that imported older ones says so."""
    found = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(cell.__file__).parent):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".c", ".toml"):
                found.update(f"{folder.name}/{path.relative_to(folder).as_posix()}\0".encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def compiler_environment(sm: str, folder: str, **options: str) -> dict[str, str]:
    """The environment of a process that compiles for ``sm`` into ``folder``, from the sources that this one imports.

    ``options`` are further CUTE_DSL_ variables, by the rest of their names; none of the caller's own gets through.
    """
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")},
        **{f"CUTE_DSL_{name}": value for name, value in options.items()},
        "CUTE_DSL_ARCH": sm,
        "CUTE_DSL_DUMP_DIR": folder,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def ptx_tools(ptx: str) -> str:
    """The CUDA tools' release as the PTX header states it, for example ``V13.3.27``."""
    found = re.search(r"Cuda compilation tools, release [\d.]+, (V[\d.]+)", ptx)
    if found is None:
        raise ToolchainError("expected a 'Cuda compilation tools' line in the PTX header; found none")
    return found.group(1)
