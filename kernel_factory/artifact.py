"""Artifact: one compiled kernel, and Facts: what its cubin says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_factory.family import KernelSpec


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """One compiled kernel. ``cubin``, ``ptx`` and ``host`` are sha256 names in the store.

    ``host`` is the DSL's own launch code as a relocatable object, ``entry`` its function and
    ``pointers``/``scalars`` what that takes: pointers first, then Int32s, then a stream.
    """

    spec: KernelSpec
    sm: str
    symbol: str
    cubin: str
    ptx: str
    host: str
    entry: str
    pointers: int
    scalars: int
    toolchain: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        constants = [list(pair) for pair in self.spec.constants]
        return {**vars(self), "spec": {**vars(self.spec), "constants": constants}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Artifact:
        """The inverse of ``to_json``."""
        spec = data["spec"]
        constants = tuple((name, value) for name, value in spec["constants"])
        return cls(**{**data, "spec": KernelSpec(**{**spec, "constants": constants})})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the ELF states, joined with the captured launch. Bytes, except ``registers`` and ``threads``.

    ``stack_bytes`` is 0 exactly when nothing is spilled and no local array exists.
    """

    kernel: str
    symbol: str
    parameters: tuple[tuple[int, int], ...]
    registers: int
    stack_bytes: int
    static_shared: int
    dynamic_shared: int
    threads: int
    code_bytes: int
    forbidden_opcodes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            **vars(self),
            "parameters": [list(p) for p in self.parameters],
            "forbidden_opcodes": list(self.forbidden_opcodes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """The inverse of ``to_json``."""
        return cls(
            **{
                **data,
                "parameters": tuple((o, s) for o, s in data["parameters"]),
                "forbidden_opcodes": tuple(data["forbidden_opcodes"]),
            }
        )
