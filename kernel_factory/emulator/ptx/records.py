"""Records of parsed PTX: operands, instructions, kernels.

Names are resolved while parsing (nested scopes redeclare registers and labels), so a Register is identified by
its number alone and a branch names the index of the instruction it goes to.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Register:
    number: int
    type: str
    name: str = field(compare=False)
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """``kind`` is int, f32 (``0f…``) or f64 (``0d…``), with the integer or the float's bit pattern as value; or
    decimal, with a Python float."""

    value: int | float
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class Symbol:
    """Address of a shared, local or parameter variable, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """%tid.x and its like, without the percent sign."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``; a tensor-map address ``[base, {c0, c1}]`` also has coordinates."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coordinates: tuple = ()


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``, and also the pair ``a|b``; ``None`` stands for the sink ``_``."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple
    guard: Register | None
    line: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A kernel parameter: size, alignment and offset in bytes."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A place in a variable's initial bytes that holds the address of another variable."""

    offset: int
    size: int
    name: str
    addend: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A variable of a state space, with its initial bytes (the rest is zeros in .global and .const)."""

    name: str
    size: int
    align: int
    external: bool = False
    space: str = "shared"
    data: bytes = b""
    links: tuple[Link, ...] = ()

    def renamed(self, name: str) -> Variable:
        return replace(self, name=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A device function: names of its return and input parameters, and where its body begins (-1: no body)."""

    name: str
    returns: tuple[str, ...]
    params: tuple[str, ...]
    body: int
    line: int


@dataclass(kw_only=True)
class KernelText:
    """One kernel: its flat statement list, where its labels are, and its variables."""

    name: str
    params: tuple[Param, ...]
    required_threads: tuple[int, int, int] | None
    required_cluster: tuple[int, int, int] | None = None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[Register] = field(default_factory=list)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)


@dataclass(kw_only=True)
class ModuleText:
    target: str
    version: str
    kernels: dict[str, KernelText]
