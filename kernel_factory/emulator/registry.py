"""The opcode table: modules under ``ops`` register emitters, runtime functions and blocking terminators here.

An *emitter* writes the Python of one instruction into the block being compiled. It must consume every modifier;
whatever is left over is a PtxError, so that no modifier is ever guessed. A *runtime* function is callable from
generated code by its name. A *terminator* ends a block: its emitter returns the expression that the block returns,
and its resolver decides, with that value, where the threads go and whether they wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Op:
    """``writes``: the first operand is a destination. ``collective``: threads that must arrive together (0: none).

    ``tiles``: vector operands are fragments that the machine itself reads and writes, later than the instruction
    (wgmma); they are no locals of the block. ``partial``: a collective whose member mask may name part of a warp.
    """

    emit: Callable
    writes: bool = True
    collective: int = 0
    group: bool = False
    resolve: Callable | None = None
    tiles: bool = False
    partial: bool = False


OPS: dict[str, Op] = {}
RUNTIME: dict[str, Callable] = {}


def emits(
    *names: str,
    writes: bool = True,
    collective: int = 0,
    group: bool = False,
    tiles: bool = False,
    partial: bool = False,
) -> Callable:
    """Register an emitter ``f(e, ins, mods)`` for opcode prefixes such as ``add`` or ``cp.async.commit_group``.

    With ``group`` it is ``f(e, run)`` and takes a whole run of consecutive instructions of that opcode.
    """

    def register(function: Callable) -> Callable:
        for name in names:
            OPS[name] = Op(
                emit=function, writes=writes, collective=collective, group=group, tiles=tiles, partial=partial
            )
        return function

    return register


def terminates(*names: str, resolve: Callable, collective: int = 0, writes: bool = False) -> Callable:
    """Register a block-ending opcode: the emitter returns an expression, ``resolve`` acts on its value.

    With ``writes`` the first operand is a destination, which ``resolve`` (or a later wake-up) writes.
    """

    def register(function: Callable) -> Callable:
        for name in names:
            OPS[name] = Op(emit=function, writes=writes, resolve=resolve, collective=collective)
        return function

    return register


def runtime(function: Callable) -> Callable:
    """Make a function callable from generated code under its own name."""
    RUNTIME[function.__name__] = function
    return function


def find(opcode: str, modifiers: tuple[str, ...]) -> tuple[str, Op | None]:
    """The longest registered prefix of the full opcode, and its entry."""
    for count in range(len(modifiers), -1, -1):
        name = ".".join((opcode, *modifiers[:count]))
        if name in OPS:
            return name, OPS[name]
    return opcode, None
