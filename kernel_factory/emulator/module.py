"""Modules and kernels: PTX text, parsed and compiled once per content."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from . import directed, lanes, ops, small_floats, variables  # noqa: F401 - importing them fills the opcode table
from .program import Program
from .ptx import Param, parse

_HEADER = re.compile(r"^\s*\.(target|version)\b[^\n]*", re.M)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """A compiled kernel and what a launch must supply (sizes in bytes)."""

    name: str
    params: tuple[Param, ...]
    static_shared: int
    required_threads: tuple[int, int, int] | None
    program: Program


@dataclass(frozen=True, kw_only=True, eq=False)
class Module:
    """The kernels of one PTX text."""

    target: str
    version: str
    kernels: dict[str, Kernel]
    digest: str


_cache: dict[str, dict[str, Kernel]] = {}
_KEPT = 64  # texts, the latest used; a mutation suite loads hundreds, and each can take 40 MB


def load(ptx_text: str) -> Module:
    """Parse and compile PTX text; raises PtxError for what is not emulated.

    Cached by the sha256 of the text without its .target and .version, which change nothing here: the same kernel
    for two SMs is compiled once.
    """
    digest = hashlib.sha256(_HEADER.sub("", ptx_text).encode()).hexdigest()
    kernels = _cache.pop(digest, None) or _compiled(ptx_text)
    _cache[digest] = kernels  # the latest used is last
    if len(_cache) > _KEPT:
        _cache.pop(next(iter(_cache)), None)
    target, version = (re.search(rf"^\s*\.{word}\s+([\w.]+)", ptx_text, re.M) for word in ("target", "version"))
    return Module(
        target=target[1] if target else "", version=version[1] if version else "", kernels=kernels, digest=digest
    )


def _compiled(ptx_text: str) -> dict[str, Kernel]:
    kernels = {}
    for name, kernel in parse(ptx_text).kernels.items():
        program = Program(kernel)
        kernels[name] = Kernel(
            name=name,
            params=kernel.params,
            static_shared=program.layout.static_shared,
            required_threads=kernel.required_threads,
            program=program,
        )
    return kernels
